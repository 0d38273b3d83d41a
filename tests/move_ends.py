"""Source and destination of a simulated move: what `worldmove.source` and `.destination` do, by steps."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from move_side import DAMAGE, GONE, LEAF_BYTES, LEAVES, Side, Steps, Wait

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.errors import LostRaceError, NoWorkerError, PeerError, WorldMoveError
from worldmove.ledger import records
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import Claim, MoveRef, SessionRecord
from worldmove.ledger.transactions import settle, swap_then
from worldmove.machine import Role
from worldmove.protocol import State

if TYPE_CHECKING:
    from move_kit import Move


def digest(value: int) -> bytes:
    return hashlib.blake2b(value.to_bytes(8, "big"), digest_size=16).digest()


def root_of(memory: list[int], sealed_block: int, host_state: bytes) -> str:
    text = repr((memory, sealed_block, host_state)).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


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
        self.before: SessionRecord | None = None

    def generate(self, *leaves: int) -> None:
        """The world makes one block, and writes into these leaves."""
        assert self.running, "a world that does not run has written"
        self.block += 1
        for leaf in leaves:
            self.memory[leaf] += 1

    def _begin_record(self, _action: p.BeginRecord) -> Steps:
        yield "turn"
        if self.machine.state is not State.ADMITTED:
            return
        yield from self.close_former()
        destination = self.move.destination.claim
        ref = MoveRef(
            move_id=self.move_id,
            source=self.claim.name,
            source_incarnation=self.claim.incarnation,
            destination=destination.name,
            destination_incarnation=destination.incarnation,
        )
        new = records.begin(self.record, ref)
        self.before = self.record
        yield from self.swap(self.record, new)
        self.record = new
        self._done_with_ledger()
        self.post(p.RecordBegun())

    def close_former(self) -> Iterator[Wait]:
        """Ends the move that brought the world here, if the record is still in it."""
        yield from ()

    def settle_own(self) -> Generator[Wait, Any, SessionRecord]:
        """A move that may have begun or not is written off before it can."""

        def written_off(store: MemoryStore) -> SessionRecord:
            return settle(store, self.claim, self.session_id, self.move_id, self.before)

        return (yield from self.call(written_off))

    def _offer_path(self, _action: p.OfferPath) -> Steps:
        yield "step"
        self.post(p.PathOffered(begin=m.Begin(lanes=(m.LaneOffer("127.0.0.1", 4001, bytes(32)),))))

    def _note_prepared(self, _action: p.NotePrepared) -> None:
        self.post(p.PreparedHere(block=self.block))

    def _note_landed(self, _action: p.NoteLanded) -> None:
        self.post(p.LandedHere(block=self.block))

    def _read_table(self, action: p.ReadTable) -> Steps:
        block = self.block
        for first in range(0, LEAVES, 2):
            yield "step"
            digests = b"".join(digest(value) for value in self.memory[first : first + 2])
            if not self.closed:
                self.peer.inbox.append(m.TablePart(number=action.number, first=first, digests=digests))
        yield "step"
        self.post(p.TableDone(number=action.number, block=block))

    def _pause_world(self, _action: p.PauseWorld) -> Steps:
        yield "step"
        fate = records.fate(self.move.record, self.move_id)
        assert fate != "superseded", "a world is paused before the ledger has answered"
        self.running, self.paused = False, True
        if self.machine.facts.live and not self.closed:
            self.peer.inbox.append(m.Pausing())
        self.post(p.WorldPaused(block=self.block))

    def _seal_world(self, _action: p.SealWorld) -> Steps:
        yield "step"
        state = f"after {self.block}".encode()
        root = root_of(self.memory, self.block, state)
        self.post(p.WorldSealed(sealed=m.Sealed(block=self.block, host_states=(state,), root=root)))

    def _resume_world(self, _action: p.ResumeWorld) -> None:
        record = self.move.record
        assert record.owner == self.claim.name, "a world resumes that another node owns"
        # It may stand as the move left it that brought the world here, if this one has never begun.
        former = record.phase == "adopted" and record.move is not None and record.move.move_id != self.move_id
        assert record.phase == "owned" or former, "a world resumes while its move may yet be committed"
        if self.paused:
            self.running, self.paused = True, False

    def _release_world(self, _action: p.ReleaseWorld) -> Steps:
        fate = records.fate(self.move.record, self.move_id)
        assert fate in ("adopted", "released"), f"a world is released whose move is {fate}"
        assert not self.running
        self.memory = [GONE] * LEAVES
        yield "step"
        self.post(p.WorldReleased())

    def _await_adoption(self, _action: p.AwaitAdoption) -> Steps:
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
        self.written: SessionRecord | None = None
        self.refuses: m.Rejected | None = None
        self.damages = 0
        self.wiped = False
        self.known = [False] * LEAVES
        self.theirs: dict[int, bytes] = {}
        self.asked: set[int] = set()
        self.round: p.StartRound

    def _admit(self, _action: p.Admit) -> Steps:
        yield "step"
        if self.refuses is not None:
            self.post(p.AdmitRefused(rejected=self.refuses))
            return
        self.post(p.AdmitOk(admitted=m.Admitted(incarnation=1, path="staged", lanes=1)))

    def _open_path(self, _action: p.OpenPath) -> Steps:
        record = yield from self.call(lambda store: store.session(self.session_id))
        if record is None or records.fate(record, self.move_id) != "moving" or record.epoch != self.epoch:
            raise PeerError("the record does not say that this move has begun")
        self.record = record
        self.post(p.PathReady())

    def _expect(self, _action: p.Expect) -> None:
        """What begins by itself tells the machine nothing."""

    def _start_round(self, action: p.StartRound) -> None:
        self.round = action
        self.theirs.clear()
        self.asked = {leaf for leaf in range(LEAVES) if not self.known[leaf]}

    def _plan_part(self, action: p.PlanPart) -> None:
        for offset in range(0, len(action.part.digests), 16):
            leaf = action.part.first + offset // 16
            self.theirs[leaf] = action.part.digests[offset : offset + 16]
            if self.theirs[leaf] != digest(self.memory[leaf]):
                self.asked.add(leaf)

    def _close_round(self, action: p.CloseRound) -> Steps:
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

    def _verify(self, action: p.Verify) -> Steps:
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

    def _repair(self, _action: p.Repair) -> Steps:
        yield from self._pull(self.damaged())
        self.post(p.Repaired())

    def _commit_record(self, action: p.CommitRecord) -> Steps:
        yield "turn"
        new = records.commit(self.record, block=action.block, revision=1, root=action.root)
        try:
            self.record = yield from self._commit(new)
        except LostRaceError:
            yield from self._report()
            return
        self._done_with_ledger()
        self.post(p.RecordCommitted(committed=m.Committed(epoch=new.epoch, commit_ms=1.0)))

    def _commit(self, new: SessionRecord) -> Generator[Wait, Any, SessionRecord]:
        """As `Adoption.commit`."""
        old = self.record
        if self.move.apart:
            yield from self.swap(old, new)
            return new
        adopted = records.adopt(new, self.claim, endpoint="http://b")

        def both(store: MemoryStore) -> WorldMoveError | None:
            return swap_then(store, self.claim, old, new, adopted, provided=self.check_attended)

        if (yield from self.call(both)) is not None:
            return new
        self.written = adopted
        return adopted

    def check_attended(self) -> None:
        if not self.standby:
            raise NoWorkerError("the standby's worker died before it could adopt")

    def _report(self) -> Generator[Wait, Any, None]:
        standing = yield from self.settle()
        self.record = standing
        self.post(p.RecordSettled(outcome=self.outcome(standing)))

    def _adopt_record(self, _action: p.AdoptRecord) -> Steps | None:
        if self.record == self.written:
            self._take_over(self.written)
            return None
        return self._adopt_by_itself()

    def _adopt_by_itself(self) -> Steps:
        yield "step"
        if self.record.phase != "adopted":
            self.check_attended()
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
        self._done_with_ledger()
        self._take_over(new)

    def _take_over(self, new: SessionRecord) -> None:
        self.install(new)
        adopted = m.Adopted(epoch=new.epoch, resume_ms=1.0, endpoint="http://b")
        self.post(p.RecordAdopted(adopted=adopted))

    def install(self, record: SessionRecord) -> None:
        """The standby generates: only what the source sealed, and only on a record that says so."""
        assert record.root == root_of(self.memory, self.block, f"after {self.block}".encode())
        assert not self.wiped
        assert records.fate(self.move.record, self.move_id) in ("adopted", "released")
        self.running = True

    def _close_record(self, _action: p.CloseRecord) -> Steps:
        yield "turn"
        if self.record.phase != "adopted":
            return
        yield from self.swap(self.record, records.release(self.record, self.claim))

    def _await_reclaim(self, _action: p.AwaitReclaim) -> Steps:
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

    def _wipe_memory(self, _action: p.WipeMemory) -> Steps:
        while not self.quiet:
            yield "step"
        fate = records.fate(self.move.record, self.move_id)
        # The source may still write `moving` after this side found no move: then nothing has arrived.
        early = fate == "moving" and not self.machine.facts.offered
        assert early or fate in ("aborted", "reclaimed", "superseded"), f"wiped, and the move is {fate}"
        assert not self.running
        assert not [job.name for job in self.jobs if job.work]
        self.memory, self.wiped = [0] * LEAVES, True
