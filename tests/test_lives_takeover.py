"""A second `serve` under the name of a node that lives: the first one is fenced, and no world misses a block.

That at most one incarnation writes is read from the ledger's file, in which a trigger copies every write.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import msgspec
import pytest
from fleet_kit import Fleet, until
from fleet_node import PATIENCE_S, Node
from lives_kit import OPTIONS, arm, begins, goes_on, gone, is_live, replaced, stands_by

from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.views import MigrationRequest

COPY = "INSERT INTO written (kind, value) VALUES ('{table}', NEW.value)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        with ledger(fleet) as connection:
            connection.execute("CREATE TABLE written (seq INTEGER PRIMARY KEY AUTOINCREMENT, kind, value)")
            for table in ("nodes", "sessions"):
                for when in ("INSERT", "UPDATE"):
                    connection.execute(
                        f"CREATE TRIGGER {table}_{when} AFTER {when} ON {table} "
                        f"BEGIN {COPY.format(table=table)}; END"
                    )
        yield fleet


@contextlib.contextmanager
def ledger(fleet: Fleet) -> Iterator[sqlite3.Connection]:
    """The file of the fleet's ledger."""
    connection = sqlite3.connect(fleet.folder / "ledger.db", timeout=PATIENCE_S)
    with contextlib.closing(connection), connection:
        yield connection


def written(fleet: Fleet) -> list[NodeInfo | SessionRecord]:
    """Every write of a node or session, in the order of their transactions."""
    with ledger(fleet) as connection:
        rows = connection.execute("SELECT kind, value FROM written ORDER BY seq").fetchall()
    kinds = {"nodes": NodeInfo, "sessions": SessionRecord}
    return [msgspec.json.decode(value, type=kinds[kind]) for kind, value in rows]


def one_writes_at_a_time(fleet: Fleet, session: str) -> None:
    """No former incarnation writes after a later one has claimed the name; no epoch has two owners.

    Whoever else is in a move may give it up in the name of the former incarnation that began it.
    """
    claims: dict[str, list[int]] = {}
    owners: dict[int, str] = {}
    former: SessionRecord | None = None
    for each in written(fleet):
        if isinstance(each, NodeInfo):
            claims.setdefault(each.name, []).append(each.incarnation)
            continue
        if each.session_id != session:
            continue
        given_up = former is not None and former.phase == "moving" and each.outcome == "aborted"
        claimed = claims.get(each.owner, [each.incarnation])  # the first claims came before the trigger
        assert given_up or each.incarnation == claimed[-1]
        assert former is None or each.epoch >= former.epoch
        assert owners.setdefault(each.epoch, each.owner) == each.owner
        former = each
    assert former is not None
    for incarnations in claims.values():
        assert incarnations == sorted(incarnations)


@pytest.mark.parametrize("name", ["A", "B"])
def test_in_the_middle_of_a_move(fleet: Fleet, name: str) -> None:
    """Whichever side is taken over, the move is off, the world generates on at its source, and moves then."""
    session, actor, twin = begins(fleet, "taken")
    target, arriving = stands_by(fleet, "B")
    side = {"A": "source", "B": "destination"}[name]
    arm(fleet[name], f"{side}.copying.delay=60000")
    request = MigrationRequest(session_id=session, destination="B", path="staged", deadline_ms=120_000.0)
    move = fleet["A"].client.migrate(request)
    until(lambda: fleet["A"].client.migration(move.id).state == "copying", "the move is under way")
    view = fleet[name].view()
    theirs = [*view.executors, *(lane.pid for lane in view.lanes)]
    old = replaced(fleet[name])
    assert old.wait(PATIENCE_S) == 4
    gone(theirs)
    is_live(fleet["A"], session)
    until(lambda: fleet["A"].client.migration(move.id).state == "aborted", "the move is off")
    assert fleet["A"].client.session(session).epoch == 1
    goes_on(twin, actor)
    until(lambda: [one.state for one in fleet["B"].view().standbys] == ["attached"], "the standby waits")
    fleet.moved(session, "B", live=False)
    assert arriving.result(PATIENCE_S)["id"] == session
    target.run(work_ms=3.0)
    goes_on(twin, target)
    one_writes_at_a_time(fleet, session)


def test_from_another_run_dir_as_on_another_host(fleet: Fleet) -> None:
    """A name that was given twice: nothing is lost or written twice; the first takes its worlds up again."""
    session, actor, twin = begins(fleet, "twice")
    here = fleet["A"]
    old = here.process
    assert old is not None
    stranger = Node("A", fleet.folder / "elsewhere", OPTIONS, fleet.mark)
    stranger._ledger = here._ledger
    (fleet.folder / "elsewhere").mkdir()
    try:
        stranger.start()
        assert old.wait(PATIENCE_S) == 4
        goes_on(twin, actor)
        # Nobody there holds its memory, and it says so; it can't take the world, only give the name back.
        until(lambda: stranger.client.session(session).state == "lost", "it is lost to the stranger")
    finally:
        stranger.stop()
    here.client.close()
    here.process = None
    here.start()
    is_live(here, session)
    assert here.client.session(session).epoch == 1
    goes_on(twin, actor)
    one_writes_at_a_time(fleet, session)
