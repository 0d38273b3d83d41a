"""A simulated node: its slots, and what it does with them when it has started again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from move_side import GONE, LEAVES, Job, Steps, Wait, call

from worldmove.errors import LedgerError
from worldmove.ledger import records
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import MoveRef, NodeInfo, SessionRecord
from worldmove.ledger.transactions import claim_name, settle, swap
from worldmove.node import verdicts


@dataclass(eq=False, kw_only=True)
class Slot:
    """Memory with a worker. `epoch` is its page's, `record` what its node knows, `move` its mover."""

    memory: list[int] = field(default_factory=lambda: [0] * LEAVES)
    block: int = 0
    running: bool = False
    paused: bool = False
    epoch: int = 0
    record: SessionRecord | None = None
    bound: str | None = None
    move: str | None = None
    fenced: bool = False


class Node:
    """One node over all its lives: as many standbys as there are sessions always wait on it."""

    def __init__(self, name: str, store: MemoryStore, sessions: list[str]) -> None:
        self.name = name
        self.store = store
        self.worlds: dict[str, Slot] = {}
        self.standbys = [Slot() for _ in sessions]
        self.jobs: list[Job] = []
        self.alive = True
        self._claim()

    def _claim(self) -> None:
        self.claim = claim_name(
            self.store, NodeInfo(name=self.name, url=f"http://{self.name}", boot_id="boot")
        )

    def find_standby(self, session_id: str) -> Slot | None:
        """Admission: never beside another world of the session, fenced or not."""
        if session_id in self.worlds:
            return None
        return next((slot for slot in self.standbys if slot.bound is None and not slot.fenced), None)

    def install(self, session_id: str, slot: Slot, record: SessionRecord) -> None:
        """A standby has the world; its place is taken by another."""
        assert session_id not in self.worlds, "two worlds of one session on a node"
        self.standbys.remove(slot)
        self.standbys.append(Slot())
        self.worlds[session_id] = slot
        slot.bound = slot.move = None
        self._hold(slot, record)

    def _hold(self, slot: Slot, record: SessionRecord) -> None:
        slot.record, slot.epoch = record, record.epoch
        slot.fenced = slot.paused = False
        assert record.owner == self.name
        assert record.phase in ("owned", "adopted")
        slot.running = True

    def dismiss(self, session_id: str) -> None:
        """The world lives elsewhere."""
        slot = self.worlds.pop(session_id)
        assert not slot.running, "a world goes while it runs"
        slot.memory = [GONE] * LEAVES

    def crash(self) -> None:
        """Slots stay: the keeper and their workers hold them."""
        self.alive = False
        self.jobs.clear()

    def restart(self) -> None:
        """The next incarnation takes every slot over, fenced."""
        self.alive = True
        self._claim()
        for session_id, slot in self.worlds.items():
            slot.fenced, slot.move = True, None
            self._spawn("world", self._recover(slot, session_id))
        for slot in self.standbys:
            if slot.bound is not None:
                slot.fenced = True
                self._spawn("standby", self._recover(slot, None))

    def _spawn(self, name: str, steps: Steps) -> None:
        self.jobs.append(Job(name, steps, work=False))

    def step(self, job: Job, answer: Any = None) -> None:
        """Lets a recovery go on."""
        try:
            job.waits = job.steps.send(answer if job.waits in ("ledger", "time") else None)
        except StopIteration:
            self.jobs.remove(job)

    def _recover(self, slot: Slot, session_id: str | None) -> Steps:
        """As `Recovery.settle`."""
        yield "step"
        while True:
            try:
                done = yield from (
                    self._standby(slot) if session_id is None else self._world(slot, session_id)
                )
            except LedgerError:
                done = False
            if done:
                return
            yield "time"

    def _world(self, slot: Slot, session_id: str) -> Generator[Wait, Any, bool]:
        record = yield from call(self.store, lambda store: store.session(session_id))
        verdict = verdicts.of_session(record, slot.epoch, self.claim)
        assert record is not None
        assert verdict not in ("doubted", "ended")
        if verdict == "unfinished":
            record = yield from self._decided(session_id, records.current_move(record))
            verdict = verdicts.of_settled(record, self.claim)
        if verdict == "moved":
            if not (yield "time"):  # its worker has not come to hear it
                return False
            self.dismiss(session_id)
            return True
        if verdict == "wait":
            return False
        self._hold(slot, (yield from self._retaken(record)))
        return True

    def _decided(self, session_id: str, move: MoveRef) -> Generator[Wait, Any, SessionRecord]:
        record = yield from call(
            self.store, lambda store: settle(store, self.claim, session_id, move.move_id)
        )
        late = False
        while record.phase == "committed" and move.source == self.name:
            if late:
                back = records.reclaim(record, self.claim)
                yield from self._swap(record, back)
                return back
            late = yield "time"
            record = (yield from call(self.store, lambda store: store.session(session_id))) or record
        return record

    def _swap(self, old: SessionRecord, new: SessionRecord) -> Generator[Wait, Any, None]:
        yield from call(self.store, lambda store: swap(store, self.claim, old, new))

    def _retaken(self, record: SessionRecord) -> Generator[Wait, Any, SessionRecord]:
        if record.incarnation == self.claim.incarnation:
            return record
        mine = records.retake(record, self.claim)
        yield from self._swap(record, mine)
        return mine

    def _standby(self, slot: Slot) -> Generator[Wait, Any, bool]:
        move_id = slot.bound
        assert move_id is not None
        record = yield from call(self.store, lambda store: _of_move(store, move_id))
        if record is not None:
            name = record.session_id
            record = yield from call(self.store, lambda store: settle(store, self.claim, name, move_id))
        standing = verdicts.of_standby(record, move_id, self.claim)
        if record is None or standing == "wipe":
            stands = _of_move(self.store, move_id)
            fate = "superseded" if stands is None else records.fate(stands, move_id)
            assert fate in ("aborted", "reclaimed", "superseded") or (stands and stands.owner != self.name)
            slot.memory, slot.bound, slot.fenced = [0] * LEAVES, None, False
            return True
        if standing == "adopt":
            adopted = records.adopt(record, self.claim, endpoint=None)
            yield from self._swap(record, adopted)
            record = adopted
        record = yield from self._retaken(record)
        self.install(record.session_id, slot, record)
        return True


def _of_move(store: MemoryStore, move_id: str) -> SessionRecord | None:
    """The session whose record names the move."""
    for record in store.sessions("", 100, ended=True):
        if move_id in (record.last_move_id, record.move.move_id if record.move else None):
            return record
    return None
