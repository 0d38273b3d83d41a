"""Revisions before, between and during moves: whoever can follow does, a move that can't aborts cleanly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_kit import ActorError, Fleet, assert_world, until
from moves_kit import Traveller, receipt_of

from worldmove.errors import ManifestError
from worldmove.manifest import Region
from worldmove.views import MigrationRequest

MIB = 1 << 20
PATHS = ["local", "staged"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    # Ten seconds for the world of the tests below: what is to happen during a copy does.
    with Fleet("A", "B", "slow", each={"slow": ["--gate-rate", "8Mbit"]}) as fleet:
        yield fleet


REGIONS = [
    Region("cache", "float16", (40_000,)),
    Region("spare", "uint8", (70_000,)),
    Region("index", "int64", (3,)),
]


def revise(world: Traveller, **change: object) -> None:
    """The same revision in the worker and in the twin, at the block where the worker stands."""
    world.twin.to(world.actors[0].ask("revise", **change)["block"])
    world.twin.revise(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PATHS)
def test_before_and_between_moves(fleet: Fleet, path: str) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.step(3)
    revise(world, resize={"cache": [90_001]}, add=[Region("late", "int32", (30_000,))], drop=["spare"])
    assert fleet.client.session(world.session).revision == 2
    world.go("B", path=path)
    assert fleet.client.session(world.session).revision == 2

    revise(world, resize={"cache": [100], "index": [5]})
    revise(world, add=[Region("spare", "uint8", (0,))], drop=["late"])
    world.go("A", path=path, live=False)
    assert fleet.client.session(world.session).revision == 4
    world.go("B", path=path)


def test_a_revision_while_it_generates_freely(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.run()
    for size in (50_000, 120_000, 7):
        revise(world, resize={"cache": [size]})
    world.go("B", path="staged")
    world.run()
    revise(world, resize={"spare": [200_000]})
    world.go("A", path="local")


def test_a_standby_of_the_old_regions_is_refused(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.stand_by("B")
    revise(world, resize={"cache": [90_000]}, drop=["spare"])
    with pytest.raises(ManifestError) as refused:
        fleet.move(world.session, "B")
    assert refused.value.details["fields"] == ["regions.cache.shape", "regions.spare"]
    world.step(2)
    assert_world(world.actors, world.twin, host_state=False)
    assert fleet.owner(world.session) == "A"


@pytest.mark.parametrize("path", PATHS)
def test_while_a_move_waits_for_a_slow_rank(fleet: Fleet, path: str) -> None:
    """The pause is wanted; the rank that revises comes to a boundary too early for it, and goes on."""
    world = Traveller(fleet, "w", [Region(f"k{rank}", "int32", (30_000,), rank=rank) for rank in (0, 1)])
    standing = world.stand_by("B")
    quick, slow = world.actors
    slow.run(work_ms=300)
    quick.run(work_ms=50)
    until(lambda: quick.block > slow.block + 2, "one rank is ahead")
    client = fleet.client
    asked = client.migrate(MigrationRequest(session_id=world.session, destination="B", live=False, path=path))
    for view in client.migration_events(asked.id):
        if view.state == "pausing":
            break
    change = {"resize": {"k1": [40_000]}, "add": [Region("late", "uint8", (99,), rank=1)]}
    world.twin.to(slow.ask("revise", **change)["block"])
    world.twin.revise(**change)
    ended = client.wait(asked.id)
    assert (ended.state, ended.code) == ("aborted", "revised")
    world.halted()
    fleet["B"].client.drop_standby(standing.id)
    world.go("B", path=path)


def test_during_a_move_it_aborts_and_the_next_one_works(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", [*REGIONS, Region("big", "uint8", (10 * MIB,))], share=64)
    standing = world.stand_by("slow")
    world.run(work_ms=20)
    asked = fleet.client.migrate(
        MigrationRequest(session_id=world.session, destination="slow", path="staged")
    )
    for view in fleet.client.migration_events(asked.id):
        if view.state == "copying" and view.sent_bytes > 0:
            break
    revise(world, resize={"cache": [90_000]}, add=[Region("late", "int32", (30_000,))])
    before = world.actors[0].block
    ended = fleet.client.wait(asked.id)

    assert (ended.state, ended.code) == ("aborted", "revised")
    receipt = receipt_of(ended)
    assert (receipt.state, receipt.epoch, receipt.destination_root) == ("aborted", 1, None)
    session = fleet.client.session(world.session)
    assert (session.owner, session.state, session.epoch, session.revision) == ("A", "live", 1, 2)
    assert session.migration_id is None
    world.halted()
    assert world.twin.block >= before

    # The standby waits again, its memory wiped; it fits the session no more and is ended.
    (left,) = fleet["slow"].view().standbys
    assert (left.id, left.state) == (standing.id, "attached")
    fleet["slow"].client.drop_standby(standing.id)
    with pytest.raises(ActorError, match="session-ended"):
        standing.arrived()

    revise(world, drop=["big"])
    world.go("slow", path="staged")
    world.go("A", path="local")
