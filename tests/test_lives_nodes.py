"""Nodes that die, are stopped, or are replaced, and the worlds that go on beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import Actor, Fleet, Node, Twin, assert_world, until
from fleet_node import PATIENCE_S
from lives_kit import (
    OPTIONS,
    REGIONS,
    arm,
    begins,
    goes_on,
    gone,
    has_stopped,
    is_live,
    replaced,
    stands_by,
    state,
)

from worldmove.errors import ConflictError, NotFoundError, ValidationError
from worldmove.memory.keeping import Keeper
from worldmove.views import MigrationRequest


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        yield fleet


def arrived(fleet: Fleet, session: str, arriving: Future[Any], actor: Actor, twin: Twin) -> None:
    """A world has moved: it is the twin's, and its former worker has heard where it went."""
    about = arriving.result(PATIENCE_S)
    assert about["id"] == session
    assert_world([actor], twin)
    assert fleet.owner(session) == actor.node.name


def test_a_node_killed_with_all_its_processes_is_replaced_and_its_world_moves_on(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "killed")
    target, arriving = stands_by(fleet, "B")
    node = fleet["A"]
    view = node.view()
    pids = [node.pid, *view.executors, *node.lanes()]
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    node.kill()
    gone(pids)
    goes_on(twin, actor)
    node.start()
    is_live(node, session)
    assert b'worldmove_recovered_total{kind="session"} 1.0' in metrics(node)
    assert node.view().incarnation > view.incarnation
    goes_on(twin, actor)
    fleet.moved(session, "B")
    arrived(fleet, session, arriving, target, twin)


def metrics(node: Node) -> bytes:
    """Prometheus' text."""
    answer = node.client._http.get(f"{node.url}/metrics")
    return answer.content


def test_a_stopped_incarnation_that_wakes_up_changes_nothing(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "woken")
    old = fleet["A"]
    stands_by(fleet, "A")
    old.freeze()
    frozen, new = replaced(old), old
    is_live(new, session)
    goes_on(twin, actor)
    os.kill(frozen.pid, signal.SIGCONT)
    # It finds that it is fenced and ends by itself, or (after its time) has been ended.
    assert frozen.wait(PATIENCE_S) in (4, -signal.SIGKILL)
    until(lambda: [s.state for s in new.view().standbys] == ["attached"], "the standby is the new node's")
    goes_on(twin, actor)
    is_live(new, session)
    # What the keeper holds is still the new one's: it survives another restart.
    new.kill()
    new.start()
    is_live(new, session)
    goes_on(twin, actor)


def test_a_stopped_destination_is_ended_before_its_memory_is_lent_again(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "late")
    target, arriving = stands_by(fleet, "B")
    node = fleet["B"]
    arm(node, "destination.copying.stop")
    request = MigrationRequest(session_id=session, destination="B", path="staged")
    move = fleet["A"].client.migrate(request)
    has_stopped(node)
    pids = [pid for pid in fleet.processes() if parent(pid) == node.pid]
    frozen = replaced(node)
    until(lambda: [one.state for one in node.view().standbys] == ["attached"], "the standby waits again")
    # The standby is lent out again only when nothing of the former one is left that could write.
    assert frozen.wait() == -signal.SIGKILL
    gone(pids)
    assert fleet["A"].client.wait(move.id).state == "aborted"
    goes_on(twin, actor)
    fleet.moved(session, "B")
    arrived(fleet, session, arriving, target, twin)


