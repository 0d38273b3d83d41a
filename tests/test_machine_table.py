"""The machine, transition by transition, against the table in tests/data/machine_table.txt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from machine_kit import (
    COMMITTED,
    EPOCH,
    EVENT_TYPES,
    EVENTS,
    OTHER_ROOT,
    ROOT,
    SEALED,
    SHRINKING,
    machine,
    names,
)

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.errors import ProtocolError
from worldmove.machine import TABLES, Machine, Role
from worldmove.protocol import ENDED, State
from worldmove.rules.common import replace


class Row(NamedTuple):
    role: Role
    state: State
    event: str
    case: str
    after: State
    actions: list[str]


def read_rows() -> list[Row]:
    rows = []
    for line in (Path(__file__).parent / "data" / "machine_table.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        left, right = line.split("->")
        role, states, rest = left.split(None, 2)
        events, _, case = rest.strip().partition(" ")
        after, _, actions = right.partition(":")
        for state in states.split(","):
            for event in events.split(","):
                goal = state if after.strip() == "same" else after.strip()
                rows.append(
                    Row(role, State(state), event, case.strip(" []"), State(goal), actions.split())  # type: ignore[arg-type]
                )
    return rows


ROWS = read_rows()

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "live": ({"live": True}, {}),
    "not live": ({"live": False}, {}),
    "blocks went by": ({"rounds": (SHRINKING[0], replace(SHRINKING[1], blocks=8))}, {"block": 13}),
    "none went by": ({}, {"block": 11}),
    "too many went by": ({"rounds": SHRINKING[1:] * 2}, {"block": 311}),
    "small": ({"rounds": (SHRINKING[0], replace(SHRINKING[1], bytes=1_000))}, {"block": 90}),
    "first live": ({}, {"number": 1, "table": False}),
    "first final": ({}, {"number": 1, "final": True}),
    "final": ({}, {"final": True}),
    "not sealed yet": ({"sealed": None}, {}),
    "sealed": ({"sealed": SEALED}, {}),
    "not landed yet": ({}, {}),
    "landed": ({"complete": True}, {}),
    "first": ({"repairs": 0}, {}),
    "last": ({"repairs": 2}, {}),
    "source is there": ({"peer_lost": False}, {}),
    "source is lost": ({"peer_lost": True}, {}),
    **{outcome: ({}, {"outcome": outcome}) for outcome in ("aborted", "reclaimed", "committed", "adopted")},
}
"""What each case of the table changes: of the facts, and of the event. `live` of Round is the default."""


def prepared(row: Row) -> tuple[Machine, Any]:
    known, said = CASES[row.case]
    given = machine(row.role, row.state, event=row.event, **known)
    return given, replace(EVENTS[row.event], **said)


def label(row: Row) -> str:
    return f"{row.role}-{row.state}-{row.event}{'-' + row.case if row.case else ''}"


def test_there_is_an_example_of_every_event_and_message() -> None:
    assert set(EVENTS) == set(EVENT_TYPES)


@pytest.mark.parametrize("role", ["source", "destination"])
def test_the_written_table_has_exactly_the_machines_rows(role: Role) -> None:
    written = {(row.state, EVENT_TYPES[row.event]) for row in ROWS if row.role == role}
    assert written == set(TABLES[role])


def test_no_row_is_written_twice() -> None:
    labels = [label(row) for row in ROWS]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_transition(row: Row) -> None:
    given, event = prepared(row)
    actions = given.handle(event)
    assert given.state is row.after
    assert names(actions) == row.actions
    assert given.history[-1] == f"{row.state} {row.event} -> {row.after}"
    assert given.ended == (row.after in ENDED)


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_waits_for_the_ledger_are_not_shown(row: Row) -> None:
    given, event = prepared(row)
    before = given.shown
    given.handle(event)
    waiting = row.after in (State.SETTLING, State.RECLAIMING)
    assert given.shown == (before if waiting else row.after)


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_only_the_record_resumes_releases_or_wipes(row: Row) -> None:
    """Beside the record's word there is only one event that ends a world here: the new owner's `Adopted`."""
    allowed = {"RecordSettled", "Adopted"} if row.role == "source" else {"RecordSettled"}
    if {"ResumeWorld", "ReleaseWorld", "WipeMemory"} & set(row.actions):
        assert row.event in allowed


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_nothing_is_wiped_before_the_path_is_ended(row: Row) -> None:
    if "WipeMemory" in row.actions:
        assert "AbortPath" in row.actions[: row.actions.index("WipeMemory")]


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_a_move_finishes_exactly_when_it_ends_and_says_why(row: Row) -> None:
    given, event = prepared(row)
    actions = given.handle(event)
    finishes = [action for action in actions if isinstance(action, p.Finish)]
    assert bool(finishes) == (row.after in ENDED)
    if finishes:
        assert actions[-1] is finishes[0]
        assert (finishes[0].code is None) == (row.after is State.RELEASED)
        assert finishes[0].code == (given.facts.code if row.after is not State.RELEASED else None)


def refuses(given: Machine, event: Any) -> ProtocolError:
    """The error; nothing has changed."""
    before = (given.state, given.facts, list(given.history))
    with pytest.raises(ProtocolError) as raised:
        given.handle(event)
    assert (given.state, given.facts, given.history) == before
    assert raised.value.details["history"] == before[2]
    assert raised.value.details["history"] is not given.history
    return raised.value


@pytest.mark.parametrize("role", ["source", "destination"])
@pytest.mark.parametrize("state", list(State))
def test_what_the_table_does_not_name_is_illegal(role: Role, state: State) -> None:
    illegal = [name for name, kind in EVENT_TYPES.items() if (state, kind) not in TABLES[role]]
    assert illegal
    for name in illegal:
        error = refuses(machine(role, state), EVENTS[name])
        assert f"{role}: {name} is not allowed in {state}" in str(error)


@pytest.mark.parametrize("role", ["source", "destination"])
def test_what_is_no_event_at_all_is_illegal(role: Role) -> None:
    for thing in (None, "Start", 7, p.Finish(), object()):
        refuses(machine(role, State.REQUESTED), thing)


class Lie(NamedTuple):
    role: Role
    state: State
    event: str
    facts: dict[str, Any]
    said: dict[str, Any]
    message: str


S: Role = "source"
D: Role = "destination"
LIES = [
    Lie(S, State.REQUESTED, "Start", {"asked": True}, {}, "started twice"),
    Lie(S, State.REQUESTED, "Admitted", {"asked": False}, {}, "nobody asked"),
    Lie(S, State.REQUESTED, "Rejected", {"asked": False}, {}, "nobody asked"),
    Lie(S, State.ADMITTED, "RecordBegun", {"recorded": True}, {}, "began twice"),
    Lie(S, State.ADMITTED, "PathOffered", {"recorded": False}, {}, "not asked for"),
    Lie(S, State.ADMITTED, "PathOffered", {"offered": True}, {}, "not asked for"),
    Lie(S, State.ADMITTED, "Prepared", {"offered": False}, {}, "before a path was offered"),
    Lie(S, State.ADMITTED, "Prepared", {"recorded": False, "offered": False}, {}, "before a path"),
    Lie(S, State.COPYING, "TableDone", {}, {"number": 1}, "round 1 is not the open round 2"),
    Lie(S, State.COPYING, "TableDone", {}, {"number": 3}, "round 3 is not the open round 2"),
    Lie(S, State.COPYING, "TableDone", {"table_expected": False}, {}, "has sent its table"),
    Lie(S, State.COPYING, "Landed", {}, {"number": 1}, "round 1 is not open"),
    Lie(S, State.COPYING, "Landed", {}, {"number": 3}, "round 3 is not open"),
    Lie(S, State.COPYING, "Landed", {"round_open": False}, {}, "round 2 is not open"),
    Lie(S, State.COPYING, "Landed", {"table_expected": True}, {}, "before its table was sent"),
    Lie(S, State.FINISHING, "TableDone", {}, {"number": 9}, "round 9 is not the open round 2"),
    Lie(S, State.FINISHING, "TableDone", {"table_expected": False}, {}, "has sent its table"),
    Lie(S, State.FINISHING, "WorldSealed", {"table_expected": True}, {}, "before the table ended"),
    Lie(S, State.VERIFYING, "Verified", {}, {"root": OTHER_ROOT}, "another root"),
    Lie(S, State.VERIFYING, "Verified", {"sealed": None}, {}, "another root"),
    Lie(S, State.VERIFYING, "Verified", {"complete": True}, {}, "verified twice"),
    Lie(S, State.VERIFYING, "Committed", {"complete": False}, {}, "without a verification"),
    Lie(S, State.VERIFYING, "Committed", {}, {"epoch": EPOCH}, "does not follow epoch 3"),
    Lie(S, State.VERIFYING, "Committed", {}, {"epoch": EPOCH + 2}, "does not follow epoch 3"),
    Lie(S, State.COMMITTED, "Adopted", {}, {"epoch": EPOCH}, "does not follow epoch 3"),
    Lie(S, State.RECLAIMING, "Adopted", {}, {"epoch": EPOCH + 2}, "does not follow epoch 3"),
    Lie(S, State.RECLAIMING, "RecordSettled", {}, {"outcome": "aborted"}, "does not answer a reclaim"),
    Lie(S, State.RECLAIMING, "RecordSettled", {}, {"outcome": "committed"}, "does not answer a reclaim"),
    Lie(D, State.REQUESTED, "Hello", {"asked": True}, {}, "asked twice"),
    Lie(D, State.REQUESTED, "AdmitOk", {"asked": False}, {}, "nobody asked"),
    Lie(D, State.REQUESTED, "AdmitRefused", {"asked": False}, {}, "nobody asked"),
    Lie(D, State.ADMITTED, "Begin", {"offered": True}, {}, "begun twice"),
    Lie(D, State.ADMITTED, "PathReady", {"offered": False}, {}, "not offered"),
    Lie(D, State.PREPARED, "Round", {}, {"number": 2}, "round 2 does not follow round 0"),
    Lie(D, State.PREPARED, "Round", {}, {"number": 1, "final": True, "table": False}, "without a table"),
    Lie(D, State.COPYING, "Round", {"round_open": True}, {}, "round 2 is still open"),
    Lie(D, State.COPYING, "Round", {}, {"number": 2}, "round 2 does not follow round 2"),
    Lie(D, State.COPYING, "Round", {}, {"number": 4}, "round 4 does not follow round 2"),
    Lie(D, State.COPYING, "Round", {}, {"final": True, "table": False}, "final round without a table"),
    Lie(D, State.COPYING, "Round", {"expects": True}, {}, "live round after the last"),
    Lie(D, State.COPYING, "Pausing", {"round_open": True}, {}, "round 2 is still open"),
    Lie(D, State.COPYING, "Pausing", {"expects": True}, {}, "pausing twice"),
    Lie(D, State.COPYING, "Pausing", {"live": False}, {}, "not live"),
    Lie(D, State.COPYING, "TablePart", {"table_expected": False}, {}, "not announced"),
    Lie(D, State.COPYING, "TablePart", {}, {"number": 1}, "not announced"),
    Lie(D, State.COPYING, "TableEnd", {"round_open": False}, {}, "round 2 is not open"),
    Lie(D, State.COPYING, "TableEnd", {}, {"number": 3}, "round 3 is not open"),
    Lie(D, State.COPYING, "TableEnd", {"closing": True}, {}, "ended twice"),
    Lie(D, State.COPYING, "RoundComplete", {}, {"number": 1}, "round 1 is not closing"),
    Lie(D, State.COPYING, "RoundComplete", {"closing": False}, {}, "round 2 is not closing"),
    Lie(D, State.FINISHING, "TablePart", {"table_expected": False}, {}, "not announced"),
    Lie(D, State.FINISHING, "TablePart", {}, {"number": 3}, "not announced"),
    Lie(D, State.FINISHING, "TableEnd", {}, {"number": 1}, "round 1 is not open"),
    Lie(D, State.FINISHING, "TableEnd", {"closing": True}, {}, "ended twice"),
    Lie(D, State.FINISHING, "RoundComplete", {"closing": False}, {}, "round 2 is not closing"),
    Lie(D, State.FINISHING, "RoundComplete", {}, {"number": 5}, "round 5 is not closing"),
    Lie(D, State.FINISHING, "Sealed", {"sealed": SEALED}, {}, "sealed twice"),
    Lie(D, State.FINISHING, "Sealed", {"table_expected": True}, {}, "before the table ended"),
    Lie(D, State.VERIFYING, "Repaired", {"sealed": None}, {}, "nothing has been sealed"),
    Lie(D, State.VERIFYING, "MemoryVerified", {"sealed": None}, {}, "nothing has been sealed"),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: f"{lie.role}-{lie.state}-{lie.event}-{lie.message}")
def test_contradiction(lie: Lie) -> None:
    given = machine(lie.role, lie.state, event=lie.event, **lie.facts)
    error = refuses(given, replace(EVENTS[lie.event], **lie.said))
    assert lie.message in str(error)
    assert error.__cause__ is not None


def test_memory_with_another_root_is_never_committed() -> None:
    given = machine("destination", State.VERIFYING)
    lie = replace(EVENTS["MemoryVerified"].verified, root=OTHER_ROOT)
    error = refuses(given, p.MemoryVerified(verified=lie))
    assert "another root" in str(error)


def test_facts_and_events_cannot_be_changed() -> None:
    given = machine("source", State.COPYING)
    for thing, name in ((given.facts, "round"), (EVENTS["Landed"], "bytes"), (p.Finish(), "code")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 5)
    assert not [kind for kind in EVENT_TYPES.values() if not kind.__struct_config__.frozen]


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_rules_are_pure(row: Row) -> None:
    """The same facts and the same event give the same step, and the facts before are left as they were."""
    first, event = prepared(row)
    second, _ = prepared(row)
    given = first.facts
    kept = copy.deepcopy(given)
    assert first.handle(event) == second.handle(copy.deepcopy(event))
    assert first.facts == second.facts
    assert given == kept


def test_the_first_reason_is_kept() -> None:
    given = machine("source", State.COPYING)
    given.handle(p.Failed(code="cancelled", message="by an operator"))
    given.handle(p.Failed(code="process-lost", message="an executor"))
    given.handle(m.Abort(code="connection-lost", message="the lane"))
    given.handle(p.PeerLost(message="reset"))
    actions = given.handle(p.RecordSettled(outcome="aborted"))
    assert actions[-1] == p.Finish(code="cancelled", message="by an operator")
    assert given.facts.peer_lost


@pytest.mark.parametrize(
    ("source", "destination", "kept"),
    [
        ("connection-lost", "deadline", "deadline"),
        ("deadline", "connection-lost", "deadline"),
        ("connection-lost", "connection-lost", "connection-lost"),
        ("cancelled", "connection-lost", "cancelled"),
        ("transport", "process-lost", "process-lost"),
        ("process-lost", "worker-lost", "worker-lost"),
    ],
)
def test_both_sides_keep_one_reason(source: str, destination: str, kept: str) -> None:
    """Each has given up by itself when it hears the other: a cause says more than a silence."""
    here, there = machine("source", State.FINISHING), machine("destination", State.FINISHING)
    here.handle(p.Failed(code=source, message=f"source: {source}"))
    there.handle(p.Failed(code=destination, message=f"destination: {destination}"))
    here.handle(m.Abort(code=destination, message=f"destination: {destination}"))
    there.handle(m.Abort(code=source, message=f"source: {source}"))
    assert here.facts.code == there.facts.code == kept
    assert here.facts.message == there.facts.message
    assert {here.state, there.state} == {State.SETTLING}


def test_a_lost_peer_has_a_code() -> None:
    given = machine("source", State.FINISHING)
    given.handle(p.PeerLost(message="reset"))
    assert (given.facts.code, given.facts.message) == ("peer", "reset")


def test_a_destination_without_a_reason_names_the_record() -> None:
    given = machine("destination", State.VERIFYING)
    actions = given.handle(p.RecordSettled(outcome="aborted"))
    assert actions[-1] == p.Finish(code="aborted", message="the record says aborted")


def test_a_source_takes_what_the_destination_offers_and_counts_rounds() -> None:
    given = machine("source", State.REQUESTED)
    given.handle(m.Admitted(incarnation=1, path="local", lanes=0))
    (offer,) = given.handle(p.RecordBegun())
    assert offer == p.OfferPath(path="local", lanes=0)
    given.handle(p.PathOffered(begin=EVENTS["Begin"]))
    given.handle(m.Prepared())
    first, end = given.handle(p.PreparedHere())
    assert first == p.Send(message=m.Round(number=1, final=False, table=False))
    assert end == p.Send(message=m.TableEnd(number=1))
    assert given.handle(m.Landed(number=1, leaves=20, bytes=20_000, ms=90.0)) == (p.NoteLanded(),)
    second, read = given.handle(p.LandedHere(block=12))
    assert second == p.Send(message=m.Round(number=2, final=False, table=True))
    assert read == p.ReadTable(number=2, final=False)
    given.handle(p.TableDone(number=2))
    given.handle(m.Landed(number=2, leaves=1, bytes=500, ms=3.0))
    assert given.handle(p.LandedHere(block=12)) == (p.PauseWorld(),)
    final, read = given.handle(p.WorldPaused(block=12))
    assert final == p.Send(message=m.Round(number=3, final=True, table=True))
    assert read == p.ReadTable(number=3, final=True)


def test_what_is_committed_is_what_was_sealed() -> None:
    given = machine("destination", State.VERIFYING)
    commit, _ = given.handle(EVENTS["MemoryVerified"])
    assert commit == p.CommitRecord(block=SEALED.block, root=ROOT)
    adopt, _ = given.handle(p.RecordCommitted(committed=COMMITTED))
    assert adopt == p.AdoptRecord(block=SEALED.block)


def test_rounds_that_ended_are_remembered() -> None:
    given = machine("destination", State.COPYING, event="RoundComplete")
    given.handle(p.RoundComplete(number=2, leaves=9, bytes=9_000, ms=80.0))
    assert given.facts.rounds == SHRINKING


def test_events_and_actions_survive_being_written_down() -> None:
    for name, event in EVENTS.items():
        again = msgspec.json.decode(msgspec.json.encode(event), type=EVENT_TYPES[name])
        assert again == event
