"""The protocol of a move as a pure state machine: events in, actions out, no I/O, no clock.

How to read it. A move has two machines, one on each node, with the same states. `Facts` is all that a
machine remembers beside its state. A *rule* is a pure function `(facts, event) -> Step`
(`worldmove/rules/`), and the two tables at the end of this file say which rule answers which event in
which state. There is nothing else: an event that has no row is illegal, raises `ProtocolError` with the
history, and changes nothing.

    requested ─► admitted ─► prepared ─► copying ─► pausing ─► finishing ─► verifying
        └► rejected                                                              │
                          released ◄─ adopted ◄─ committed ◄─────────────────────┘
    any state before committed ─► settling ─► aborted | committed | adopted
    committed ─► reclaiming ─► adopted | aborted (the source has its world back)

Three ideas carry the guarantee:

* **The destination decides what is sent.** It compares the source's table with what it has read back
  from its own memory, and pulls the difference. So a live round needs no agreement on what is dirty.
* **Nobody gives up by himself.** A side that cannot go on ends its path and enters `settling`: it writes
  `aborted` into the session's one record and obeys what then stands there. The commit is a swap on the
  same record, so exactly one of the two happened, whatever was lost on the way.
* **Only a record resumes or wipes.** `ResumeWorld`, `ReleaseWorld` and `WipeMemory` are issued by rules
  that answer what the ledger said (or that precede the record's first change).

At the source `reclaiming` is also where a peer's word that it adopted is held against the record: a world
is given up on the record's word only, and taken back if the record does not say so in time.

Events that can still arrive after a side gave up (a table that was being read, a pause that succeeded
in the same moment) have rows too: they are answered by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.errors import ProtocolError
from worldmove.protocol import ENDED, Action, State
from worldmove.rounds import RoundPolicy
from worldmove.rules import destination, source
from worldmove.rules.common import (
    Contradiction,
    Facts,
    Rule,
    Table,
    give_up,
    give_up_unrecorded,
    heard_too,
    late,
    replace,
    stay,
)

Role = Literal["source", "destination"]
"""Which side of a move a machine is."""


class Machine:
    """One side of one move.

    Attributes:
        state: where the move stands.
        facts: what it remembers.
        history: every event that was answered, as `state event -> state`.
    """

    def __init__(self, role: Role, policy: RoundPolicy) -> None:
        self.role: Role = role
        self.state = State.REQUESTED
        self.facts = Facts(policy=policy)
        self.history: list[str] = []
        self._table = TABLES[role]

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.state in ENDED

    @property
    def shown(self) -> State:
        """The contract's state: while the ledger is being asked, the one that was left."""
        return self.facts.shown

    def handle(self, event: Any) -> tuple[Action, ...]:
        """Answers one event.

        Raises:
            ProtocolError: the event is not allowed in this state, or contradicts what was said before;
                state, facts and history are as they were.
        """
        rule = self._table.get((self.state, type(event)))
        name = type(event).__name__
        if rule is None:
            raise ProtocolError(
                f"{self.role}: {name} is not allowed in {self.state}", history=list(self.history)
            )
        try:
            step = rule(self.facts, event)
        except Contradiction as error:
            raise ProtocolError(
                f"{self.role}: {name} in {self.state}: {error}", history=list(self.history)
            ) from error
        self.history.append(f"{self.state} {name} -> {step.state}")
        waiting = step.state in (State.SETTLING, State.RECLAIMING)
        self.facts = step.facts if waiting else replace(step.facts, shown=step.state)
        self.state = step.state
        return step.actions


def _rows(states: Iterable[State], events: Iterable[type], rule: Rule) -> Table:
    return {(state, event): rule for state in states for event in events}


_GIVING_UP = (p.Failed, p.PeerLost, m.Abort)
_RECORDED = (
    State.ADMITTED,
    State.PREPARED,
    State.COPYING,
    State.PAUSING,
    State.FINISHING,
    State.VERIFYING,
)
_LATE_AT_SOURCE = (
    p.RecordBegun, p.PathOffered, p.PreparedHere, p.LandedHere, p.TableDone, p.WorldPaused, p.WorldSealed,
    m.Prepared, m.Progress, m.Landed, m.Verified, m.Committed,
)  # fmt: skip
_LATE_AT_DESTINATION = (
    p.PathReady, p.RoundComplete, p.DamageFound, p.Repaired, p.MemoryVerified, p.RecordCommitted,
    m.Begin, m.Round, m.TablePart, m.TableEnd, m.Pausing, m.Sealed,
)  # fmt: skip


def _late(states: Iterable[State], events: Iterable[type]) -> Table:
    return {(state, event): stay(state) for state in states for event in events}


def _too_late(*states: State) -> Table:
    return {(state, event): late(state) for state in states for event in _GIVING_UP}


