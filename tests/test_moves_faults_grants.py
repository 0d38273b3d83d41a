"""A source that does not keep to what it was granted is cut off: more bytes than that, or far too late.

Its lanes beat and send all the time, so that no deadline of their own finds it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fault_kit import Pair, Stage
from fleet_kit import Fleet, Node, Twin, assert_world, until
from fleet_node import PATIENCE_S
from lives_kit import arm

from worldmove.manifest import Region
from worldmove.views import MigrationRequest

STALL_S = 1.0
OPTIONS = ("--memory-limit", "64MB", "--peer-timeout-ms", "4000", "--stall-ms", str(int(1000 * STALL_S)))
REGIONS = tuple(Region(f"k{number}", "uint8", ((1 << 19) + 77,)) for number in range(12))
"""A grant is for several of them, and each is a message of its own."""
OTHER = (Region("other", "uint8", (3 << 19,)),)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    liar = ("--faults", "arm")
    with Fleet("A", "B", "C", options=OPTIONS, each={"A": liar, "B": liar}) as fleet:
        made = Stage(fleet, names=("A", "B"), regions=REGIONS)
        with made.pair() as pair:  # what the path brings is known at both ends: else late might only be slow
            pair.goes_over()
            pair.goes_over()
        yield made


class Other:
    """Another world, that moves from an honest node to the one that is lied to."""

    def __init__(self, fleet: Fleet, to: str) -> None:
        self.session, self.twin = fleet.unique("other"), Twin(OTHER)
        self.source, self.target = fleet.actor("C"), fleet.actor(to)
        self.source.register(self.session, OTHER)
        self.source.run()
        self.arriving = self.target.wait_for(OTHER)
        asked = MigrationRequest(session_id=self.session, destination=to, path="staged", live=True)
        self.client = fleet["C"].client
        self.move = self.client.migrate(asked).id

    def arrives(self) -> None:
        view = self.client.wait(self.move)
        assert view.state == "released", f"{view.code}: {view.reason}"
        self.arriving.result(PATIENCE_S)
        assert_world([self.target], self.twin)


@contextmanager
def beside(pair: Pair) -> Iterator[None]:
    """Another world comes to the same receiver meanwhile, and must come well; nothing of it stays."""
    other = Other(pair.fleet, pair.there)
    yield
    other.arrives()
    pair.to.client.end_session(other.session)
    for actor in (other.source, other.target):
        pair.dismiss(actor)
    until(lambda: len(pair.to.view().standbys) == 1, "only the liar's standby is left")


def gate_is_free(node: Node) -> None:
    gate = node.view().gate
    assert (gate.outstanding_bytes, gate.waiting, gate.waiting_pauses, gate.moves) == (0, 0, 0, 0), gate


@pytest.mark.parametrize("live", [False, True], ids=["standing", "live"])
def test_a_sender_that_lets_its_grants_go_by_is_cut_off(stage: Stage, live: bool) -> None:
    with stage.pair() as pair:
        arm(pair.at, "source.admitted.lane-drip")
        before = pair.to.view().gate.cut_off
        move = pair.ask(live=live)
        until(lambda: pair.to.view().gate.outstanding_bytes > 0, "bytes are granted")
        with beside(pair):
            view = pair.aborts(move, "deadline")
            assert f"{pair.here} did not send" in (view.reason or "")
            assert pair.to.view().gate.cut_off > before
        pair.unharmed()
        gate_is_free(pair.to)
        shown = httpx.get(f"{pair.to.url}/metrics", trust_env=False).text
        assert f"worldmove_gate_cut_off {float(pair.to.view().gate.cut_off)}" in shown
        pair.goes_over(live=live)


@pytest.mark.parametrize("live", [False, True], ids=["standing", "live"])
def test_a_sender_of_what_nobody_granted_is_cut_off(stage: Stage, live: bool) -> None:
    with stage.pair() as pair:
        arm(pair.at, "source.admitted.lane-unasked-once")
        move = pair.ask(live=live)
        with beside(pair):
            view = pair.aborts(move, "framing", "transport")
            assert "4096 bytes came" in (view.reason or "")
        pair.unharmed()
        gate_is_free(pair.to)
        pair.goes_over(live=live)
