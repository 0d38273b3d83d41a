"""Each fault on each side and something in each phase, on real nodes, with all checks of the soak after it.

A part of the whole table; `make soak` goes through all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from rich.console import Console

from worldmove.demo.screen import Screen
from worldmove.faults.points import LINGERING, Fault, every_fault
from worldmove.soak.plan import LEADS, Step
from worldmove.soak.report import Done
from worldmove.soak.trial import Options, Trial

AFTER = ("committed", "reclaiming", "adopted", "released")
RARE = ("settling", "reclaiming", "aborted")
"""Phases that need another fault first, and may be passed over even then."""
REFUSED = (
    *("garble", "lie-session", "lie-token", "lie-state", "steal-token", "lie-version"),
    *("lane-over-once", "lane-unasked-once"),
)
"""What a source may not be believed before the commit: nothing is installed then."""


def chosen() -> list[Fault]:
    """For each fault and side one phase, such that in the end every phase was taken."""
    found: list[Fault] = []
    taken: set[tuple[str, str]] = set()
    asked: set[tuple[str, str]] = set()
    faults = every_fault()
    # Faults of few phases choose first.
    room = {(one.side, one.what): sum(one[0::2] == other[0::2] for other in faults) for one in faults}
    for fault in sorted(faults, key=lambda one: room[one.side, one.what]):
        point, pair = (fault.side, str(fault.phase)), (fault.side, fault.what)
        fresh = point not in taken
        last = not any(
            one.side == fault.side and one.what == fault.what and (one.side, str(one.phase)) not in taken
            for one in faults
        )
        if pair not in asked and (fresh or last):
            asked.add(pair)
            taken.add(point)
            found.append(fault)
    # What may have later moves refused comes after all others.
    return sorted(found, key=lambda one: (one.what in LINGERING, one))


class Play:
    """One fleet for all of them."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        options = Options(moves=1, seconds=None, nodes=2, worlds=1, state_mb=2, seed=0)
        self.trial = Trial(options, Screen(Console(stderr=True), quiet=False))
        self._number = 0

    def __enter__(self) -> Play:
        self._runner.run(self.trial.__aenter__())
        self._runner.run(self.trial.begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.trial.__aexit__(None, None, None))
        self._runner.close()

    def take(self, fault: str) -> Done:
        """One move with this fault."""
        self._number += 1
        lead = LEADS.get(fault.rpartition(".")[0], ("",))[0]
        staged = "lane" in fault or "token" in fault or self._number % 2 == 0
        step = Step(
            number=self._number,
            world=0,
            hop=1,
            live=".copying." in fault,
            path="staged" if staged else "local",
            fault=fault,
            lead=lead,
            hold_s=0.4,
        )
        return self._runner.run(self.trial.take(step))


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    with Play() as play:
        yield play


def test_the_choice_covers_faults_sides_and_phases() -> None:
    faults, part = every_fault(), chosen()
    assert {(one.side, one.what) for one in part} == {(one.side, one.what) for one in faults}
    assert {(one.side, one.phase) for one in part} == {(one.side, one.phase) for one in faults}


@pytest.mark.parametrize("fault", chosen(), ids=lambda fault: fault.name)
def test_a_fault_harms_no_world(play: Play, fault: Fault) -> None:
    done = play.take(fault.name)
    trial = play.trial
    found = [*trial.torn, *trial.double, *trial.leaks, *trial.lost]
    assert not found
    if fault.phase not in RARE and fault.what not in ("lie-digest", "lie-length", "lie-round", "drop"):
        assert done.fired
    if done.fired and fault.what in REFUSED and fault.side == "source" and fault.phase not in AFTER:
        assert done.result != "committed"
