"""Sessions of several ranks, each on its own GPU. The GPUs are imagined: see tests/fake_gpu."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fleet_kit import Actor, Fleet, until
from fleet_stack import FINGERPRINT
from gpu_kit import GPUS, IMAGINED
from moves_kit import Traveller

from worldmove.faults.door import order
from worldmove.manifest import Region
from worldmove.views import MigrationRequest, MigrationView

OPTIONS = (
    *("--gpus", ",".join(GPUS), "--executors", "1", "--lanes", "2", "--faults", "arm"),
    *("--direct-ring", "512MiB", "--direct-min-gbps", "0", "--peer-timeout-ms", "5000"),
)
REGIONS = [
    Region(f"{name}{rank}", "bfloat16", (elements,), rank=rank, device=gpu)
    for rank, gpu in enumerate(GPUS)
    for name, elements in (("k", 400_001), ("v", 70_003), ("one", 1))
]
WAYS = (("local", True), ("staged", False), ("direct", True), ("staged", True))
"""Path and `live` of four moves: there and back, twice."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", IMAGINED)
        with Fleet("A", "B", options=OPTIONS) as fleet:
            yield fleet


def test_all_ranks_go_there_and_back(fleet: Fleet) -> None:
    """Each rank over lanes or copies of its own GPU; all of them arrive at one block."""
    world = Traveller(fleet, "w", REGIONS)
    for number, (path, live) in enumerate(WAYS):
        receipt = world.go("BA"[number % 2], path=path, live=live)
        if path == "direct":
            assert receipt.lanes == len(GPUS)
    assert fleet.owner(world.session) == "A"


def killed(fleet: Fleet, world: Traveller, victim: Actor, path: str) -> MigrationView:
    """How a move ended in whose pause a rank's worker was killed."""
    asyncio.run(order(fleet["B"].run_dir, arm="destination.finishing.delay=700"))
    request = MigrationRequest(session_id=world.session, destination="B", path=path)
    move = fleet["A"].client.migrate(request).id
    until(lambda: asyncio.run(order(fleet["B"].run_dir)).fired, "the world stands")
    victim.kill()
    view = fleet["A"].client.wait(move)
    asyncio.run(order(fleet["B"].run_dir, disarm=True))
    until(lambda: not any(node.view().migrations for node in fleet.nodes.values()), "both sides end")
    return view


def test_a_rank_of_the_standby_that_dies_in_the_pause_costs_no_world(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    standing = world.stand_by("B")
    world.run()
    view = killed(fleet, world, standing.actors[1], "direct")
    assert (view.state, view.code) == ("aborted", "worker-lost"), view.reason
    assert fleet.owner(world.session) == "A"
    world.halted()
    world.replace("B")
    world.go("B", path="direct")


def test_a_rank_of_the_world_that_dies_in_the_pause_is_replaced(fleet: Fleet) -> None:
    """The other rank goes on meanwhile, on the same node, which keeps the world."""
    world = Traveller(fleet, "w", REGIONS)
    world.stand_by("B")
    world.run()
    view = killed(fleet, world, world.actors[1], "staged")
    assert (view.state, view.code) == ("aborted", "worker-lost"), view.reason
    session = fleet["A"].client.session(world.session)
    assert (session.owner, session.epoch, session.state) == ("A", 1, "unattended")
    world.actors[1] = fleet.actor("A")
    about = world.actors[1].ask("attach", id=world.session, fingerprint=FINGERPRINT)
    assert (about["rank"], about["epoch"]) == (1, 1)
    world.halted()
    world.replace("B")
    world.go("B", path="staged")
