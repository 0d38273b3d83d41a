"""When to stop copying a world that is being written: the policy of live rounds, pure.

What one block makes new is measured: what a round had to send, by the blocks between its table and the one
before. While a round lasts, blocks go by, and the pause has to bring them, and the block that is generated
until then. So another round is worth it as long as it lets fewer of them go by. Then the world is paused, if
what is left by then fits the horizon at the rate that the path has shown; if not, no number of rounds would
help, and the move ends early.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MS_TO_GBPS = 8 / 1e6
"""Bytes a millisecond as Gb/s."""
SPARE_BLOCKS = 5
"""So many blocks must fit before the deadline where one is waited for."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one round took.

    Attributes:
        leaves, bytes: what was sent.
        ms: until it was read back.
        copied_bytes: what lay elsewhere at the destination, and was copied there.
        wire_ms: of `ms`, from the first request to the last landing, at the full rate; 0: unknown.
        blocks: that the world generated between the round's table and the table (or the begin) of the one
            before.
    """

    leaves: int
    bytes: int
    ms: float
    copied_bytes: int = 0
    wire_ms: float = 0.0
    blocks: int = 0


class Hopeless(msgspec.Struct, frozen=True, kw_only=True):
    """Why a world can't be paused within its horizon, however often it is copied before.

    Attributes:
        bytes: to be sent in the pause. gbps: at which the path brings them.
        needed_gbps: at which they would fit; `None` where what comes beside them takes the whole horizon.
    """

    bytes: int
    pause_ms: float
    horizon_ms: float
    gbps: float
    needed_gbps: float | None

    def __str__(self) -> str:
        wanted = (
            f"it would fit at {self.needed_gbps:.3g} Gb/s"
            if self.needed_gbps is not None
            else "reading it alone takes that long"
        )
        return (
            f"{self.bytes} bytes would be left, a pause of {self.pause_ms:.0f} ms at {self.gbps:.3g} Gb/s; "
            f"the horizon is {self.horizon_ms:g} ms, and {wanted}"
        )


class RoundPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When live rounds and repairs end.

    Attributes:
        max_rounds: live rounds at most.
        max_repairs: times that damaged leaves are sent again before the move aborts.
        shrink: a further round must leave less than this share of the blocks that would be left without it.
        small_bytes: a remainder that is paused for at once.
        horizon_ms: the session's horizon.
        block_ms: how long one of its blocks takes.
        state_bytes: more than all of it is never left.
        strided: whether the session may move what it has by strides.
    """

    max_rounds: int = 8
    max_repairs: int = 3
    shrink: float = 0.8
    small_bytes: int = 1 << 20
    horizon_ms: float = 250.0
    block_ms: float = 750.0
    state_bytes: int = 1 << 62
    strided: bool = False

    def waits(self, rounds: Sequence[Taken], since: int, waited_ms: float, left_ms: float) -> bool:
        """Does what follows these rounds wait for the end of a block?

        A path may be quicker than the world. Then the second round finds nothing that has moved, nothing can
        be foreseen, and all that the next block moves is copied in the pause.

        Args:
            rounds: what was taken so far.
            since: blocks that the world has generated since the first round began.
            waited_ms: for how long it was waited; a world that doesn't generate is not waited for.
            left_ms: until the move's deadline.
        """
        quick = self.strided and len(rounds) == 1 < self.max_rounds and since < 1
        return quick and waited_ms < self.block_ms < left_ms / SPARE_BLOCKS

    def another(self, rounds: Sequence[Taken], since: int = 0) -> bool:
        """Is one more live round worth its bytes, after these?

        Args:
            rounds: what was taken so far.
            since: blocks that the world has generated since the last table was begun.
        """
        last = rounds[-1]
        if len(rounds) >= self.max_rounds or last.bytes <= self.small_bytes:
            return False
        if len(rounds) == 1:
            return True
        expected_ms = self._beside(last) + self._dirty(rounds, since) / self._rate(rounds)
        return expected_ms / self.block_ms + 1 < self.shrink * (since + 1)

    def hopeless(self, rounds: Sequence[Taken], since: int = 0) -> Hopeless | None:
        """Why a pause after these rounds would not fit the horizon; `None` if it would, or nobody knows.

        One block more than `since` is generated until every rank stands.
        """
        last = rounds[-1]
        if len(rounds) < 2 or last.bytes <= self.small_bytes:
            return None
        left, rate = self._dirty(rounds, since + 1), self._rate(rounds)
        beside = self._beside(last)
        pause_ms = beside + left / rate
        if not pause_ms > self.horizon_ms:
            return None
        room = self.horizon_ms - beside
        return Hopeless(
            bytes=int(left),
            pause_ms=pause_ms,
            horizon_ms=self.horizon_ms,
            gbps=rate * MS_TO_GBPS,
            needed_gbps=left / room * MS_TO_GBPS if room > 0 else None,
        )

    def _dirty(self, rounds: Sequence[Taken], blocks: int) -> float:
        """Bytes that so many blocks make new, by the dirtiest round so far."""
        per_block = max(taken.bytes / max(taken.blocks, 1) for taken in rounds[1:])
        return min(float(self.state_bytes), per_block * blocks)

    @staticmethod
    def _beside(taken: Taken) -> float:
        """Milliseconds of a round in which nothing was on its way."""
        return max(taken.ms - (taken.wire_ms or taken.ms), 0.0)

    @staticmethod
    def _rate(rounds: Sequence[Taken]) -> float:
        """Bytes a millisecond that the path has carried in its best round; others were too short to tell."""
        return max((taken.bytes / (taken.wire_ms or taken.ms or 1.0) for taken in rounds), default=1.0) or 1.0
