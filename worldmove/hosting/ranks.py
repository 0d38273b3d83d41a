"""The ranks of one session: pausing all of them at one block, and letting them go again.

Only the event loop's thread touches a `Ranks`, so every decision is made without being interrupted, and
acted upon afterwards. A rank is reached through its *seat*: a worker on the Unix socket or one on REST.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from worldmove.errors import ConflictError, DeadlineError, NoWorkerError, ProtocolError
from worldmove.hosting.pages import Pages
from worldmove.hosting.pausing import Change, Pause, RankSeat, RanksState, Seat
from worldmove.hosting.rollcall import RollCall
from worldmove.page.control import MAX_BLOCK, NEVER, ControlPage
from worldmove.page.messages import Adopted, Advance, Answer, Ended, Moved, Resume

__all__ = ["Change", "Pause", "Ranks", "RanksState", "Seat"]


class Ranks:
    """The workers of one session or standby, and the control page that they share with the node.

    Args:
        pages: the control page, and former ones; closed with the ranks.
        on_change: called with what happened to the ranks; must not raise or wait.
        foreign: ranks whose memory the serving stack holds by itself (`shm`): it may write before it
            has ever come to the door.
        adopted: what ranks that still wait as a standby's are told, if the session is here already.

    Attributes:
        held: the pause in force.
        roll: who of the workers is really there.
    """

    def __init__(
        self,
        pages: Pages,
        on_change: Callable[[Change], None],
        *,
        foreign: frozenset[int] = frozenset(),
        adopted: Adopted | None = None,
    ) -> None:
        self.held: Pause | None = None
        self._pages = pages
        self._on_change = on_change
        self._foreign = foreign
        # A node that starts again fences its slots: who stands stays so until `unfence` or `finish`.
        self._fenced = pages.recovered
        self._ranks = [RankSeat(number, away=self._fenced) for number in range(pages.page.ranks)]
        self.roll = RollCall(self._ranks, pages.occupied)
        self._turn = asyncio.Lock()
        self._target: int | None = None
        self._together: asyncio.Future[None] | None = None
        self._final: Moved | Ended | None = None
        self._adoption = adopted
        self._retired = False
        self._last_block = 0

    # What is seen from outside

    @property
    def page(self) -> ControlPage:
        """The control page in force; not after the ranks have closed."""
        return self._pages.page

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
        if self._pages.closed:
            return self._last_block
        self._look_back()
        return min(self.page.block(rank.number) for rank in self._ranks)

    @property
    def consistent(self) -> bool:
        """Whether the ranks without a worker left the state of one boundary, and nobody writes any more."""
        self._look_back()
        blocks = {self.page.block(number) for number in self.vacant}
        return len(blocks) <= 1 and all(
            self._pages.quiet(number, foreign=number in self._foreign) for number in self.vacant
        )

    def check_free(self, number: int) -> None:
        """Checks that a worker may take up the rank.

        Raises:
            ConflictError: it has one, or as `Pages.check_left`; or the session is not here any more.
        """
        if self._final is not None:
            raise ConflictError(f"the session has {self.state}")
        self._look_back()
        self._pages.check_left(number, seated=self._ranks[number].seat is not None)

    def _look_back(self) -> None:
        for rank in self._ranks:
            if rank.away:
                self._pages.look_back(rank.number)

    # Pausing

    async def pause(self, timeout_s: float, *, allow_unattended: bool = False) -> Pause:
        """Stops all ranks at one boundary later than every block published so far.

        Another pause in force is waited for. If this fails or is cancelled, nothing stays paused.

        Args:
            timeout_s: for everything.
            allow_unattended: a session without workers counts as standing at its last boundary, if its
                workers left it in the state of one.

        Raises:
            DeadlineError: not all ranks came to a boundary in time; `details["ranks"]` are the late ones.
            NoWorkerError: a rank has no worker, or lost it meanwhile.
            ConflictError: the session has moved or ended or is fenced, or unattended memory is torn.
        """
        late: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
                try:
                    return await self._pause(allow_unattended)
                except BaseException:
                    late = [rank.number for rank in self._ranks if rank.stopped is None]
                    self._let_go()
                    raise
        except TimeoutError:
            raise DeadlineError(
                f"ranks {late} came to no common boundary within {timeout_s:g} s", ranks=late
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
        return self._hold(began, attended=True)

    def _pause_unattended(self, allowed: bool) -> Pause:
        vacant = list(self.vacant)
        if not allowed or len(vacant) != len(self._ranks):
            raise NoWorkerError(f"ranks {vacant} have no worker", ranks=vacant)
        if not self.consistent:
            raise ConflictError(
                "the last worker lives, or left in the middle of a block or without its host state"
            )
        # Whoever attaches meanwhile counts as stopped and waits for the answer, like everybody else.
        self._target = self.block
        self.page.pause_at = 0
        return self._hold(time.monotonic(), attended=False)

    def _hold(self, began: float, *, attended: bool) -> Pause:
        block = self._target
        if block is None:
            raise ProtocolError("ranks stand without a block to stand at")
        states = tuple(self._pages.host_state(rank.number, block) for rank in self._ranks)
        stopped_at = self._pages.last_stop(began) if attended else began
        self.held = Pause(block, states, stopped_at, attended, self)
        return self.held

    def _choose(self) -> None:
        """Picks a block that no rank has published yet, and makes sure that none has meanwhile.

        The distance doubles with each attempt: even a rank that runs through empty blocks is overtaken.
        """
        distance = 1
        while True:
            target = max(self.page.block(rank.number) for rank in self._ranks) + distance
            self._target = self.page.pause_at = target
            self.page.fence()
            if all(self.page.block(rank.number) < target for rank in self._ranks):
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
        if self._final is not None or self._fenced or self._pages.closed:
            return
        self.page.pause_at = NEVER
        self.page.fence()
        for rank in self._ranks:
            self._settle(rank)

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
            self._settle(rank)

    # Workers coming, standing, going

    def attach(self, number: int, seat: Seat, *, stopped: int | None = None, waiting: bool = False) -> None:
        """A rank has a worker now.

        Args:
            number: of the rank.
            seat: its worker; a former one is closed.
            stopped: it stands at that block and waits for an answer.
            waiting: it came as a standby's and waits to be adopted, which may have happened already.
        """
        rank = self._ranks[number]
        if self._pages.closed:
            seat.close()
            return
        if rank.seat is not None and rank.seat is not seat:
            rank.seat.close()
        rank.seat, rank.waiting, rank.away = seat, waiting, False
        rank.stopped = None if waiting else stopped
        self.roll.came(number)
        if self._pages.former and not any(each.away for each in self._ranks):
            self._pages.forget_former()
        self._settle(rank)
        if self.attended:
            self._on_change("attached")

    def detach(self, number: int, seat: Seat, *, left: bool = False) -> None:
        """The worker of a rank is gone (`left`: it said good-bye); nothing if another one has the rank."""
        rank = self._ranks[number]
        if rank.seat is not seat:
            return
        rank.seat, rank.stopped, rank.waiting = None, None, False
        self.roll.left(number)
        if self._together is not None and not self._together.done():
            self._together.set_exception(NoWorkerError(f"rank {number} lost its worker", ranks=[number]))
        if self._final is None:
            self._on_change("left" if left else "lost")
        elif self._retired:
            self.retire()

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
        if rank.stopped is not None or rank.waiting or block != self.page.block(number) or block > MAX_BLOCK:
            raise ProtocolError(f"rank {number} stands at block {block}, which it can't")
        rank.stopped = block
        self._settle(rank)

    def _settle(self, rank: RankSeat) -> None:
        """Answers a rank that waits for a word, or lets it wait for the others."""
        if rank.seat is None or (rank.stopped is None and not rank.waiting):
            return
        if self._final is not None:
            self._answer(rank, self._final)
        elif self._fenced:
            return
        elif rank.waiting:
            if self._adoption is not None:
                self._answer(rank, self._adoption)
        elif self._target is None:
            self._answer(rank, Resume())
        elif self.held is None and rank.stopped is not None:
            if rank.stopped > self._target:
                # It numbers its blocks with gaps: the others follow.
                self._target = self.page.pause_at = rank.stopped
            self._meet()

    def _answer(self, rank: RankSeat, message: Answer | Adopted) -> None:
        rank.stopped, rank.waiting = None, False
        if rank.seat is not None:
            rank.seat.answer(message)

    # A standby becomes a session's worker

    def load(self, block: int, host_states: tuple[bytes, ...]) -> None:
        """Writes block and host states into the page of waiting ranks, who are not told yet.

        Everything is there before anybody is told, so a worker (or a node) that dies between commit and
        adoption leaves an unattended session at `block`, not a lost one.

        Raises:
            ProtocolError, ManifestError: as `Pages.load`.
        """
        self._pages.load(block, host_states)

    def adopt(self, session_id: str, epoch: int, endpoint: str | None = None) -> None:
        """Hands the loaded session to the waiting ranks, which may generate from now on."""
        self.page.epoch = epoch
        self.page.session_id = session_id
        self.page.fence()
        self._adoption = Adopted(session_id, epoch, self.block, endpoint)
        for rank in self._ranks:
            rank.started = False
            self._settle(rank)

    def started(self, number: int, seat: Seat) -> None:
        """A rank's serving stack has its adopted world in hand."""
        rank = self._ranks[number]
        if rank.seat is not seat:
            return
        rank.started = True
        if all(each.started for each in self._ranks):
            self._on_change("started")

    # A node that starts again, and one that goes

    def unfence(self) -> None:
        """The ledger says that this node owns the session: ranks that stand may generate on."""
        self._fenced = False
        for rank in self._ranks:
            self._settle(rank)

    def retire(self) -> None:
        """After `finish`: the page goes when the last worker has heard the end and left."""
        self._retired = True
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
        if not self._pages.closed:
            self._last_block = self.block
            self._pages.close()
            self._on_change = lambda _change: None  # the slot that listens has these ranks: no cycle stays
