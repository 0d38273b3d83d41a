"""The boundary over REST, for stacks that can't map the control page: the node writes the page for them."""

from __future__ import annotations

import asyncio
import time

from worldmove.errors import ConflictError, NotFoundError
from worldmove.hosting.ranks import Ranks
from worldmove.page.control import RankState
from worldmove.page.messages import Adopted, Answer, Ended, Moved
from worldmove.views import BoundaryView


class RestSeat:
    """A rank whose worker calls now and then; it counts as gone when it has not for `lease_s`."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks = ranks
        self._number = number
        self._answer: asyncio.Future[Answer] | None = None
        self._calls = 0
        self._asked: int | None = None
        self._lease: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Unknown: it comes over HTTP."""
        return 0

    @property
    def stands(self) -> bool:
        """Whether the rank waits for an answer."""
        return self._answer is not None and not self._answer.done()

    def answer(self, message: Answer | Adopted) -> None:
        """Keeps the answer for the call that waits, or for the next one."""
        if self._answer is not None and not self._answer.done() and not isinstance(message, Adopted):
            if not isinstance(message, Moved | Ended):
                self._ranks.page.set_state(self._number, RankState.RUNNING)
            self._answer.set_result(message)

    def ping(self, number: int) -> None:
        """A call that is there is a sign of life, else the next one will be."""
        self._asked = number
        if self._calls:
            self._heard()

    def _heard(self) -> None:
        if self._asked is not None:
            self._ranks.roll.heard(self._number, self, self._asked)
            self._asked = None

    def close(self) -> None:
        """Another worker has the rank, or the node goes."""
        if self._lease is not None:
            self._lease.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.cancel()

    def enter(self) -> None:
        """A call has come: while it is there, the lease does not run."""
        self._calls += 1
        self._heard()
        if self._lease is not None:
            self._lease.cancel()

    def leave(self, lease_s: float) -> None:
        """A call has been answered; the next one is due within `lease_s`."""
        self._calls -= 1
        if self._calls == 0 and self._ranks.seat(self._number) is self:
            self._lease = asyncio.get_running_loop().call_later(lease_s, self._lapse)

    def _lapse(self) -> None:
        self.close()
        self._ranks.detach(self._number, self)

    def stand(self, block: int) -> None:
        """The rank stands at `block` from now on."""
        self._answer = asyncio.get_running_loop().create_future()
        self._ranks.page.set_state(self._number, RankState.STOPPED, now_ns=time.monotonic_ns())
        self._ranks.paused(self._number, self, block)

    async def outcome(self, wait_s: float) -> BoundaryView:
        """What the rank may do, as soon as that is known, else after `wait_s`: ask again."""
        if self._answer is None:
            return BoundaryView(action="continue")
        done, _ = await asyncio.wait([self._answer], timeout=wait_s)
        if not done:
            return BoundaryView(action="wait")
        if self._answer.cancelled():
            raise ConflictError(f"rank {self._number} has another worker now, or the node goes")
        return view_of(self._answer.result())


def view_of(answer: Answer) -> BoundaryView:
    """An answer as REST gives it. A rank that is to advance generates on: the next boundary stops it."""
    match answer:
        case Moved():
            return BoundaryView(action="moved", destination=answer.destination, endpoint=answer.endpoint)
        case Ended():
            return BoundaryView(action="ended")
        case _:
            return BoundaryView(action="continue")


async def rest_boundary(
    ranks: Ranks, number: int, block: int, host_state: bytes, *, wait_s: float, lease_s: float
) -> BoundaryView:
    """One rank stands at the boundary of `block`, says a call over REST.

    The first call takes the rank. A call that is repeated, because its answer was lost or was `wait`,
    changes nothing and gets the same answer.

    Args:
        ranks: of the session.
        number: of the rank.
        block: the last one, or the one after it.
        host_state: of this boundary.
        wait_s: how long an answer may take.
        lease_s: how long the worker may be silent before it counts as gone.

    Raises:
        NotFoundError: no such rank.
        ConflictError: the rank has a worker on the socket, or blocks were left out.
        ManifestError: the host state is too long.
    """
    if not 0 <= number < ranks.page.ranks:
        raise NotFoundError(f"the session has no rank {number}", rank=number)
    seat = ranks.seat(number)
    if not isinstance(seat, RestSeat):
        ranks.check_free(number)
        seat = RestSeat(ranks, number)
        ranks.attach(number, seat)
    seat.enter()
    try:
        if block == ranks.page.block(number) + 1 and not seat.stands:
            _publish(ranks, number, seat, block, host_state)
        elif block != ranks.page.block(number):
            raise ConflictError(
                f"rank {number} is at block {ranks.page.block(number)}, not {block}",
                block=ranks.page.block(number),
            )
        return await seat.outcome(wait_s)
    finally:
        seat.leave(lease_s)


def _publish(ranks: Ranks, number: int, seat: RestSeat, block: int, host_state: bytes) -> None:
    page = ranks.page
    page.put_host_state(number, block, host_state)
    page.set_state(number, RankState.RUNNING)
    page.publish(number, block)
    page.fence()
    if page.pause_at <= block:
        seat.stand(block)
