"""Commits, aborts, adoptions and reclaims that come late, twice, or whose reply is lost: one owner, always.

Each on real nodes with a real ledger; what goes wrong is told by name (`worldmove.faults`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fault_kit import SLOW, Arena, Pair, Stage, Usage
from fleet_kit import Fleet, Node, assert_world, until
from fleet_node import PATIENCE_S

from worldmove.errors import NotFoundError
from worldmove.faults.door import order
from worldmove.manifest import Region

LATE = "ledger-late=2500"
ORPHAN = "ledger-orphan=400"
TWICE = "ledger-twice=400"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=(*SLOW, "--gate-rate", "1Gbit", "--faults", "arm")) as fleet:
        yield Stage(fleet, path="local")


def arm(pair: Pair, *names: str) -> None:
    for name in names:
        node = pair.at if name.startswith("source") else pair.to
        asyncio.run(order(node.run_dir, arm=name))


def fired(node: Node) -> list[str]:
    """What has happened on a node; forgotten after that."""
    found = asyncio.run(order(node.run_dir)).fired
    asyncio.run(order(node.run_dir, disarm=True))
    return found


def still(pair: Pair, move: str) -> None:
    """Everything has had its time: what was to come late has come."""
    until(
        lambda: pair.at.view().migrations + pair.to.view().migrations == 0, f"move {move} is over everywhere"
    )


def taken_back(pair: Pair, move: str, times: int = 1) -> None:
    """The source has reclaimed its world: two epochs further, and nobody else generates."""
    view = pair.end(move)
    assert (view.state, view.code) in {("aborted", "reclaimed"), ("aborted", "peer")}, view
    pair.epoch += 2 * times
    pair.unharmed()


@pytest.mark.parametrize("how", [LATE, ORPHAN])
def test_a_commit_that_lands_after_its_move_was_aborted(stage: Stage, how: str) -> None:
    with stage.pair() as pair:
        arm(pair, f"destination.verifying.{how}")
        move = pair.ask(deadline_ms=1200)
        pair.aborts(move, "deadline", "ledger", "aborted")
        pair.goes_on()
        still(pair, move)
        assert fired(pair.to) == [f"destination.verifying.{how}"]
        pair.unharmed()


@pytest.mark.parametrize("how", ["ledger-lost", "ledger-late=300", TWICE])
@pytest.mark.parametrize("phase", ["verifying", "committed"])
def test_a_commit_or_adoption_whose_reply_is_lost_late_or_repeated(
    stage: Stage, phase: str, how: str
) -> None:
    with stage.pair() as pair:
        arm(pair, f"destination.{phase}.{how}")
        move = pair.ask()
        view = pair.end(move)
        assert view.state == "released"
        assert view.receipt is not None
        # A source that looks into the ledger before the word of its peer comes is told no times.
        resume_ms = view.receipt.resume_ms
        assert resume_ms is None or resume_ms < view.receipt.total_ms
        pair.arrived()
        assert fired(pair.at) == [f"destination.{phase}.{how}"]
        # A repetition comes while the world is somebody's already: it changes nothing.
        pair.goes_on()


def test_a_world_that_has_just_come_can_be_ended(stage: Stage) -> None:
    """Its move stands in the record until the destination has heard that the source let go."""
    fleet, regions = stage.fleet, (Region("brief", "uint8", (4096,)),)
    source, target = fleet.actor("A"), fleet.actor("B")
    source.register("brief", regions)
    source.run()
    arriving = target.wait_for(regions)
    asyncio.run(order(fleet["B"].run_dir, arm="destination.released.ledger-late=1000"))
    fleet.moved("brief", "B", live=False)
    arriving.result(PATIENCE_S)
    fleet["B"].client.end_session("brief")
    with pytest.raises(NotFoundError):
        fleet["B"].client.session("brief")
    assert fired(fleet["B"]) == ["destination.released.ledger-late=1000"]
    for actor in (source, target):
        actor.kill()
        fleet.actors.remove(actor)


@pytest.mark.parametrize("phase", ["verifying", "committed"])
def test_a_receipt_has_both_roots_where_the_destination_s_proof_was_lost(stage: Stage, phase: str) -> None:
    """A root of what lies there stands in the record, too."""
    with stage.pair() as pair:
        arm(pair, f"destination.{phase}.drop")
        view = pair.end(pair.ask())
        assert fired(pair.to) == [f"destination.{phase}.drop"]
        assert (view.state, view.code) == ("released", "protocol")
        assert view.receipt is not None
        assert view.receipt.source_root == view.receipt.destination_root is not None
        pair.arrived()


def test_an_adoption_that_lands_after_its_caller_gave_up(stage: Stage) -> None:
    """Taken back or adopted, whoever was first: the record says who, and there is only one."""
    with stage.pair() as pair:
        arm(pair, f"destination.committed.{ORPHAN}")
        move = pair.ask()
        pair.end(move)
        assert fired(pair.to) == [f"destination.committed.{ORPHAN}"]
        still(pair, move)
        if pair.arriving.done():
            pair.arrived()
        else:
            taken_back(pair, move)


@pytest.mark.parametrize("how", ["ledger-refuse", "ledger-lost", "ledger-late=300", ORPHAN, TWICE])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_abort_that_is_refused_lost_late_or_repeated(stage: Stage, side: str, how: str) -> None:
    with stage.pair() as pair:
        arm(pair, "destination.finishing.starve", f"{side}.settling.{how}")
        move = pair.ask()
        pair.aborts(move, "no-memory")
        still(pair, move)
        assert f"{side}.settling.{how}" in fired(pair.at) + fired(pair.to)
        pair.unharmed()


@pytest.mark.parametrize("how", ["ledger-refuse", "ledger-lost", "ledger-late=1500", ORPHAN, TWICE])
def test_a_move_whose_beginning_is_uncertain(stage: Stage, how: str) -> None:
    """Also where it lands in the ledger after the move was given up: the record must not stay `moving`."""
    with stage.pair() as pair:
        arm(pair, f"source.admitted.{how}")
        move = pair.ask(deadline_ms=1000)
        view = pair.end(move)
        still(pair, move)
        assert fired(pair.at) == [f"source.admitted.{how}"]
        if view.state == "released":
            pair.arrived()
        else:
            pair.unharmed()
        pair.goes_over()


@pytest.mark.parametrize("how", ["", "ledger-lost", ORPHAN])
def test_a_destination_that_dies_between_commit_and_adoption(stage: Stage, how: str) -> None:
    """The source takes the world back; the destination's next life wipes what it has, and waits again."""
    with stage.pair() as pair:
        arm(pair, "destination.committed.kill", *([f"source.reclaiming.{how}"] if how else []))
        move = pair.ask()
        until(
            lambda: pair.to.process is None or pair.to.process.poll() is not None, "the destination is dead"
        )
        pair.to.kill()
        view = pair.end(move)
        assert view.state == "aborted", view
        pair.goes_on()
        assert fired(pair.at) == ([f"source.reclaiming.{how}"] if how else [])
        pair.to.start()
        until(lambda: [one.state for one in pair.to.view().standbys] == ["attached"], "the standby is back")
        assert Arena(pair.to, pair.regions).wiped()
        record = pair.at.client.session(pair.session)
        assert (record.owner, record.epoch) == (pair.here, pair.epoch + 2)
        pair.epoch = record.epoch
        pair.before[pair.there] = Usage.of(pair.to)
        pair.unharmed()