SOURCE: Table = {
    **_late((State.SETTLING, State.RECLAIMING), _LATE_AT_SOURCE),
    **_too_late(State.SETTLING, State.RECLAIMING, State.ADOPTED),
    (State.SETTLING, m.Abort): heard_too(prefers_peer=True),
    (State.SETTLING, m.Adopted): stay(State.SETTLING),
    (State.REQUESTED, p.Start): source.start,
    (State.REQUESTED, m.Admitted): source.admitted,
    (State.REQUESTED, m.Rejected): source.rejected,
    **_rows((State.REQUESTED,), _GIVING_UP, give_up_unrecorded),
    (State.ADMITTED, p.RecordBegun): source.recorded,
    (State.ADMITTED, p.PathOffered): source.offer,
    (State.ADMITTED, m.Prepared): source.prepared,
    (State.PREPARED, p.PreparedHere): source.go,
    (State.COPYING, p.TableDone): source.table_live,
    **_late((State.COPYING, State.FINISHING, State.VERIFYING), (m.Progress,)),
    (State.COPYING, m.Landed): source.landed,
    (State.COPYING, p.LandedHere): source.decide,
    (State.PAUSING, p.WorldPaused): source.paused,
    (State.FINISHING, p.TableDone): source.table_final,
    (State.FINISHING, p.WorldSealed): source.sealed,
    (State.VERIFYING, m.Verified): source.verified,
    (State.VERIFYING, m.Committed): source.committed,
    (State.COMMITTED, m.Adopted): source.adopted,
    **_rows(_RECORDED, _GIVING_UP, give_up),
    **_rows((State.COMMITTED,), _GIVING_UP, source.doubts),
    (State.SETTLING, p.RecordSettled): source.settled,
    (State.RECLAIMING, p.RecordSettled): source.reclaimed,
    (State.RECLAIMING, m.Adopted): source.adopted_late,
    **_late((State.ADOPTED,), (m.Progress, m.Verified, m.Committed, m.Adopted, p.RecordSettled)),
    (State.ADOPTED, p.WorldReleased): source.released,
}

DESTINATION: Table = {
    **_late((State.SETTLING, State.RECLAIMING), _LATE_AT_DESTINATION),
    **_too_late(State.SETTLING, State.RECLAIMING),
    (State.SETTLING, m.Abort): heard_too(prefers_peer=False),
    (State.REQUESTED, m.Hello): destination.hello,
    (State.REQUESTED, p.AdmitOk): destination.admitted,
    (State.REQUESTED, p.AdmitRefused): destination.refused,
    **_rows((State.REQUESTED,), _GIVING_UP, give_up_unrecorded),
    (State.ADMITTED, m.Begin): destination.begin,
    (State.ADMITTED, p.PathReady): destination.ready,
    **_rows((State.PREPARED, State.COPYING), (m.Round,), destination.open_round),
    (State.COPYING, m.Pausing): destination.pausing,
    (State.COPYING, m.TablePart): destination.part(State.COPYING),
    (State.COPYING, m.TableEnd): destination.table_end(State.COPYING),
    (State.COPYING, p.RoundComplete): destination.landed,
    (State.FINISHING, m.TablePart): destination.part(State.FINISHING),
    (State.FINISHING, m.TableEnd): destination.table_end(State.FINISHING),
    (State.FINISHING, p.RoundComplete): destination.complete,
    (State.FINISHING, m.Sealed): destination.sealed,
    (State.VERIFYING, p.DamageFound): destination.damage,
    (State.VERIFYING, p.Repaired): destination.repaired,
    (State.VERIFYING, p.MemoryVerified): destination.verified,
    (State.VERIFYING, p.RecordCommitted): destination.committed,
    (State.VERIFYING, p.RecordSettled): destination.settled,
    **_rows(
        (State.ADMITTED, State.PREPARED, State.COPYING, State.FINISHING, State.VERIFYING),
        _GIVING_UP,
        give_up,
    ),
    (State.COMMITTED, p.RecordAdopted): destination.adopted,
    (State.COMMITTED, p.RecordSettled): destination.settled,
    (State.COMMITTED, p.Failed): destination.cannot_adopt,
    **{(State.COMMITTED, event): late(State.COMMITTED) for event in (p.PeerLost, m.Abort, m.Released)},
    **{(state, m.Released): late(state) for state in (State.SETTLING, State.RECLAIMING)},
    (State.SETTLING, p.RecordSettled): destination.settled,
    (State.RECLAIMING, p.RecordSettled): destination.settled,
    (State.RECLAIMING, p.RecordAdopted): destination.adopted,
    (State.ADOPTED, m.Released): destination.over,
    **_rows((State.ADOPTED,), _GIVING_UP, destination.over),
}

TABLES: dict[Role, Table] = {"source": SOURCE, "destination": DESTINATION}
