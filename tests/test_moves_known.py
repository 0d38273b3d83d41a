"""A move is known by its id from its admission on, also after its source has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from fleet_kit import Fleet, Node, until
from lives_kit import OPTIONS, REGIONS, arm, has_stopped, killed_with_its_keeper
from msgspec.structs import replace

from worldmove.ledger.records import MoveRef, SessionRecord
from worldmove.node.traces import NEVER, left_receipt, standing
from worldmove.views import MigrationRequest, MigrationView

KEYED = "once"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", "C", options=OPTIONS) as fleet:
        yield fleet


def interrupted(fleet: Fleet, session: str, phase: str) -> tuple[str, MigrationRequest]:
    """A move whose source has stopped in a phase of it; its worker lives."""
    here, actor = fleet["A"], fleet.actor("A")
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    fleet.actor("B").wait_for(REGIONS)
    arm(here, f"source.{phase}.stop")
    request = MigrationRequest(session_id=session, destination="B", live=False)
    move = here.client.migrate(request, f"{KEYED}-{session}").id
    has_stopped(here)
    return move, request


def ended(node: Node, move: str) -> MigrationView:
    """The move at a node; never a 404 on the way."""
    return until(
        lambda: view if (view := node.client.migration(move)).state in ("aborted", "released") else None,
        f"node {node.name} knows how {move} has ended",
    )


@pytest.mark.parametrize(
    ("phase", "state"), [("prepared", "aborted"), ("pausing", "aborted"), ("adopted", "released")]
)
def test_a_move_whose_source_died_is_known_everywhere(fleet: Fleet, phase: str, state: str) -> None:
    session, here = fleet.unique("known"), fleet["A"]
    move, request = interrupted(fleet, session, phase)
    for node in (fleet["B"], fleet["C"]):
        assert node.client.migration(move).session_id == session
    here.kill()
    here.start()
    view = ended(here, move)
    assert (view.state, view.source, view.destination) == (state, "A", "B")
    assert view.code == (None if state == "released" else "node-lost")
    assert view.receipt is not None
    assert view.receipt.epoch == {"aborted": 1, "released": 2}[state]
    for node in (fleet["B"], fleet["C"]):
        assert ended(node, move).state == state
    again = here.client.migrate(request, f"{KEYED}-{session}")
    assert (again.id, again.state) == (move, state)


def test_a_move_of_a_world_that_nobody_holds_any_more_is_settled_when_it_is_asked_for(fleet: Fleet) -> None:
    session, here = fleet.unique("lost"), fleet["A"]
    move, _request = interrupted(fleet, session, "pausing")
    for actor in fleet.actors:
        if actor.node is here:
            os.kill(actor.pid, signal.SIGKILL)
    killed_with_its_keeper(here)
    here.start()
    until(lambda: here.client.session(session).state == "lost", "the world is lost")
    assert ended(here, move).state == "aborted"
    assert ended(fleet["C"], move).state == "aborted"
    here.client.end_session(session)


# What records say, without nodes

REF = MoveRef(move_id="m1", source="A", source_incarnation=1, destination="B", destination_incarnation=1)
OWNED = SessionRecord(session_id="w", epoch=5, owner="A", incarnation=2, model="m", block=7, root="ab")
NOTE = replace(
    left_receipt(OWNED, "m1", "admitted", source="A", destination="B", manifest=None),
    epoch=5,
    code=None,
    reason=None,
    state_bytes=99,
)


@pytest.mark.parametrize(
    ("record", "over", "state"),
    [
        (None, False, "admitted"),
        (OWNED, False, "admitted"),
        (OWNED, True, "aborted"),
        (replace(OWNED, outcome="aborted", last_move_id="m1"), False, "aborted"),
        (replace(OWNED, outcome="reclaimed", last_move_id="m1", epoch=7), False, "aborted"),
        (replace(OWNED, phase="moving", move=REF), True, "copying"),
        (replace(OWNED, phase="committed", move=REF, owner="B", epoch=6), True, "committed"),
        (replace(OWNED, phase="adopted", move=REF, owner="B", epoch=6), True, "adopted"),
        (replace(OWNED, outcome="released", last_move_id="m1", owner="B", epoch=6), False, "released"),
        # Another move has followed: only this one can have taken the world away from its epoch.
        (replace(OWNED, outcome="released", last_move_id="m2", owner="C", epoch=7), False, "released"),
        (replace(OWNED, phase="ended", owner="B", epoch=6), False, "released"),
    ],
)
def test_what_a_record_says_of_a_move(record: SessionRecord | None, over: bool, state: str) -> None:
    found = standing(NOTE, record, over=over)
    assert (found.state, found.migration_id, found.state_bytes) == (state, "m1", 99)
    if record is OWNED and over:
        assert found.reason == NEVER
    if record is not None and record.last_move_id == "m2":
        assert (found.epoch, found.source_root, found.block) == (6, None, None)
