"""The receiver's gate: bytes are pulled only under a grant, so that senders never answer unscheduled.

Only the receiver sees how many senders answer at once. What is granted to whom, and how much at once, is
decided in `worldmove.granting`, on times that it is given; `Gate` runs that on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from math import inf

from worldmove.errors import ConfigError, ProcessLostError, ValidationError
from worldmove.granting.bucket import Bucket
from worldmove.granting.meter import Epoch
from worldmove.granting.pace import MOST_SENDERS, MOST_WINDOW, WINDOW_S, Pace
from worldmove.granting.pauses import Need, Pauses
from worldmove.granting.policy import Member, Policy, Request
from worldmove.views import GateView

MIN_BATCH = 256 * 1024
_TICK_S = 1e-3
"""The event loop's timers count milliseconds."""
SLOWER = 10
"""A grant may take this many times as long as its bytes should, beside the patience that is given anyway."""


class Grant:
    """Leave to have `nbytes` sent; given back by `landed` or `release`, once, whichever comes first."""

    def __init__(self, gate: Gate, request: Request) -> None:
        self.nbytes = request.nbytes
        self._gate = gate
        self._request = request

    def landed(self) -> None:
        """The bytes have arrived."""
        self._gate._landed(self._request)  # noqa: SLF001 - the two are one

    def release(self) -> None:
        """The bytes will not arrive any more; nothing where they have."""
        self._gate._released(self._request)  # noqa: SLF001


class Pass:
    """One move's place at the gate."""

    def __init__(self, gate: Gate, member: Member, on_cut: Callable[[str], None]) -> None:
        self._gate = gate
        self._member = member
        self.on_cut = on_cut

    @property
    def name(self) -> str:
        """Of the move."""
        return self._member.name

    def batch_bytes(self, most: int, lanes: int = 1) -> int:
        """A good size for one grant where two are under way on each lane; at most `most`."""
        return self._gate._next_batch(most, lanes)  # noqa: SLF001

    def stand(self, seconds: float | None) -> None:
        """The move's world stands and has to go on within `seconds`; `None`: it runs again."""
        self._gate._stand(self._member, seconds)  # noqa: SLF001

    async def acquire(self, nbytes: int) -> Grant:
        """Waits for a grant of `nbytes`. A cancelled wait costs nothing.

        Raises:
            ValidationError: `nbytes` is not above 0.
            ProcessLostError: the move has left the gate.
        """
        if nbytes <= 0:
            raise ValidationError(f"a grant has at least 1 byte, not {nbytes}", field="nbytes")
        return await self._gate._acquire(self._member, nbytes)  # noqa: SLF001

    @contextlib.asynccontextmanager
    async def grant(self, nbytes: int) -> AsyncIterator[Grant]:
        """Holds a grant of `nbytes` for the block, whose end says that they landed; raises as `acquire`."""
        grant = await self.acquire(nbytes)
        try:
            yield grant
            grant.landed()
        finally:
            grant.release()

    def leave(self) -> None:
        """The move is over and nothing of it is under way: all that it held goes back, once."""
        self._gate._leave(self._member)  # noqa: SLF001