def parent(pid: int) -> int:
    """The parent of a process, proc(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_second_node_of_the_name_takes_over_from_one_that_runs(fleet: Fleet) -> None:
    """A rolling upgrade without a gap: the old one sees that it is fenced, and goes."""
    session, actor, twin = begins(fleet, "upgraded")
    node = fleet["A"]
    old = replaced(node)
    assert old.wait(PATIENCE_S) == 4
    is_live(node, session)
    goes_on(twin, actor)


def test_an_upgrade_by_sigterm_touches_no_world(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "stopped")
    inodes = actor_inodes(actor)
    node = fleet["A"]
    node.stop()
    goes_on(twin, actor)
    node.start()
    is_live(node, session)
    goes_on(twin, actor)
    assert inodes == actor_inodes(actor)


def actor_inodes(actor: Actor) -> set[str]:
    """The arenas that a worker has mapped."""
    maps = Path(f"/proc/{actor.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:worldmove-arena" in line}


def test_a_worker_that_stood_paused_waits_for_its_record(fleet: Fleet) -> None:
    """Committed and not adopted, and both nodes are gone: the source takes its world back, and no sooner."""
    session, actor, twin = begins(fleet, "paused")
    _, arriving = stands_by(fleet, "B")
    here, there = fleet["A"], fleet["B"]
    arm(there, "destination.committed.stop")
    here.client.migrate(MigrationRequest(session_id=session, destination="B", live=False))
    has_stopped(there)
    here.kill()
    here.start()
    assert state(here, session) == "fenced"
    with pytest.raises(ConflictError, match="settle"):
        here.client.resolve_session(session, "keep")
    is_live(here, session)
    assert here.client.session(session).epoch == 3
    there.thaw()
    goes_on(twin, actor)
    until(lambda: [one.state for one in there.view().standbys] == ["attached"], "the standby waits again")
    assert not arriving.done()


def test_sessions_that_nobody_holds_any_more_are_lost_and_say_so(fleet: Fleet) -> None:
    """A host that was started again: node, keeper and workers are gone, the ledger has the record."""
    session, actor, _ = begins(fleet, "lost")
    node = fleet["A"]
    keeper = node.view().keeper
    node.kill()
    actor.kill()
    fleet.actors.remove(actor)
    os.kill(keeper, signal.SIGKILL)
    gone([keeper])
    node.start()
    assert state(node, session) == "lost"
    until(lambda: b'worldmove_sessions{state="lost"} 1.0' in metrics(node), "it is counted")
    with pytest.raises(NotFoundError, match="lost"):
        node.client.attach(session, {})
    node.client.end_session(session)
    with pytest.raises(NotFoundError):
        node.client.session(session)
    again = fleet.actor("A")
    assert again.register(session, REGIONS)["epoch"] == 2


def test_a_world_whose_ledger_was_lost_waits_for_the_operator(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "doubted")
    other, another, _ = begins(fleet, "written-off")
    node = fleet["A"]
    with pytest.raises(ConflictError, match="nothing to resolve"):
        node.client.resolve_session(session, "keep")
    node.kill()
    with sqlite3.connect(fleet.folder / "ledger.db") as ledger:
        ledger.execute("DELETE FROM sessions WHERE id IN (?, ?)", (session, other))
    node.start()
    assert state(node, session) == "fenced"
    assert {one.id: one.state for one in node.client.sessions().sessions}[session] == "fenced"
    with pytest.raises(ConflictError, match="fenced"):
        node.client.attach(session, {})
    goes_on(twin, actor)
    found = node.client.resolve_session(session, "keep")
    assert found.session is not None
    assert (found.session.owner, found.session.epoch) == ("A", 2)
    is_live(node, session)
    goes_on(twin, actor)
    assert node.client.resolve_session(other, "end").session is None
    assert another.event("ended")["reason"] == "the session has ended"
    target, arriving = stands_by(fleet, "B")
    fleet.moved(session, "B")
    arrived(fleet, session, arriving, target, twin)


def test_a_session_of_a_node_that_is_gone_for_good_is_written_off_elsewhere(fleet: Fleet) -> None:
    session, actor, _ = begins(fleet, "orphan", "B")
    here, there = fleet["A"], fleet["B"]
    with pytest.raises(ConflictError, match="holds no memory"):
        here.client.resolve_session(session, "keep")
    there.kill()
    assert here.client.resolve_session(session, "end").session is None
    with pytest.raises(NotFoundError):
        here.client.session(session)
    # It comes back after all: the record stands, and its world ends.
    there.start()
    assert actor.event("ended")["reason"] == "the session has ended"
    # Whoever comes to the door is told at once; the slot itself goes when the node has settled what it found.
    until(lambda: asyncio.run(_kept(there)) == [], "the keeper forgets the session", 10)


async def _kept(node: Node) -> list[str]:
    keeper = await Keeper.start(node.run_dir / "keeper.sock")
    try:
        return await keeper.keys()
    finally:
        await keeper.close()


def test_a_confirmation_has_to_name_the_session(fleet: Fleet) -> None:
    answer = fleet["A"].client._http.post(
        f"{fleet['A'].url}/v1/sessions/w/resolve", json={"decision": "end", "confirm": "v"}
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "confirm")
    assert ValidationError.code == answer.json()["code"]
