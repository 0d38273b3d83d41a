"""Whether workers of a session or standby are there: signs of life, and ranks that are still to come back.

A connection says little: the worker that holds it may be stopped, or stuck in a call. So before a world is
handed over, every rank is asked, and has to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worldmove.errors import DeadlineError, NoWorkerError
from worldmove.hosting.pausing import RankSeat, Seat


@dataclass(slots=True, eq=False)
class _Call:
    missing: set[int]
    answered: asyncio.Future[None]


class RollCall:
    """Asks the ranks, and remembers who did not answer.

    Args:
        ranks: of the session or standby.
        occupied: whether a living process has a rank's memory, connected or not.

    Attributes:
        silent: ranks that owe a sign of life: nothing is to be handed to them until they give one.
    """

    def __init__(self, ranks: Sequence[RankSeat], occupied: Callable[[int], bool]) -> None:
        self.silent: set[int] = set()
        self._ranks = ranks
        self._occupied = occupied
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._news = asyncio.Event()

    async def ask(self, timeout_s: float) -> None:
        """Returns when every rank's worker has answered.

        Raises:
            NoWorkerError: a rank has no worker, or lost it meanwhile.
            DeadlineError: ranks did not answer within `timeout_s`; `details["ranks"]` are those, and
                `silent` from now on.
        """
        call = _Call({rank.number for rank in self._ranks}, asyncio.get_running_loop().create_future())
        self._numbers += 1
        number = self._numbers
        self._calls[number] = call
        try:
            for rank in self._ranks:
                if rank.seat is None:
                    raise NoWorkerError(f"rank {rank.number} has no worker", ranks=[rank.number])
                rank.seat.ping(number)
            async with asyncio.timeout(timeout_s):
                await call.answered
        except TimeoutError:
            late = sorted(call.missing)
            self.silent.update(late)
            raise DeadlineError(
                f"ranks {late} gave no sign of life within {timeout_s:g} s", ranks=late
            ) from None
        finally:
            del self._calls[number]

    def heard(self, number: int, seat: Seat, call: int) -> None:
        """A rank has answered a call, in time or not."""
        if self._ranks[number].seat is not seat:
            return
        self.silent.discard(number)
        asked = self._calls.get(call)
        if asked is None:
            return
        asked.missing.discard(number)
        if not asked.missing and not asked.answered.done():
            asked.answered.set_result(None)

    def came(self, number: int) -> None:
        """A rank has another worker, or its worker has come back: either has just spoken."""
        self.silent.discard(number)
        self._news.set()

    def left(self, number: int) -> None:
        """A rank has no worker any more: nobody answers for it."""
        self.silent.discard(number)
        for call in self._calls.values():
            if not call.answered.done():
                call.answered.set_exception(NoWorkerError(f"rank {number} lost its worker", ranks=[number]))

    async def back(self, timeout_s: float) -> None:
        """Waits for workers that live and have not found the node since it started again.

        A worker looks for its node at boundaries, about twice a second. Whoever has not come within
        `timeout_s` has no worker then: nothing is raised.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while any(rank.away and self._occupied(rank.number) for rank in self._ranks):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return