def test_a_source_that_dies_after_the_commit(stage: Stage) -> None:
    """The destination has the world; the source's next life finds that out, and its worker lets go."""
    with stage.pair() as pair:
        arm(pair, "source.committed.kill")
        pair.ask()
        until(
            lambda: pair.at.process is not None and pair.at.process.poll() is not None, "the source is dead"
        )
        pair.at.kill()
        about = pair.arriving.result(PATIENCE_S)
        pair.at.start()
        until(lambda: bool(pair.source.events), "the former worker hears that its world has gone")
        assert about["block"] == pair.source.events[0]["block"]
        assert pair.source.events[0]["event"] in ("moved", "ended")
        assert_world([pair.target], pair.twin)
        assert pair.to.client.session(pair.session).owner == pair.there
        pair.epoch = about["epoch"]
        pair.dismiss(pair.source)
        pair.source, pair.here, pair.there = pair.target, pair.there, pair.here
        pair.run()
        pair.stand_by()
        pair.goes_over()


def test_a_ledger_that_is_away_while_the_world_stands(stage: Stage) -> None:
    """Only the record can say who goes on: the world waits, fenced, and then it goes on."""
    with stage.pair() as pair:
        arm(pair, "source.verifying.ledger-down=2000", "destination.verifying.ledger-refuse")
        move = pair.ask()
        until(lambda: pair.at.client.session(pair.session).state == "fenced", "the world is fenced")
        pair.end(move)
        still(pair, move)
        fired(pair.at)
        fired(pair.to)
        pair.unharmed()
        pair.goes_over()


def test_a_shutdown_that_a_ledger_which_is_away_does_not_put_off(stage: Stage) -> None:
    """The move is left to its record; the node's next life settles it, and the world has never left."""
    with stage.pair() as pair:
        arm(pair, "source.finishing.ledger-down=600000", "destination.finishing.starve")
        pair.ask()
        until(lambda: pair.at.client.session(pair.session).state == "fenced", "the world is fenced")
        pair.at.stop()
        pair.at.start()
        until(lambda: pair.at.client.session(pair.session).state == "live", "the world is live again")
        pair.epoch = pair.at.client.session(pair.session).epoch
        pair.unharmed()
        pair.goes_over()
