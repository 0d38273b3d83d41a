"""A node that lends live rounds a share of the time: whole moves, and what receipts say of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_kit import Fleet
from gpu_kit import GPUS, IMAGINED
from moves_kit import Traveller

from worldmove.manifest import Region
from worldmove.views import RoundView

SHARE = 0.25
REGIONS = [Region(name, "uint8", (3 << 19,), device=GPUS[0]) for name in "kv"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    """Copies on their (imagined) GPU take long, so that the times of rounds are those of batches."""
    options = ("--gpus", GPUS[0], "--gate-rate", "100Mbit", "--executors", "1", "--lanes", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", IMAGINED)
        patch.setenv("IMAGINED_COPY_MS", "15")
        with Fleet("A", "B", options=options, each={"B": ("--live-share", str(SHARE))}) as fleet:
            yield fleet


def slowness(one: RoundView) -> float:
    """Milliseconds for each byte."""
    return one.ms / one.bytes


def test_live_rounds_have_their_share_of_the_time_and_the_pause_has_all_of_it(fleet: Fleet) -> None:
    """The last round says what a byte takes; where all of the time is lent, live ones take about as long.

    Four times as long is expected with a quarter of it. Half of that is left to what else the machine does.
    """
    world = Traveller(fleet, "w", REGIONS, share=2)
    slower = {}
    for to in "BA":
        standing = world.stand_by(to)
        world.run(200.0)
        receipt = fleet.moved(world.session, to, path="staged")
        world.arrive(standing, to)
        first, last = receipt.rounds[0], receipt.rounds[-1]
        assert (first.final, first.bytes, last.final) == (False, receipt.state_bytes, True)
        assert last.bytes > receipt.state_bytes / 4, "too little to compare with"
        slower[to] = slowness(first) / slowness(last)
    assert slower["B"] > slower["A"] / SHARE / 2
