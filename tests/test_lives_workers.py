"""Workers that die, alone and with their node, and keepers that die: who goes on with what is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import lives_kit
import pytest
from fleet_kit import Actor, ActorError, Fleet, Node, Twin, assert_world, until
from lives_kit import REGIONS, becomes, begins, goes_on

from worldmove.errors import ConflictError, NoMemoryError
from worldmove.manifest import Region
from worldmove.views import MigrationRequest

EVERY = 8
# The rate gives what is to happen during a copy the time for it.
OPTIONS = (*lives_kit.OPTIONS, "--gate-rate", "24Mbit")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        yield fleet


def dies(fleet: Fleet, actor: Actor) -> None:
    actor.kill()
    fleet.actors.remove(actor)


def taken_up(fleet: Fleet, session: str, twin: Twin) -> Actor:
    """Another worker takes the world up: it is the twin's at its block, and generates."""
    actor = fleet.actor("A")
    actor.ask("attach", id=session, fingerprint={"stack": "fleet tests"})
    assert_world([actor], twin)
    actor.step(3)
    assert_world([actor], twin, host_state=False)
    return actor


def keeper_dies(node: Node) -> int:
    """SIGKILL of a node's keeper; returns the pid of the one that takes its place."""
    former = node.view().keeper
    os.kill(former, signal.SIGKILL)
    until(lambda: node.view().keeper != former, "another keeper is there")
    return node.view().keeper


def test_another_worker_continues_from_the_last_boundary(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "left")
    actor.ask("halt")
    dies(fleet, actor)
    becomes(fleet["A"], session, "unattended")
    taken_up(fleet, session, twin)


def test_a_world_torn_inside_a_block_is_refused(fleet: Fleet) -> None:
    session, actor, _ = begins(fleet, "torn")
    actor.ask("halt")
    actor.ask("half")
    dies(fleet, actor)
    becomes(fleet["A"], session, "unattended")
    with pytest.raises(ActorError, match="middle of a block"):
        fleet.actor("A").ask("attach", id=session, fingerprint={"stack": "fleet tests"})
    with pytest.raises(ConflictError):
        fleet["A"].client.digest(session)


def test_with_snapshots_every_death_of_a_worker_is_survived(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "spared", snapshot_every=EVERY)
    node = fleet["A"]
    for _ in range(3):
        taken = node.client.session(session).snapshot_block or 0
        until(lambda taken=taken: (node.client.session(session).snapshot_block or 0) > taken, "a snapshot")
        actor.ask("halt")
        actor.ask("half")
        block = actor.block
        dies(fleet, actor)
        becomes(node, session, "unattended")
        twin = Twin(REGIONS)
        actor = taken_up(fleet, session, twin)
        assert block - 4 * EVERY < twin.block - 3 <= block
        actor.run(work_ms=3.0)
    goes_on(twin, actor)


def test_snapshots_go_with_the_world_and_outlive_the_node(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "goes", snapshot_every=EVERY)
    here, there = fleet["A"], fleet["B"]
    target = fleet.actor("B")
    target.standby(REGIONS)
    arriving = target.tell("wait")
    fleet.moved(session, "B")
    assert arriving.result(60)["id"] == session
    actor.event("moved")
    target.run(work_ms=3.0)
    until(lambda: there.client.session(session).snapshot_block, "a snapshot at its new node")
    there.kill()
    target.ask("halt")
    target.ask("half")
    dies(fleet, target)
    there.start()
    becomes(there, session, "unattended")
    another = fleet.actor("B")
    another.ask("attach", id=session, fingerprint={"stack": "fleet tests"})
    assert_world([another], Twin(REGIONS))
    del here, twin


def test_a_snapshot_that_does_not_fit_is_refused_at_registration(fleet: Fleet) -> None:
    free = fleet["A"].view().devices[0].free_bytes
    regions = (Region("large", "uint8", (40 << 20,)),)
    with pytest.raises(ActorError) as refused:
        fleet.actor("A").register(fleet.unique("large"), regions, snapshot_every=1)
    assert refused.value.code == NoMemoryError.code
    until(lambda: fleet["A"].view().devices[0].free_bytes == free, "nothing stays reserved")


def test_worker_and_node_killed_together_leave_the_world_with_the_keeper(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "both")
    actor.ask("halt")
    fleet["A"].kill()
    dies(fleet, actor)
    fleet["A"].start()
    becomes(fleet["A"], session, "unattended")
    taken_up(fleet, session, twin)


def test_a_keeper_that_dies_is_replaced_and_holds_everything(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "kept", snapshot_every=EVERY)
    node = fleet["A"]
    keeper = keeper_dies(node)
    goes_on(twin, actor)
    until(lambda: holds(keeper), "the new keeper holds the arenas")
    actor.ask("halt")
    node.kill()
    dies(fleet, actor)
    node.start()
    becomes(node, session, "unattended")
    taken_up(fleet, session, twin)


def holds(pid: int) -> bool:
    """Whether a process holds an arena and a spare copy."""
    links = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return all(any(name in link for link in links) for name in ("worldmove-arena", "worldmove-spare"))


def test_a_keeper_that_dies_while_a_move_runs(fleet: Fleet) -> None:
    session, actor, twin = begins(fleet, "carried")
    target = fleet.actor("B")
    target.standby(REGIONS)
    arriving = target.tell("wait")
    move = fleet["A"].client.migrate(MigrationRequest(session_id=session, destination="B", path="staged"))
    until(lambda: fleet["A"].client.migration(move.id).sent_bytes > 0, "bytes have landed")
    for node in fleet.nodes.values():
        keeper_dies(node)
    assert fleet["A"].client.wait(move.id).state == "released"
    assert arriving.result(60)["id"] == session
    actor.event("moved")
    assert_world([target], twin)
