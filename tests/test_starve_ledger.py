"""Nodes whose ledger stands on a disk that is full: an error that says so, one owner, a good next move."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_kit import Pair, Stage
from fleet_kit import ActorError, Fleet, until
from refusal_kit import REGIONS
from starve_kit import full_ledger, small_disk

LEDGER = "ledger.db"


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="wm-d-") as folder,
        small_disk(Path(folder) / "disk", 2 << 20) as disk,
    ):
        yield disk


@pytest.fixture(scope="module")
def stage(disk: Path) -> Iterator[Stage]:
    options = ("--ledger", f"sqlite:///{disk / LEDGER}", "--memory-limit", "64MB")
    with Fleet("A", "B", options=options) as fleet:
        yield Stage(fleet)


@pytest.fixture
def pair(stage: Stage) -> Iterator[Pair]:
    with stage.pair() as pair:
        yield pair


def test_a_registration(pair: Pair, disk: Path) -> None:
    """Refused by name; what was registered before is there, and there is room again for the next one."""
    actor = pair.fleet.actor(pair.here)
    with full_ledger(disk / LEDGER):
        with pytest.raises(ActorError, match="full") as refused:
            actor.register(None, REGIONS)
        assert refused.value.code == "ledger"
        assert pair.at.client.session(pair.session).owner == pair.here
        pair.goes_on()
    wanted = actor.register(None, REGIONS)["id"]
    pair.at.client.end_session(wanted)
    pair.dismiss(actor)


def test_a_move_that_can_not_be_begun(pair: Pair, disk: Path) -> None:
    """Nobody knows whether its beginning was written; the world generates all the time."""
    with full_ledger(disk / LEDGER):
        move = pair.ask(live=False)
        for _ in range(3):
            pair.goes_on()
        assert pair.at.client.migration(move).state not in ("released", "committed")
    _ended_either_way(pair, move)


def test_a_move_that_can_not_be_committed(pair: Pair, disk: Path) -> None:
    """The world stands until the ledger takes a word; then it is in exactly one place."""
    pair.halt()
    move = pair.ask(live=False)
    pair.see(move, "pausing")
    with full_ledger(disk / LEDGER):
        pair.run()
        until(lambda: "verif" in pair.at.client.migration(move).state or _over(pair, move), "it is verified")
        assert pair.at.client.session(pair.session).owner == pair.here
    _ended_either_way(pair, move)


def _ended_either_way(pair: Pair, move: str) -> None:
    """The ledger took the word that ended it, or the one that gave it up; the world can move."""
    view = pair.end(move)
    if view.state == "released":
        pair.arrived()
    else:
        assert view.code == "ledger"
        pair.unharmed()
    pair.goes_over()


def _over(pair: Pair, move: str) -> bool:
    return pair.at.client.migration(move).state in ("aborted", "released")
