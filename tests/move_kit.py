"""A whole move without I/O: two machines, the ledger's rules, a network that can break, and drivers.

The drivers follow `worldmove.source` and `worldmove.destination` step by step, but every wait is a `yield`:
whoever runs the simulation decides what happens next. Each call to the ledger has two waits, so that
anything may happen between the write and its reply. A violated promise raises `AssertionError` at once.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from machine_kit import HELLO

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.driver import ABORTABLE, WORK, Driver
from worldmove.errors import LedgerError, LostRaceError, NoWorkerError, PeerError, WorldMoveError
from worldmove.ledger import records
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import Claim, MoveRef, NodeInfo, SessionRecord
from worldmove.ledger.transactions import claim_name, settle, swap
from worldmove.machine import Machine, Role
from worldmove.protocol import State
from worldmove.rounds import RoundPolicy

LEAVES = 4
LEAF_BYTES = 4096
DAMAGE, GONE = 666, 999
POLICY = RoundPolicy(max_rounds=4, max_repairs=2, small_bytes=1000, horizon_ms=100.0)
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


def digest(value: int) -> bytes:
    return hashlib.blake2b(value.to_bytes(8, "big"), digest_size=16).digest()


def root_of(memory: list[int], sealed_block: int, host_state: bytes) -> str:
    text = repr((memory, sealed_block, host_state)).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


class Side:
    """One node's part in the move: machine, driver, memory, and whether a world runs here."""

    role: Role

    def __init__(self, move: Move, claim: Claim) -> None:
        self.move = move
        self.claim = claim
        self.machine = Machine(self.role, POLICY)
        self.move_id = HELLO.move_id
        self.epoch = HELLO.epoch
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
        steps = getattr(self, "_" + type(action).__name__)(action)
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
        return [
            job for job in self.jobs if job.waits != "turn" or (self.turn is None and job is turns[0])
        ]

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
        fault: Fault = yield "ledger"
        if fault == "before":
            raise LedgerError("the ledger does not answer")
        result = change(self.move.store)
        if fault == "after":
            raise LedgerError("the ledger's reply was lost")
        yield "step"
        return result

    def swap(self, old: SessionRecord, new: SessionRecord) -> Generator[Wait, Any, None]:
        yield from self.call(lambda store: swap(store, self.claim, old, new))

    def settle(self) -> Generator[Wait, Any, SessionRecord]:
        return (
            yield from self.call(lambda store: settle(store, self.claim, HELLO.session_id, self.move_id))
        )

    def outcome(self, record: SessionRecord) -> p.Outcome:
        return Driver.outcome(self, record)  # type: ignore[arg-type]

    def _AbortPath(self, _action: p.AbortPath) -> Steps:
        yield "step"
        for job in [job for job in self.jobs if job.work]:
            self._drop(job)
        self.quiet = True

    def _SettleRecord(self, _action: p.SettleRecord) -> Steps:
        yield "turn"
        while True:
            try:
                record = yield from self.settle()
            except LedgerError:
                continue
            break
        self.keep(record)
        self._done_with_ledger()
        self.post(p.RecordSettled(outcome=self.outcome(record)))

    def keep(self, record: SessionRecord) -> None:
        self.record = record

    def _Finish(self, _action: p.Finish) -> None:
        self.finished = True
        self.peer.inbox.append(None)


