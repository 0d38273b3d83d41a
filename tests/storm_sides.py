"""Sides of a simulated move that live on nodes, in slots that outlive them; the network may do its worst."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from machine_kit import REJECTED
from move_ends import DestinationSide, SourceSide
from move_side import Steps, Wait
from storm_nodes import Node, Slot

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.driver import ABORTABLE
from worldmove.errors import LostRaceError, ProtocolError
from worldmove.ledger import records
from worldmove.ledger.records import SessionRecord
from worldmove.protocol import State

if TYPE_CHECKING:
    from storm_kit import Leg


def _of_slot(name: str) -> Any:
    def read(side: Any) -> Any:
        return getattr(side.slot, name)

    def write(side: Any, value: Any) -> None:
        setattr(side.slot, name, value)

    return property(read, write)


class StormSource(SourceSide):
    """The source. Its world, memory and record are its slot's."""

    memory = _of_slot("memory")
    block = _of_slot("block")
    running = _of_slot("running")
    paused = _of_slot("paused")
    record = _of_slot("record")

    def __init__(self, move: Leg, node: Node, slot: Slot) -> None:
        self.node = node
        self.slot = Slot()
        super().__init__(move, node.claim)  # type: ignore[arg-type]
        self.slot = slot
        slot.move = self.move_id

    def _handle(self, event: Any) -> None:
        """As `Driver._handle`: what is illegal is refused, and ends a move that may still end."""
        try:
            super()._handle(event)
        except ProtocolError as error:
            if not isinstance(event, p.Failed):
                self.error(error)

    def expire(self) -> bool:
        """Its deadline passes, or its patience with a peer that committed and says nothing."""
        before = self.machine.state
        if before in ABORTABLE or before is State.COMMITTED:
            self.post(p.Failed(code="deadline", message="too late"))
        return self.machine.state is not before

    def close_former(self) -> Iterator[Wait]:
        record = self.record
        if record.phase == "adopted":
            closed = records.release(record, self.claim)
            yield from self.swap(record, closed)
            self.record = closed

    def _resume_world(self, action: p.ResumeWorld) -> None:
        super()._resume_world(action)
        self.slot.epoch = self.slot.record.epoch if self.slot.record else 0

    def _release_world(self, _action: p.ReleaseWorld) -> Steps:
        record = self.move.record
        fate = records.fate(record, self.move_id)
        gone = fate in ("adopted", "released") or (fate == "superseded" and record.owner != self.claim.name)
        assert gone, f"a world is released whose move is {fate}"
        self.node.dismiss(self.session_id)
        yield "step"
        self.post(p.WorldReleased())

    def _finish(self, action: p.Finish) -> None:
        super()._finish(action)
        self.slot.move = None


class StormDestination(DestinationSide):
    """The destination; it has a standby's slot once it has admitted the move."""

    memory = _of_slot("memory")
    block = _of_slot("block")
    running = _of_slot("running")

    def __init__(self, move: Leg, node: Node) -> None:
        self.node = node
        self.slot = Slot()
        super().__init__(move, node.claim)  # type: ignore[arg-type]

    def _handle(self, event: Any) -> None:
        try:
            super()._handle(event)
        except ProtocolError as error:
            if not isinstance(event, p.Failed) and self.machine.state in ABORTABLE:
                self.error(error)

    def expire(self) -> bool:
        """Its deadline passes."""
        before = self.machine.state
        self.fail("deadline")
        return self.machine.state is not before

    def _admit(self, _action: p.Admit) -> Steps:
        yield "step"
        slot = self.node.find_standby(self.session_id)
        if slot is None:
            self.post(p.AdmitRefused(rejected=REJECTED))
        elif not self.machine.ended:
            self.slot = slot
            slot.bound = self.move_id
            admitted = m.Admitted(incarnation=self.claim.incarnation, path="staged", lanes=1)
            self.post(p.AdmitOk(admitted=admitted))

    def install(self, record: SessionRecord) -> None:
        assert self.node.alive
        fate = records.fate(self.move.record, self.move_id)
        assert fate in ("adopted", "released")
        assert not self.wiped
        self.node.install(self.session_id, self.slot, record)

    def _close_record(self, _action: p.CloseRecord) -> Steps:
        yield "turn"
        if self.record.phase != "adopted":
            return
        new = records.release(self.record, self.claim)
        try:
            yield from self.swap(self.record, new)
        except LostRaceError as lost:
            new = lost.details.get("record") or self.record
        if self.slot.record is not None and self.slot.record.epoch == new.epoch:
            self.slot.record = new

    def _wipe_memory(self, action: p.WipeMemory) -> Generator[Wait, Any, None]:
        yield from super()._wipe_memory(action)
        if self.slot.bound == self.move_id:
            self.slot.bound = None
