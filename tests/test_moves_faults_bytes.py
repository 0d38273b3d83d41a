"""Bytes that lie: flipped in flight, flipped in the destination's memory, cut short, or never sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_kit import SHARE, SLOW, Arena, Pair
from fleet_kit import Fleet
from fleet_node import PATIENCE_S

from worldmove.manifest import Region
from worldmove.views import Damage

FAST = tuple(option for option in SLOW if option not in ("--gate-rate", "24Mbit"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    faults = {
        "once": ("--faults", "lane-flip-once"),
        "liar": ("--faults", "lane-flip-always"),
        "short": ("--faults", "lane-short-once"),
        "silent": ("--faults", "lane-stall"),
    }
    each = {name: (*FAST, *options) for name, options in faults.items()}
    with Fleet("honest", *faults, each={**each, "honest": FAST}) as fleet:
        yield fleet


def beside(region: Region, block: int) -> int:
    """A byte in the middle of a leaf that `block` does not write, far from the part that it does."""
    written = block * -(-region.nbytes // SHARE) % region.nbytes
    quarter = region.nbytes // 4 if written >= region.nbytes // 2 else 3 * region.nbytes // 4
    return quarter // region.leaf_bytes * region.leaf_bytes + region.leaf_bytes // 2


def test_flipped_in_flight_once(fleet: Fleet) -> None:
    """The first chunk of the paused world is damaged: its leaf is found, sent again, and named."""
    pair = Pair(fleet, names=("once", "honest"))
    receipt = pair.goes_over()
    (damage,) = receipt.damaged
    (region,) = [region for region in pair.regions if region.name == damage.region]
    assert 0 <= damage.leaf < region.leaves
    assert damage.attempts == 1
    assert receipt.repair_bytes == region.leaf_bytes
    assert receipt.sent_bytes == receipt.state_bytes + receipt.repair_bytes
    assert receipt.kept_bytes == 0


def test_flipped_in_the_destination_s_memory(fleet: Fleet) -> None:
    """By the standby's own worker, after the bytes have landed and have been read back.

    Before it pauses the halted world makes one more block: what that writes would be sent in any case, so the
    flipped byte lies elsewhere.
    """
    pair = Pair(fleet, names=("once", "honest"))
    pair.replace_target(wait=False)
    pair.halt()
    # Its stack looks for a world now and then, and does something else in between.
    looking = pair.target.tell("wait", timeout_s=1.0)
    move = pair.ask()
    assert looking.result(PATIENCE_S) is None
    pair.see(move, "pausing")
    region = next(region for region in pair.regions if region.name == "layer0.v")
    at = beside(region, pair.source.block + 1)
    right = int(pair.twin.to(pair.source.block).memory[region.name][at])
    pair.target.ask("poke", name=region.name, offset=at, hex=bytes([right ^ 0xFF]).hex())
    pair.arriving = pair.target.tell("wait")
    pair.run()
    view = pair.end(move)
    assert view.state == "released", view
    assert view.receipt is not None
    assert view.receipt.damaged == (Damage(region=region.name, leaf=at // region.leaf_bytes, attempts=1),)
    pair.arrived()


@pytest.mark.parametrize(
    ("name", "live"), [("liar", True), ("liar", False), ("short", True), ("silent", False)]
)
def test_a_source_whose_lanes_never_tell_the_truth(fleet: Fleet, name: str, live: bool) -> None:
    codes = {
        "liar": ("damaged",),
        "short": ("framing", "transport", "process-lost", "connection-lost"),
        "silent": ("deadline", "connection-lost"),
    }
    pair = Pair(fleet, names=(name, "honest"))
    Arena(pair.at, pair.regions).paint()
    Arena(pair.to, pair.regions).paint()
    view = pair.aborts(pair.ask(live=live), *codes[name])
    assert view.reason
    pair.unharmed()
    assert Arena(pair.at, pair.regions).sings()
    assert Arena(pair.to, pair.regions).sings()
    # The other path does not use the lanes that lie: the standby is as good as before.
    pair.goes_over(path="local")