class SourceSide(Side):
    """Where the world runs at first."""

    role: Role = "source"

    def __init__(self, move: Move, claim: Claim) -> None:
        super().__init__(move, claim)
        self.running = True
        self.memory = [10 * (leaf + 1) for leaf in range(LEAVES)]
        self.block = 7
        self.paused = False
        self.record = move.record
        self.destination_incarnation = 0

    def generate(self, *leaves: int) -> None:
        """The world makes one block, and writes into these leaves."""
        assert self.running, "a world that does not run has written"
        self.block += 1
        for leaf in leaves:
            self.memory[leaf] += 1

    def _BeginRecord(self, _action: p.BeginRecord) -> Steps:
        yield "turn"
        destination = self.move.destination.claim
        ref = MoveRef(
            move_id=self.move_id,
            source=self.claim.name,
            source_incarnation=self.claim.incarnation,
            destination=destination.name,
            destination_incarnation=destination.incarnation,
        )
        new = records.begin(self.record, ref)
        yield from self.swap(self.record, new)
        self.record = new
        self._done_with_ledger()
        self.post(p.RecordBegun())

    def _OfferPath(self, _action: p.OfferPath) -> Steps:
        yield "step"
        self.post(p.PathOffered(begin=m.Begin(lanes=(m.LaneOffer("127.0.0.1", 4001, bytes(32)),))))

    def _NotePrepared(self, _action: p.NotePrepared) -> None:
        self.post(p.PreparedHere())

    def _ReadTable(self, action: p.ReadTable) -> Steps:
        for first in range(0, LEAVES, 2):
            yield "step"
            digests = b"".join(digest(value) for value in self.memory[first : first + 2])
            if not self.closed:
                self.peer.inbox.append(m.TablePart(number=action.number, first=first, digests=digests))
        yield "step"
        self.post(p.TableDone(number=action.number))

    def _PauseWorld(self, _action: p.PauseWorld) -> Steps:
        yield "step"
        assert self.move.record.move is not None, "a world is paused without a record"
        self.running, self.paused = False, True
        self.post(p.WorldPaused(block=self.block))

    def _SealWorld(self, _action: p.SealWorld) -> Steps:
        yield "step"
        state = f"after {self.block}".encode()
        root = root_of(self.memory, self.block, state)
        self.post(p.WorldSealed(sealed=m.Sealed(block=self.block, host_states=(state,), root=root)))

    def _ResumeWorld(self, _action: p.ResumeWorld) -> None:
        record = self.move.record
        assert record.owner == self.claim.name, "a world resumes that another node owns"
        assert record.phase == "owned", "a world resumes while its move may yet be committed"
        if self.paused:
            self.running, self.paused = True, False

    def _ReleaseWorld(self, _action: p.ReleaseWorld) -> Steps:
        fate = records.fate(self.move.record, self.move_id)
        assert fate in ("adopted", "released"), f"a world is released whose move is {fate}"
        assert not self.running
        self.memory = [GONE] * LEAVES
        yield "step"
        self.post(p.WorldReleased())

    def _AwaitAdoption(self, _action: p.AwaitAdoption) -> Steps:
        late = False
        while self.machine.state is State.RECLAIMING:
            try:
                record = yield from self.settle()
                if self.outcome(record) == "committed" and late:
                    new = records.reclaim(record, self.claim)
                    yield from self.swap(record, new)
                    record = new
            except LostRaceError:
                continue
            except WorldMoveError:
                pass
            else:
                if self.outcome(record) != "committed":
                    self.record = record
                    self.post(p.RecordSettled(outcome=self.outcome(record)))
                    return
            late = (yield "time") or late


