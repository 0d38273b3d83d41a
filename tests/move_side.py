"""What both sides of a simulated move share: the machine, its driver's jobs, and the ledger's calls."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.driver import ABORTABLE, WORK, Driver
from worldmove.errors import LedgerError, WorldMoveError
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import Claim, SessionRecord
from worldmove.ledger.transactions import settle, swap
from worldmove.machine import Machine, Role
from worldmove.protocol import State
from worldmove.rounds import RoundPolicy

if TYPE_CHECKING:
    from move_kit import Move

LEAVES = 4
LEAF_BYTES = 4096
DAMAGE, GONE = 666, 999
POLICY = RoundPolicy(max_rounds=4, max_repairs=2, small_bytes=1000, horizon_ms=100.0, block_ms=50.0)
Fault = Literal["none", "before", "after"]
"""What becomes of a call to the ledger: it answers, it fails with nothing written, or its reply is lost."""
Wait = Literal["step", "turn", "ledger", "time"]
Steps = Generator[Wait, Any, None]
T = TypeVar("T")


class Line(msgspec.Struct, frozen=True):
    """What one machine answered: a line of a transcript."""

    role: str
    state: str
    event: Any
    actions: tuple[Any, ...]
    after: str


class Job:
    """Something that a driver has begun; `waits` says what for."""

    def __init__(self, name: str, steps: Steps, *, work: bool) -> None:
        self.name = name
        self.steps = steps
        self.work = work
        self.waits: Wait = "step"


def call(store: MemoryStore, change: Callable[[MemoryStore], T]) -> Generator[Wait, Any, T]:
    """One call to the ledger: anything may happen before it is made, and between writing and reply."""
    fault: Fault = yield "ledger"
    if fault == "before":
        raise LedgerError("the ledger does not answer")
    result = change(store)
    if fault == "after":
        raise LedgerError("the ledger's reply was lost")
    yield "step"
    return result


def _method(action: str) -> str:
    """`AbortPath` is performed by `_abort_path`."""
    return re.sub("(?=[A-Z])", "_", action).lower()


class Side:
    """One node's part in the move: machine, driver, memory, and whether a world runs here."""

    role: Role

    def __init__(self, move: Move, claim: Claim) -> None:
        self.move = move
        self.claim = claim
        self.machine = Machine(self.role, POLICY)
        self.move_id = move.hello.move_id
        self.session_id = move.hello.session_id
        self.epoch = move.hello.epoch
        self.memory = [0] * LEAVES
        self.block = 0
        self.running = False
        self.alive = True
        self.jobs: list[Job] = []
        self.turn: Job | None = None
        self.inbox: deque[m.PeerMessage | None] = deque()
        self.closed = False
        self.quiet = False
        self.finished = False
        self._events: deque[Any] = deque()
        self._handling = False

    @property
    def peer(self) -> Side:
        return self.move.destination if self.role == "source" else self.move.source

    def post(self, event: Any) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._handling = False

    def _handle(self, event: Any) -> None:
        if self.machine.ended:
            return
        before = self.machine.state
        actions = self.machine.handle(event)
        self.move.lines.append(Line(self.role, before, event, actions, self.machine.state))
        for action in actions:
            self._perform(action)

    def _perform(self, action: p.Action) -> None:
        if isinstance(action, p.Send):
            if not self.closed:
                self.peer.inbox.append(action.message)  # type: ignore[arg-type]
            return
        steps = getattr(self, _method(type(action).__name__))(action)
        if steps is not None:
            self.jobs.append(Job(type(action).__name__, steps, work=isinstance(action, WORK)))

    def fail(self, code: str) -> None:
        """As `Driver.fail`: an operator, a deadline or a watcher gives up; past the commit nobody listens."""
        if self.machine.state in ABORTABLE:
            self.post(p.Failed(code=code, message=f"{code} at the {self.role}"))

    def error(self, error: WorldMoveError) -> None:
        """As `Driver._on_error`."""
        if self.machine.state in ABORTABLE or self.machine.state is State.COMMITTED:
            self.post(p.Failed(code=error.code, message=str(error)))

    def deliver(self) -> None:
        """The oldest message arrives, or the news that none will."""
        message = self.inbox.popleft()
        if message is None:
            self.closed = True
            self.post(p.PeerLost(message="connection reset"))
        else:
            self.post(message)

    def ready(self) -> list[Job]:
        """What can go on now; of those that wait for their turn at the ledger, the first."""
        turns = [job for job in self.jobs if job.waits == "turn"]
        return [job for job in self.jobs if job.waits != "turn" or (self.turn is None and job is turns[0])]

    def step(self, job: Job, answer: Any = None) -> None:
        """Lets a job go on to its next wait."""
        if job.waits == "turn":
            self.turn = job
        try:
            job.waits = job.steps.send(answer if job.waits in ("ledger", "time") else None)
        except StopIteration:
            self._drop(job)
        except WorldMoveError as error:
            self._drop(job)
            self.error(error)

    def _drop(self, job: Job) -> None:
        job.steps.close()
        self.jobs.remove(job)
        if self.turn is job:
            self.turn = None

    def _done_with_ledger(self) -> None:
        self.turn = None

    def crash(self) -> None:
        """Nothing of this node happens any more; what it had written stays written."""
        self.alive = False
        self.jobs.clear()

    def call(self, change: Callable[[MemoryStore], T]) -> Generator[Wait, Any, T]:
        """One call to the ledger."""
        return (yield from call(self.move.store, change))

    def swap(self, old: SessionRecord, new: SessionRecord) -> Generator[Wait, Any, None]:
        yield from self.call(lambda store: swap(store, self.claim, old, new))

    def settle(self) -> Generator[Wait, Any, SessionRecord]:
        return (yield from self.call(lambda store: settle(store, self.claim, self.session_id, self.move_id)))

    def settle_own(self) -> Generator[Wait, Any, SessionRecord]:
        """As `Driver._settled_record`."""
        return (yield from self.settle())

    def outcome(self, record: SessionRecord) -> p.Outcome:
        return Driver.outcome(self, record)  # type: ignore[arg-type]

    def _abort_path(self, _action: p.AbortPath) -> Steps:
        yield "step"
        for job in [job for job in self.jobs if job.work]:
            self._drop(job)
        self.quiet = True

    def _settle_record(self, _action: p.SettleRecord) -> Steps:
        yield "turn"
        while True:
            try:
                record = yield from self.settle_own()
            except LedgerError:
                continue
            break
        self.keep(record)
        self._done_with_ledger()
        self.post(p.RecordSettled(outcome=self.outcome(record)))

    def keep(self, record: SessionRecord) -> None:
        self.record = record

    def _finish(self, _action: p.Finish) -> None:
        self.finished = True
        self.peer.inbox.append(None)
