"""Which GPUs of this node can map the memory of which others: what executors say of it, and moves have shown.

The *local* path maps the source's memory on the devices that it goes to. Where there is no peer access, or a
process does not see the other GPU, that fails, and whoever knows it beforehand takes another path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from worldmove.errors import WorldMoveError
from worldmove.executor.messages import HIDDEN, NO_ACCESS
from worldmove.executor.pool import ExecutorPool

Pair = tuple[str, str]
"""A GPU that regions lie on, and the one of this node that they go to."""

KEPT_S = 60.0
"""For so long an answer, or a refusal, is taken as it is: nobody tries again meanwhile."""
ANSWER_S = 3.0
"""For so long an answer is waited for: one that is stuck keeps no move between others waiting."""
MOST_ASKED = 64
"""GPUs that an executor is asked about at once; of those beyond, nothing is known: a move has to try."""


class Reaches:
    """What is known of each pair of GPUs.

    Args:
        pools: of this node's GPUs, by UUID.
    """

    def __init__(self, pools: Mapping[str, ExecutorPool]) -> None:
        self._pools = pools
        self._told: dict[Pair, tuple[str, float]] = {}
        self._mapped: set[Pair] = set()

    async def ask(self, sources: Collection[str], now: float) -> None:
        """Has every GPU's executor say which of these it can reach, unless that is known.

        Where one gives no answer, it stays unknown: then a move has to try.
        """
        self._told = {pair: told for pair, told in self._told.items() if now - told[1] < KEPT_S}
        await asyncio.gather(*(self._ask(mine, sources, now) for mine in self._pools))

    async def _ask(self, mine: str, sources: Collection[str], now: float) -> None:
        wanted = [source for source in sorted(sources) if source != mine and (source, mine) not in self._told]
        wanted = wanted[:MOST_ASKED]
        if not wanted:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                answers = await self._pools[mine].reach(wanted)
        except (WorldMoveError, TimeoutError):
            return
        for source, answer in zip(wanted, answers, strict=True):
            self._told[source, mine] = (_said(source, mine, answer), now)

    def why_not(self, pairs: Sequence[Pair], now: float) -> str:
        """Why memory of one of these pairs can't be mapped; empty where nothing is known against it."""
        for pair in pairs:
            why, at = self._told.get(pair, ("", now))
            if why and now - at < KEPT_S:
                return why
        return ""

    def proven(self, pairs: Sequence[Pair]) -> bool:
        """Whether a GPU's memory needs no mapping elsewhere, or a move has mapped it so before."""
        return all(source == mine or (source, mine) in self._mapped for source, mine in pairs)

    def mapped(self, pairs: Sequence[Pair]) -> None:
        """A move has mapped memory of these pairs."""
        self._mapped.update(pairs)

    def refused(self, pairs: Sequence[Pair], reason: str, now: float) -> bool:
        """Memory could not be mapped, whatever was said of these pairs; false where that can't be why."""
        apart = [pair for pair in pairs if pair[0] != pair[1]]
        ways = " or ".join(f"that of {source} by {mine}" for source, mine in apart)
        why = f"memory could not be mapped, {ways}: {reason}"
        self._mapped.difference_update(apart)
        self._told.update((pair, (why, now)) for pair in apart)
        return bool(apart)


def _said(source: str, mine: str, answer: int) -> str:
    if answer == HIDDEN:
        return (
            f"{mine} cannot map the memory of {source}: this node's processes do not see that GPU "
            "(CUDA_VISIBLE_DEVICES, or what its container was given)"
        )
    return f"{mine} cannot map the memory of {source}: no peer access" if answer == NO_ACCESS else ""