class DestinationSide(Side):
    """Where the world goes. `damages` counts pulled leaves that arrive damaged from now on."""

    role: Role = "destination"

    def __init__(self, move: Move, claim: Claim) -> None:
        super().__init__(move, claim)
        self.standby = True
        self.refuses: m.Rejected | None = None
        self.damages = 0
        self.wiped = False
        self.known = [False] * LEAVES
        self.theirs: dict[int, bytes] = {}
        self.asked: set[int] = set()
        self.round: p.StartRound

    def _Admit(self, _action: p.Admit) -> Steps:
        yield "step"
        if self.refuses is not None:
            self.post(p.AdmitRefused(rejected=self.refuses))
            return
        self.post(p.AdmitOk(admitted=m.Admitted(incarnation=1, path="staged", lanes=1)))

    def _OpenPath(self, _action: p.OpenPath) -> Steps:
        record = yield from self.call(lambda store: store.session(HELLO.session_id))
        if record is None or records.fate(record, self.move_id) != "moving" or record.epoch != self.epoch:
            raise PeerError("the record does not say that this move has begun")
        self.record = record
        self.post(p.PathReady())

    def _StartRound(self, action: p.StartRound) -> None:
        self.round = action
        self.theirs.clear()
        self.asked = {leaf for leaf in range(LEAVES) if not self.known[leaf]}

    def _PlanPart(self, action: p.PlanPart) -> None:
        for offset in range(0, len(action.part.digests), 16):
            leaf = action.part.first + offset // 16
            self.theirs[leaf] = action.part.digests[offset : offset + 16]
            if self.theirs[leaf] != digest(self.memory[leaf]):
                self.asked.add(leaf)

    def _CloseRound(self, action: p.CloseRound) -> Steps:
        asked = sorted(self.asked)
        yield from self._pull(asked)
        size, ms = len(asked) * LEAF_BYTES, 15.0 * len(asked)
        self.post(p.RoundComplete(number=action.number, leaves=len(asked), bytes=size, ms=ms))

    def _pull(self, leaves: list[int]) -> Iterator[Wait]:
        for leaf in leaves:
            yield "step"
            assert not self.quiet, "bytes arrive after the path was ended"
            damaged, self.damages = self.damages > 0, max(self.damages - 1, 0)
            self.memory[leaf] = DAMAGE if damaged else self.peer.memory[leaf]
            self.known[leaf] = True

    def damaged(self) -> list[int]:
        return [leaf for leaf in range(LEAVES) if self.theirs.get(leaf) != digest(self.memory[leaf])]

    def _Verify(self, action: p.Verify) -> Steps:
        yield "step"
        sealed, damaged = action.sealed, self.damaged()
        if damaged:
            self.post(p.DamageFound(leaves=len(damaged)))
            return
        root = root_of(self.memory, sealed.block, sealed.host_states[0])
        if root != sealed.root:
            self.fail("root-mismatch")
            return
        self.block = sealed.block
        self.post(p.MemoryVerified(verified=m.Verified(root=root, leaves=1, bytes=1, kept_bytes=0, ms=1.0)))

    def _Repair(self, _action: p.Repair) -> Steps:
        yield from self._pull(self.damaged())
        self.post(p.Repaired())

    def _CommitRecord(self, action: p.CommitRecord) -> Steps:
        yield "turn"
        new = records.commit(self.record, block=action.block, revision=1, root=action.root)
        try:
            yield from self.swap(self.record, new)
        except LostRaceError:
            yield from self._report()
            return
        self.record = new
        self._done_with_ledger()
        self.post(p.RecordCommitted(committed=m.Committed(epoch=new.epoch, commit_ms=1.0)))

    def _report(self) -> Generator[Wait, Any, None]:
        standing = yield from self.settle()
        self.record = standing
        self.post(p.RecordSettled(outcome=self.outcome(standing)))

    def _AdoptRecord(self, _action: p.AdoptRecord) -> Steps:
        yield "step"
        if not self.standby and self.record.phase != "adopted":
            raise NoWorkerError("the standby's worker died before it could adopt")
        yield "turn"
        yield from self._adopt()

    def _adopt(self) -> Generator[Wait, Any, None]:
        new = records.adopt(self.record, self.claim, endpoint="http://b")
        try:
            yield from self.swap(self.record, new)
        except LostRaceError:
            yield from self._report()
            return
        self.record = new
        self.install(new)
        self._done_with_ledger()
        adopted = m.Adopted(epoch=new.epoch, resume_ms=1.0, endpoint="http://b")
        self.post(p.RecordAdopted(adopted=adopted))

    def install(self, record: SessionRecord) -> None:
        """The standby generates: only what the source sealed, and only on a record that says so."""
        assert record.root == root_of(self.memory, self.block, f"after {self.block}".encode())
        assert not self.wiped
        assert records.fate(self.move.record, self.move_id) in ("adopted", "released")
        self.running = True

    def _CloseRecord(self, _action: p.CloseRecord) -> Steps:
        yield "turn"
        if self.record.phase != "adopted":
            return
        yield from self.swap(self.record, records.release(self.record, self.claim))

    def _AwaitReclaim(self, _action: p.AwaitReclaim) -> Steps:
        late = False
        while self.machine.state is State.RECLAIMING:
            try:
                record = yield from self.settle()
                self.record = record
                if self.outcome(record) != "committed":
                    self.post(p.RecordSettled(outcome=self.outcome(record)))
                    return
                if late:
                    yield "turn"
                    yield from self._adopt()
                    return
            except WorldMoveError:
                self._done_with_ledger()
            late = (yield "time") or late

    def _WipeMemory(self, _action: p.WipeMemory) -> Steps:
        while not self.quiet:
            yield "step"
        fate = records.fate(self.move.record, self.move_id)
        # The source may still write `moving` after this side found no move: then nothing has arrived.
        early = fate == "moving" and not self.machine.facts.offered
        assert early or fate in ("aborted", "reclaimed", "superseded"), f"wiped, and the move is {fate}"
        assert not self.running
        assert not [job.name for job in self.jobs if job.work]
        self.memory, self.wiped = [0] * LEAVES, True


