"""The ranks of one session: pausing all of them at one block, and letting them go again.

Only the event loop's thread touches a `Ranks`, so every decision is made without being interrupted, and
acted upon afterwards. A rank is reached through its *seat*: a worker on the Unix socket or one on REST.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from worldmove.errors import ConflictError, DeadlineError, NoWorkerError, ProtocolError
from worldmove.page.control import MAX_BLOCK, NEVER, ControlPage, RankState
from worldmove.page.messages import Adopted, Advance, Answer, Ended, Moved, Resume

Change = Literal["attached", "lost", "revised", "started", "left"]
RanksState = Literal["live", "paused", "unattended", "fenced", "moved", "ended"]


class Seat(Protocol):
    """The worker of one rank, as `Ranks` reaches it. Neither call waits or raises."""

    def answer(self, message: Answer | Adopted) -> None:
        """Passes a message on; a worker that is gone is found elsewhere."""

    def close(self) -> None:
        """Ends the connection: another worker has taken the rank."""


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    seat: Seat | None = None
    stopped: int | None = None
    """The block at which it stands and waits for an answer."""
    started: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of a session stand at one boundary, until `resume` or `moved`; either ends the pause.

    Attributes:
        block: the boundary; 0 before the first block.
        host_states: one for each rank, as its worker gave it with this block.
        stopped_at: `time.monotonic()` when the last rank stopped.
        attended: whether workers stand there; an unattended session stands at its last boundary anyway.
    """

    block: int
    host_states: tuple[bytes, ...] = field(repr=False)
    stopped_at: float
    attended: bool
    _ranks: Ranks = field(repr=False)

    @property
    def held(self) -> bool:
        """Whether this pause is still in force."""
        return self._ranks.held is self

    def resume(self) -> None:
        """Lets the ranks generate on; nothing if the pause has ended already."""
        self._ranks.end_pause(self)

    def moved(self, destination: str, endpoint: str | None) -> None:
        """Tells the ranks that the session has gone; nothing if the pause has ended already."""
        if self.held:
            self._ranks.finish(Moved(destination, endpoint))