class Gate:
    """Grants bytes on the event loop; one per node, shared by all its inbound moves.

    Args:
        rate_bytes_per_s: what the path carries at most; `None` grants without pacing.
        burst_bytes: how much a paced gate may grant at once after a rest.
        outstanding_bytes: how much may be granted and not landed, to all senders together, whatever is found
            by measuring; a larger grant is given when nothing else is out. `None`: up to 1 GiB.
        senders: how many may answer at once at most.
        patience_s: how long a grant may stay out, beside ten times what its bytes should take.
        on_epoch: told what was measured, and when.
        open_to_all: as many senders and bytes at once as the bounds allow, whatever comes of it.

    Raises:
        ConfigError: one of them is not above 0, or the rate is no number.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        burst_bytes: int,
        *,
        outstanding_bytes: int | None = None,
        senders: int = MOST_SENDERS,
        patience_s: float = inf,
        on_epoch: Callable[[Epoch, float], None] | None = None,
        open_to_all: bool = False,
    ) -> None:
        if rate_bytes_per_s is not None and not 0 < rate_bytes_per_s < inf:
            raise ConfigError(f"the gate's rate must be above 0, not {rate_bytes_per_s}", option="gate_rate")
        for name, value in (
            ("burst_bytes", burst_bytes),
            ("outstanding_bytes", outstanding_bytes),
            ("senders", senders),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"the gate's {name} must be above 0, not {value}", option=name)
        self._bucket = Bucket(rate_bytes_per_s, burst_bytes)
        self.pace = Pace(senders, outstanding_bytes or MOST_WINDOW, still=open_to_all)
        self._policy = Policy(self._bucket, self.pace, on_epoch, patience_s=patience_s)
        self._patience = patience_s
        self._passes: dict[Member, Pass] = {}
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._cut = 0
        self._pauses = Pauses()
        self._next_turn: asyncio.TimerHandle | None = None
        self._turns: dict[str, asyncio.Future[None]] = {}

    @property
    def rate(self) -> float | None:
        """Bytes per second that it grants at most."""
        return self._bucket.rate

    @property
    def busy(self) -> bool:
        """Grants are out or waited for."""
        return bool(self._policy.outstanding or self._policy.waiting)

    @property
    def bound_bytes(self) -> int:
        """What may be out at once at this moment."""
        return self._policy.allowed[1]

    def batch_bytes(self, most: int, lanes: int = 1) -> int:
        """What `Pass.batch_bytes` would say; nothing is asked for, and nothing is learned of it."""
        return self._batch(most, self.bound_bytes // (2 * lanes))

    def _next_batch(self, most: int, lanes: int) -> int:
        batch = self.batch_bytes(most, lanes)
        if batch < self._batch(most, most):
            self._policy.hold_back()
        return batch

    def _batch(self, most: int, part: int) -> int:
        """The size of a batch where the window allows `part`."""
        if self._bucket.rate is not None:
            part = min(part, int(self._bucket.rate * WINDOW_S))
        return min(most, max(MIN_BATCH, part))

    def blocked_s(self, line: float, *, copying: int, standing: int) -> float:
        """How long a world that stands may wait for what is granted already.

        Args:
            line: bytes per second.
            copying: bytes of all moves that come and copy; only beside them another window is tried.
            standing: bytes of the largest of those whose worlds stand for all of their state: one of them
                comes at a time, and whose turn it is before is counted elsewhere (`granting.pauses`).
        """
        most = self.pace.reach[1] if copying else self.bound_bytes
        out = min(most, copying + standing)
        return (out if self._bucket.rate is None else self.batch_bytes(out)) / line

    def join(
        self, name: str, sender: str, deadline_s: float = inf, on_cut: Callable[[str], None] | None = None
    ) -> Pass:
        """A move comes to the gate.

        Args:
            name: of the move.
            sender: the node that its bytes come from.
            deadline_s: when it has to be done, in seconds from now.
            on_cut: told why, when its sender lets a grant go by.
        """
        member = self._policy.join(name, sender, time.monotonic() + deadline_s)
        one = self._passes[member] = Pass(self, member, on_cut or (lambda _reason: None))
        return one

    async def turn(self, name: str, need: Need) -> float:
        """Waits until a move may stop its world (`granting.pauses`); returns the seconds that it waited.

        It holds its turn until `turn_over`, also if the wait is cancelled.
        """
        if self._pauses.may(name):
            return 0.0
        started = time.monotonic()
        self._pauses.want(name, need)
        future = self._turns[name] = asyncio.get_running_loop().create_future()
        self._give_turns()
        await future
        return time.monotonic() - started

    def stands(self, name: str, seconds: float) -> None:
        """The world of a move that has its turn stands, and has to go on within `seconds`."""
        now = time.monotonic()
        self._pauses.stands(name, now + seconds, now)
        self._give_turns()

    def progress(self, name: str, work_s: float) -> None:
        """So much of the receiver's work is left for a world that stands."""
        self._pauses.progress(name, work_s, time.monotonic())
        if self._pauses.waiting:
            self._give_turns()

    def turn_over(self, name: str) -> None:
        """The move's world runs, or will not be stopped yet."""
        future = self._turns.pop(name, None)
        if future is not None and not future.done():
            future.cancel()
        self._pauses.leave(name, time.monotonic())
        self._give_turns()

    def view(self) -> GateView:
        """How the gate stands."""
        policy = self._policy
        senders, bound = policy.allowed
        return GateView(
            rate_bytes_per_s=self._bucket.rate,
            outstanding_bytes=policy.outstanding,
            granted_bytes=policy.granted,
            waiting=policy.waiting,
            bound_bytes=bound,
            senders=policy.senders,
            most_senders=senders,
            collapses=self.pace.collapses,
            cut_off=self._cut,
            moves=len(self._passes),
            waiting_pauses=self._pauses.waiting,
            goodput_bytes_per_s=self.pace.goodput,
        )

    async def _acquire(self, member: Member, nbytes: int) -> Grant:
        request = self._policy.ask(member, nbytes)
        if request.settled:
            raise ProcessLostError(f"move {member.name} has left the gate")
        future = self._futures[request.number] = asyncio.get_running_loop().create_future()
        self._serve()
        try:
            await future
        except BaseException:
            self._forsaken(request, future)
            raise
        return Grant(self, request)

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        granted, wait = self._policy.due(now)
        for request in granted:
            future = self._futures.pop(request.number)
            if future.done():  # cancelled; its task has yet to run, and asks for another round then
                self._policy.undo(request, now)
            else:
                future.set_result(None)
        if wait is not None:
            self._timer = asyncio.get_running_loop().call_later(max(wait, _TICK_S), self._serve)
        if granted and self._watch is None and self._patience < inf:
            self._watch = asyncio.get_running_loop().call_later(self._patience, self._look)

    def _look(self) -> None:
        """Cuts off senders that let grants go by, and looks again while any is out."""
        self._watch = None
        rate = self.pace.goodput
        for request in self._policy.overdue(time.monotonic(), self._patience):
            member = request.member
            allowed = self._patience + (SLOWER * member.outstanding / rate if rate else 0.0)
            granted_at = request.granted_at
            if granted_at is None or time.monotonic() - granted_at <= allowed or member not in self._passes:
                continue
            self._cut += 1
            reason = f"{member.sender} did not send {request.nbytes} granted bytes within {allowed:.3g} s"
            self._passes[member].on_cut(reason)
        if self._policy.outstanding:
            self._watch = asyncio.get_running_loop().call_later(self._patience, self._look)

    def _forsaken(self, request: Request, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._futures.pop(request.number, None)
            self._policy.withdraw(request)
        else:  # granted, and cancelled before its task could run
            self._policy.undo(request, time.monotonic())
        self._serve()

    def _landed(self, request: Request) -> None:
        self._policy.landed(request, time.monotonic())
        self._serve()

    def _released(self, request: Request) -> None:
        if not request.settled:
            self._policy.give_back(request, time.monotonic())
            self._serve()

    def _stand(self, member: Member, seconds: float | None) -> None:
        self._policy.stand(member, None if seconds is None else time.monotonic() + seconds)
        self._serve()

    def _leave(self, member: Member) -> None:
        self._passes.pop(member, None)
        for request in self._policy.leave(member, time.monotonic()):
            future = self._futures.pop(request.number)
            if not future.done():
                future.set_exception(ProcessLostError(f"move {member.name} has left the gate"))
        self._serve()

    def _give_turns(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        now = time.monotonic()
        for name in self._pauses.due(now):
            future = self._turns.get(name)
            if future is not None and not future.done():
                future.set_result(None)
        wait = self._pauses.wait_s(now)
        if wait is not None:
            self._next_turn = asyncio.get_running_loop().call_later(max(wait, _TICK_S), self._give_turns)
