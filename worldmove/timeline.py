"""When things happened in one move, by one clock: that of the node which writes its receipt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from worldmove.views import BlockEnd

MOST_BLOCKS = 256
LOOKS_PER_BLOCK = 16
LEAST_LOOK_S = 0.005
MOST_LOOK_S = 0.05


class Timeline:
    """Times in ms since the request; whoever notes one gives a reading of this process's monotonic clock.

    Workers publish that a block has ended by one store into shared memory, which tells nobody: the node
    looks, about sixteen times a block, so an end is seen up to a sixteenth of a block late (5 to 50 ms).

    Args:
        started: when the move was asked for, as `time.monotonic()` reads.
        block_ms: how long a block of the world takes.

    Attributes:
        rounds: when each round of copying began. stopped_ms: when the last rank stood. resumed_ms: when the
            world could go on: the standby at the destination, as this node heard of it, or here again.
    """

    def __init__(self, started: float, block_ms: float) -> None:
        self.rounds: list[float] = []
        self.stopped_ms: float | None = None
        self.resumed_ms: float | None = None
        self._started = started
        self._blocks: list[BlockEnd] = []
        self._seen: int | None = None
        self._look_s = min(max(block_ms / 1000 / LOOKS_PER_BLOCK, LEAST_LOOK_S), MOST_LOOK_S)

    @property
    def blocks(self) -> tuple[BlockEnd, ...]:
        """Blocks whose end was seen, `MOST_BLOCKS` at most: of more, every second one is dropped again."""
        return tuple(self._blocks)

    @property
    def pause_ms(self) -> float | None:
        """How long the world stood, once it could go on."""
        if self.stopped_ms is None or self.resumed_ms is None:
            return None
        return self.resumed_ms - self.stopped_ms

    def begins(self, now: float) -> None:
        """A round of copying begins."""
        self.rounds.append(self._ms(now))

    def saw(self, block: int, now: float) -> None:
        """`block` had ended when somebody looked; what had ended at the first look ended before it."""
        if self._seen is not None and block > self._seen:
            self._add(block, now)
        self._seen = max(block, self._seen or 0)

    def stopped(self, block: int, at: float, *, attended: bool) -> None:
        """The world stands; its last block ended then, unless nobody was there to generate one."""
        self.stopped_ms = self._ms(at)
        if attended:
            self._blocks = [each for each in self._blocks if each.number < block]
            self._add(block, at)

    def resumed(self, now: float) -> None:
        """The world may go on, where it goes on."""
        self.resumed_ms = self._ms(now)

    async def watch(self, block: Callable[[], int]) -> None:
        """Looks at the last block that has ended, until the world stands; cancelled if it never does.

        Looks become rarer as blocks become many, so that a long move costs no more than a short one.
        """
        while self.stopped_ms is None:
            now = time.monotonic()  # before the look: an end that is seen later has come later
            self.saw(block(), now)
            await asyncio.sleep(self._look_s)

    def _add(self, block: int, at: float) -> None:
        if len(self._blocks) == MOST_BLOCKS:
            del self._blocks[::2]
            self._look_s *= 2
        self._blocks.append(BlockEnd(number=block, ms=self._ms(at)))

    def _ms(self, at: float) -> float:
        return (at - self._started) * 1000