class Move:
    """The whole of it: two sides, one record, one connection."""

    def __init__(self, *, live: bool = True) -> None:
        self.store = MemoryStore()
        claims = [
            claim_name(self.store, NodeInfo(name=name, url=f"http://{name}", boot_id="boot"))
            for name in ("a", "b")
        ]
        owner = claims[0]
        self.store.put_session(
            SessionRecord(
                session_id=HELLO.session_id,
                epoch=HELLO.epoch,
                owner=owner.name,
                incarnation=owner.incarnation,
                model="toy",
                block=7,
            )
        )
        self.lines: list[Line] = []
        self.source = SourceSide(self, claims[0])
        self.destination = DestinationSide(self, claims[1])
        self.hello = msgspec.structs.replace(HELLO, live=live)

    @property
    def record(self) -> SessionRecord:
        """The session's record, as it stands."""
        record = self.store.session(HELLO.session_id)
        assert record is not None
        return record

    @property
    def sides(self) -> tuple[SourceSide, DestinationSide]:
        return self.source, self.destination

    def start(self) -> None:
        self.source.post(p.Start(hello=self.hello))

    def cut(self, keep: tuple[int, int] = (0, 0)) -> None:
        """The connection breaks: of what was under way to source and destination only `keep` arrives."""
        for side, count in zip(self.sides, keep, strict=True):
            side.closed = True
            side.inbox = deque([*list(side.inbox)[:count], None])

    def crash(self, side: Side) -> None:
        """A node dies; its peer gets what was sent, and then the news."""
        side.crash()
        side.closed = True
        side.inbox.clear()
        side.peer.inbox.append(None)

    def choices(self) -> list[tuple[Side, Job | None]]:
        """All that could happen next: a side's job goes on, or (`None`) its next message arrives."""
        found: list[tuple[Side, Job | None]] = []
        for side in self.sides:
            if side.alive:
                found += [(side, job) for job in side.ready()]
                found += [(side, None)] if side.inbox else []
        return found

    def take(self, side: Side, job: Job | None, answer: Any = None) -> None:
        """Lets one of the `choices` happen; `answer` is a `Fault` for a call, a bool for a passing time."""
        if job is None:
            side.deliver()
        else:
            side.step(job, "none" if answer is None and job.waits == "ledger" else answer)
        self.check()

    def check(self) -> None:
        """What holds at every instant."""
        assert not (self.source.running and self.destination.running), "two worlds run"
        if self.destination.running:
            assert self.record.owner == self.destination.claim.name, "a world runs where it is not owned"
        if self.source.running:
            assert self.record.owner == self.source.claim.name, "a world runs where it is not owned"

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 4000) -> bool:
        """Everything happens in turn, and time passes only where nothing else can. True: `until` holds."""
        for number in range(limit):
            if until():
                return True
            open_ones = self.choices()
            if not open_ones:
                return until()
            able = [(side, job) for side, job in open_ones if job is None or job.waits != "time"]
            side, job = (able or open_ones)[number % len(able or open_ones)]
            self.take(side, job, None if able else True)
        raise AssertionError("the move never ends")