class Ranks:
    """The workers of one session or standby, and the control page that they share with the node.

    Args:
        page: this incarnation's control page; closed with the ranks.
        on_change: called with what happened to the ranks; must not raise or wait.
        former: the page of an earlier incarnation, into which workers that have not come back yet write.
            Such ranks are fenced: whoever of them stands stays so until `unfence` or `finish`.
    """

    def __init__(
        self, page: ControlPage, on_change: Callable[[Change], None], former: ControlPage | None = None
    ) -> None:
        self.page = page
        self.held: Pause | None = None
        self._ranks = [_Rank(number) for number in range(page.ranks)]
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._target: int | None = None
        self._together: asyncio.Future[None] | None = None
        self._final: Moved | Ended | None = None
        self._started = asyncio.Event()
        self._adoption: Adopted | None = None
        self._former = former
        self._away = set(range(page.ranks)) if former is not None else set()
        self._fenced = former is not None
        self._closing = False
        self._closed = False
        self._last_block = 0

    # What is seen from outside

    @property
    def attended(self) -> bool:
        """Whether every rank has a worker."""
        return all(rank.seat is not None for rank in self._ranks)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Ranks without a worker."""
        return tuple(rank.number for rank in self._ranks if rank.seat is None)

    @property
    def state(self) -> RanksState:
        """What the session's workers do now."""
        if self._final is not None:
            return "moved" if isinstance(self._final, Moved) else "ended"
        if self._fenced:
            return "fenced"
        if self.held is not None:
            return "paused"
        return "live" if self.attended else "unattended"

    @property
    def block(self) -> int:
        """The last block that every rank has published."""
        if self._closed:
            return self._last_block
        self._look_back()
        return min(self.page.block(rank.number) for rank in self._ranks)

    @property
    def consistent(self) -> bool:
        """Whether ranks without a worker left the state of one boundary, so that it can be taken up again."""
        self._look_back()
        vacant = self.vacant
        blocks = {self.page.block(number) for number in vacant}
        return len(blocks) <= 1 and all(self._left_well(number) for number in vacant)

    def _left_well(self, number: int) -> bool:
        block = self.page.block(number)
        remembered = block == 0 or self.page.has_host_state(number, block)
        return remembered and self.page.consistent(number) and not self.occupied(number)

    def occupied(self, number: int) -> bool:
        """Whether a living process has the rank's memory in its hands, connected or not."""
        before = self._former is not None and self._former.occupied(number)
        return before or self.page.occupied(number)

    def check_free(self, number: int) -> None:
        """Checks that another worker may take up the rank.

        Raises:
            ConflictError: its last worker lives, or left it in the middle of a block or without the host
                state of its last one; or the session is not here any more.
        """
        if self._final is not None:
            raise ConflictError(f"the session has {self.state}")
        self._look_back()
        if self._ranks[number].seat is not None or self.occupied(number):
            raise ConflictError(f"rank {number} is in the hands of a worker", rank=number)
        if not self._left_well(number):
            raise ConflictError(
                f"rank {number}'s worker left in the middle of a block, or without its host state",
                rank=number,
            )

    def _look_back(self) -> None:
        """Ranks that have not come back still publish in the former page."""
        if self._former is not None:
            for number in self._away:
                self.page.copy_rank(self._former, number)

    # Pausing

    async def pause(self, timeout: float, *, allow_unattended: bool = False) -> Pause:
        """Stops all ranks at one boundary later than every block published so far.

        Another pause in force is waited for. If this fails or is cancelled, nothing stays paused.

        Args:
            timeout: seconds, for everything.
            allow_unattended: a session without workers counts as standing at its last boundary, if its
                workers left it in the state of one.

        Raises:
            DeadlineError: not all ranks came to a boundary in time; `details["ranks"]` are the late ones.
            NoWorkerError: a rank has no worker, or lost it meanwhile.
            ConflictError: the session has moved or ended, or unattended memory is torn.
        """
        late: list[int] = []
        try:
            async with asyncio.timeout(timeout):
                await self._turn.acquire()
                try:
                    return await self._pause(allow_unattended)
                except BaseException:
                    late = [rank.number for rank in self._ranks if rank.stopped is None]
                    self._let_go()
                    raise
        except TimeoutError:
            raise DeadlineError(
                f"ranks {late} came to no common boundary within {timeout:g} s", ranks=late
            ) from None

    async def _pause(self, allow_unattended: bool) -> Pause:
        began = time.monotonic()
        if self._final is not None or self._fenced:
            raise ConflictError(f"the session is {self.state} and cannot be paused")
        if not self.attended:
            return self._pause_unattended(allow_unattended)
        self._together = asyncio.get_running_loop().create_future()
        self._choose()
        self._meet()
        await self._together
        block = self._target
        if block is None:  # pragma: no cover - _together completes only with a target
            raise ProtocolError("ranks met without a block to meet at")
        states = tuple(self.page.host_state(rank.number, block) for rank in self._ranks)
        self.held = Pause(block, states, self._stopped_at(began), attended=True, _ranks=self)
        return self.held

    def _pause_unattended(self, allowed: bool) -> Pause:
        vacant = list(self.vacant)
        if not allowed or len(vacant) != len(self._ranks):
            raise NoWorkerError(f"ranks {vacant} have no worker", ranks=vacant)
        if not self.consistent:
            raise ConflictError(
                "the last worker left in the middle of a block or without its host state: the state is torn"
            )
        # Whoever attaches meanwhile counts as stopped and waits for the answer, like everybody else.
        self.page.pause_at = 0
        block = self.block
        states = tuple(
            self.page.host_state(r.number, block) if self.page.has_host_state(r.number, block) else b""
            for r in self._ranks
        )
        self._target = block
        self.held = Pause(block, states, time.monotonic(), attended=False, _ranks=self)
        return self.held

    def _choose(self) -> None:
        """Picks a block that no rank has published yet, and makes sure that none has meanwhile.

        The distance doubles with each attempt: even a rank that runs through empty blocks is overtaken.
        """
        distance = 1
        while True:
            self._target = max(self.page.block(rank.number) for rank in self._ranks) + distance
            self.page.pause_at = self._target
            self.page.fence()
            if all(self.page.block(rank.number) < self._target for rank in self._ranks):
                return
            distance *= 2

    def _meet(self) -> None:
        """Sends on whoever stopped short, and notices when all have come."""
        if self._target is None or self._together is None:
            return
        for rank in self._ranks:
            if rank.stopped is not None and rank.stopped < self._target:
                self._answer(rank, Advance(self._target))
        if all(rank.stopped == self._target for rank in self._ranks) and not self._together.done():
            self._together.set_result(None)

    def _stopped_at(self, began: float) -> float:
        """When the last rank stopped, by its own reading of this host's clock, if that can be true."""
        now = time.monotonic()
        last = max(self.page.stopped_ns(rank.number) for rank in self._ranks) / 1e9
        return last if began <= last <= now else now

    def end_pause(self, pause: Pause) -> None:
        """Ends `pause` if it is the one in force."""
        if self.held is pause:
            self._let_go()

    def _let_go(self) -> None:
        """Ends whatever pause there is, wanted or in force, and hands the turn on."""
        self.held = None
        self._target = None
        self._together = None
        self._turn.release()
        if self._final is not None:
            return
        self.page.pause_at = NEVER
        self.page.fence()
        for rank in self._ranks:
            if rank.stopped is not None:
                self._answer(rank, Resume())

    def finish(self, answer: Moved | Ended) -> None:
        """Ends the session here: each rank hears it now if it stands, else at its next boundary."""
        if self._final is not None:
            return
        self._final = answer
        self.page.pause_at = 0
        self.page.fence()
        if self._together is not None and not self._together.done():
            self._together.set_exception(ConflictError(f"the session has {self.state}"))
        elif self.held is not None:
            self._let_go()
        for rank in self._ranks:
            if rank.stopped is not None:
                self._answer(rank, answer)

    # Workers coming, standing, going

    def attach(self, number: int, seat: Seat, *, stopped: int | None = None, waiting: bool = False) -> None:
        """A rank has a worker now.

        Args:
            number: of the rank.
            seat: its worker; a former one is closed.
            stopped: it stands at that block and waits for an answer.
            waiting: it came as a standby and waits to be adopted, which may have happened already.
        """
        rank = self._ranks[number]
        if rank.seat is not None and rank.seat is not seat:
            rank.seat.close()
        rank.seat = seat
        self._away.discard(number)
        rank.stopped = None if waiting else stopped
        if waiting and self._adoption is not None:
            seat.answer(self._adoption)
        self._settle(rank)
        if self.attended:
            self._on_change("attached")

    def detach(self, number: int, seat: Seat, *, left: bool = False) -> None:
        """The worker of a rank is gone (`left`: it said good-bye); nothing if another one has the rank."""
        rank = self._ranks[number]
        if rank.seat is not seat:
            return
        rank.seat = None
        rank.stopped = None
        if self._together is not None and not self._together.done():
            self._together.set_exception(NoWorkerError(f"rank {number} lost its worker", ranks=[number]))
        if self._final is None:
            self._on_change("left" if left else "lost")
        elif self._closing and not any(each.seat for each in self._ranks):
            self._unmap()

    def seat(self, number: int) -> Seat | None:
        """The worker of a rank."""
        return self._ranks[number].seat

    def paused(self, number: int, seat: Seat, block: int) -> None:
        """A rank stands at the boundary of `block`.

        Raises:
            ProtocolError: it stands already, or at a block other than the one it published.
        """
        rank = self._ranks[number]
        if rank.seat is not seat:
            return
        if rank.stopped is not None or block != self.page.block(number) or block > MAX_BLOCK:
            raise ProtocolError(f"rank {number} paused at block {block}, which it can't")
        rank.stopped = block
        self._settle(rank)

    def _settle(self, rank: _Rank) -> None:
        """Answers a rank that has just stopped, or lets it wait for the others."""
        if rank.stopped is None:
            return
        if self._final is not None:
            self._answer(rank, self._final)
        elif self._fenced:
            return
        elif self._target is None:
            self._answer(rank, Resume())
        elif self.held is None:
            if rank.stopped > self._target:
                # It numbers its blocks with gaps: the others follow.
                self._target = self.page.pause_at = rank.stopped
            self._meet()

    def _answer(self, rank: _Rank, message: Answer) -> None:
        rank.stopped = None
        if rank.seat is not None:
            rank.seat.answer(message)

    # A standby becomes a session's worker

    def load(self, block: int, host_states: tuple[bytes, ...]) -> None:
        """Writes block and host states into the page of waiting ranks, who are not told yet.

        Everything is there before anybody is told, so a worker (or a node) that dies between commit and
        adoption leaves an unattended session at `block`, not a lost one.

        Raises:
            ProtocolError: the number of host states is not that of the ranks, or the block is out of range.
            ManifestError: a host state is longer than the page's slots.
        """
        if len(host_states) != len(self._ranks) or not 0 <= block <= MAX_BLOCK:
            raise ProtocolError(
                f"{len(host_states)} host states at block {block} for {len(self._ranks)} ranks"
            )
        for rank, state in zip(self._ranks, host_states, strict=True):
            self.page.put_host_state(rank.number, block, state)
            self.page.publish(rank.number, block)
            self.page.set_state(rank.number, RankState.STOPPED)

    def adopt(self, session_id: str, epoch: int, endpoint: str | None = None) -> None:
        """Hands the loaded session to the waiting ranks, which may generate from now on."""
        self.page.epoch = epoch
        self.page.session_id = session_id
        self.page.fence()
        self._started.clear()
        self._adoption = Adopted(session_id, epoch, self.block, endpoint)
        for rank in self._ranks:
            rank.started = False
            if rank.seat is not None:
                rank.seat.answer(self._adoption)

    def started(self, number: int, seat: Seat) -> None:
        """A rank's serving stack has its adopted world in hand."""
        rank = self._ranks[number]
        if rank.seat is not seat:
            return
        rank.started = True
        if all(each.started for each in self._ranks):
            self._started.set()
            self._on_change("started")

    async def wait_started(self, timeout: float) -> None:
        """Returns when every rank has its adopted world in hand.

        Raises:
            DeadlineError: not within `timeout` seconds; the adoption stands all the same.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._started.wait()
        except TimeoutError:
            raise DeadlineError(f"adopted ranks did not start within {timeout:g} s") from None

    # A node that starts again, and one that goes

    def unfence(self) -> None:
        """The ledger says that this node owns the session: ranks that stand may generate on."""
        self._fenced = False
        for rank in self._ranks:
            self._settle(rank)

    def retire(self) -> None:
        """After `finish`: the page goes when the last worker has heard the end and left."""
        self._closing = True
        if not any(rank.seat for rank in self._ranks):
            self._unmap()

    def close(self) -> None:
        """Lets go of every worker without a word; they keep their memory and look for the next node."""
        for rank in self._ranks:
            if rank.seat is not None:
                rank.seat.close()
            rank.seat = None
        self._unmap()

    def _unmap(self) -> None:
        if self._closed:
            return
        self._last_block = self.block
        self._closed = True
        self.page.close()
        if self._former is not None:
            self._former.close()
            self._former = None
