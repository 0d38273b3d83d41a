"""A standby whose worker never had its tickets, as the node died in between: it must not keep its memory."""

from __future__ import annotations

from fleet_kit import Fleet, until
from fleet_stack import FINGERPRINT

from worldmove.manifest import Manifest, Region
from worldmove.views import SessionSpec

REGIONS = (Region("k", "uint8", (1 << 20,)),)


def test_a_standby_that_nobody_can_join_is_forgotten_after_a_restart() -> None:
    with Fleet("A", options=("--peer-timeout-ms", "300", "--memory-limit", "64MB")) as fleet:
        node, actor = fleet["A"], fleet.actor("A")
        actor.standby(REGIONS)
        waiting = actor.tell("wait")
        manifest = Manifest(model="fleet", regions=REGIONS, block_ms=10.0, horizon_ms=1000.0)
        node.client.open_standby(SessionSpec(manifest=manifest, fingerprint=FINGERPRINT))
        free = node.view().devices[0].free_bytes
        node.kill()
        node.start()
        until(lambda: len(node.view().standbys) == 2, "both have been taken over")
        until(lambda: len(node.view().standbys) == 1, "the one that nobody can join is forgotten")
        assert node.view().standbys[0].state == "attached"
        assert node.view().devices[0].free_bytes >= free + (1 << 20)
        assert not waiting.done()
