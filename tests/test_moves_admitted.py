"""Admission on real nodes: verdicts with every term, a full gate, pauses that end within the horizon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fleet_kit import Actor, Fleet, until
from msgspec.structs import replace
from refusal_kit import ask, problem

from worldmove.faults.door import order
from worldmove.manifest import Region
from worldmove.views import MigrationRequest

REGIONS = (Region("k", "uint8", (4_000_000,)),)
LARGE = (Region("k", "uint8", (10_000_000,)),)
HUGE = (Region("k", "uint8", (64_000_000,)),)
"""All of it, at `SLOW_RATE`, takes longer than the deadline of the move that is judged beside it."""
RATE = 25e6
SLOW_RATE = 1e6
THIN_RATE = 2e6


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    each = {
        "B": ("--gate-rate", "200Mbit", "--gate-outstanding", "1MB", "--faults", "arm"),
        "slow": ("--gate-rate", "8Mbit"),
        "thin": ("--egress-rate", "16Mbit"),
    }
    with Fleet("A", "B", "slow", "thin", options=("--path", "staged"), each=each) as fleet:
        yield fleet


def world(fleet: Fleet, name: str, *standbys: str, regions: tuple[Region, ...] = REGIONS) -> Actor:
    actor = fleet.actor("A")
    actor.register(name, regions)
    actor.run()
    for node in standbys:
        waiting = fleet.actor(node)
        waiting.standby(regions)
        waiting.tell("wait")
    return actor


def test_a_verdict_has_every_term_and_a_refusal_says_what_was_needed(fleet: Fleet) -> None:
    world(fleet, "w", "B", "slow")
    request = MigrationRequest(session_id="w", destination="B", live=False, horizon_ms=5000)
    verdict = fleet.client.dry_run(request)
    assert verdict.admissible
    assert verdict.required["state_bytes"] == 4_000_000
    assert verdict.available["bytes_per_s"] <= RATE
    assert 160 <= verdict.required["pause_ms"] <= verdict.available["pause_ms"] == 5000
    assert verdict.required["total_ms"] <= verdict.available["total_ms"] == 60_000
    # All of it takes four seconds there: deadlines that are too short are long enough to be answered in.
    for more, condition in (({"horizon_ms": 3000}, "pause"), ({"deadline_ms": 3500}, "deadline")):
        asked: dict[str, Any] = {"destination": "slow", "live": False, "horizon_ms": 9000, **more}
        found = ask(fleet["A"], dry_run=True, **asked).json()
        refused = problem(ask(fleet["A"], **asked), 429, "inadmissible")
        for answer in (found, refused):
            assert (answer["code"], answer["condition"]) == ("inadmissible", condition)
            key = "pause_ms" if condition == "pause" else "total_ms"
            assert answer["required"][key] > answer["available"][key]
    assert fleet["slow"].view().rejected["inadmissible"] == 2
    assert (
        'worldmove_rejected_total{code="inadmissible"} 2.0'
        in httpx.get(f"{fleet['slow'].url}/metrics", trust_env=False).text
    )
    assert fleet["slow"].view().reserved_bytes_per_s == 0


def test_what_moves_show_is_what_others_are_judged_by(fleet: Fleet) -> None:
    name = fleet.unique("w")
    world(fleet, name, "B")
    receipt = fleet.moved(name, "B", live=False, horizon_ms=5000)
    assert receipt.pause_ms is not None
    assert not receipt.missed
    until(lambda: fleet["B"].view().gate.moves == 0, "the lanes are given back")
    view = fleet["B"].view()
    assert {"line", "commit", "resume", "open"} <= view.measured.keys()
    assert view.gate.outstanding_bytes == view.gate.moves == view.gate.waiting == 0
    assert view.gate.bound_bytes <= 1_000_000
    assert view.gate.granted_bytes >= 4_000_000
    assert view.gate.most_senders == 1


def test_a_gate_that_is_full_says_when_there_is_room(fleet: Fleet) -> None:
    """The first world comes to no boundary: what its move was promised stands while others are judged."""
    first, second = fleet.unique("w"), fleet.unique("w")
    world(fleet, first, "slow", regions=HUGE).ask("halt")
    world(fleet, second, "slow")
    client = fleet["A"].client
    times: dict[str, Any] = {"live": False, "horizon_ms": 120_000.0}
    long = client.migrate(
        MigrationRequest(session_id=first, destination="slow", deadline_ms=600_000, **times)
    )
    until(lambda: fleet["slow"].view().reserved_bytes_per_s > 0, "the first move is taken on")
    request = MigrationRequest(session_id=second, destination="slow", deadline_ms=60_000, **times)
    verdict = client.dry_run(request)
    assert (verdict.admissible, verdict.code) == (False, "gate-full"), verdict
    assert verdict.retry_after_ms is not None
    assert 0 < verdict.retry_after_ms < 60_000
    assert verdict.available["share_bytes_per_s"] < verdict.required["bytes_per_s"] < SLOW_RATE
    client.cancel(long.id)
    assert client.wait(long.id).state == "aborted"
    until(lambda: fleet["slow"].view().reserved_bytes_per_s == 0, "what it was promised is free again")
    assert client.dry_run(request).admissible


def test_a_pause_that_lasts_too_long_ends_within_the_horizon(fleet: Fleet) -> None:
    name = fleet.unique("w")
    actor = world(fleet, name, "B")
    asyncio.run(order(fleet["B"].run_dir, arm="destination.finishing.delay=600000"))
    view = fleet.move(name, "B", horizon_ms=1500)
    assert (view.state, view.code) == ("aborted", "horizon"), view.reason
    before = actor.ask("about")["block"]
    until(lambda: actor.ask("about")["block"] > before, "the world generates on")
    assert fleet.owner(name) == "A"
    assert "settle" in fleet["A"].view().measured


def test_a_node_sends_no_faster_than_its_egress(fleet: Fleet) -> None:
    name = fleet.unique("w")
    actor = fleet.actor("thin")
    actor.register(name, LARGE)
    actor.run()
    waiting = fleet.actor("A")
    waiting.standby(LARGE)
    waiting.tell("wait")
    client = fleet["thin"].client
    request = MigrationRequest(session_id=name, destination="A", live=False, horizon_ms=9000)
    assert client.dry_run(request).available["egress_bytes_per_s"] == THIN_RATE
    receipt = fleet.moved(name, "A", live=False, horizon_ms=9000)
    assert receipt.data_ms is not None
    assert receipt.data_ms >= 0.8 * 1000 * 4_000_000 / THIN_RATE, "all but what may go at once"
    assert not receipt.missed


def test_what_lacks_another_move_s_egress_is_told_when_that_ends(fleet: Fleet) -> None:
    """The destination knows only the rest; without the other move there would be nothing to wait for."""
    client, waiting = fleet["thin"].client, fleet.actor("A")
    for name, regions in (("large", LARGE), ("small", REGIONS)):
        actor = fleet.actor("thin")
        actor.register(name, regions)
        actor.run()
    waiting.standby(LARGE)
    waiting.tell("wait")
    fleet.actor("A").standby(REGIONS)
    small = MigrationRequest(session_id="small", destination="A", live=False, deadline_ms=5500)
    assert client.dry_run(small).admissible
    hopeless = replace(small, deadline_ms=1000)
    assert client.dry_run(hopeless).retry_after_ms is None
    move = client.migrate(replace(small, session_id="large", deadline_ms=6500, horizon_ms=9000)).id
    until(lambda: client.migration(move).sent_bytes > 0, "the other one sends")
    verdict = client.dry_run(small)
    assert (verdict.admissible, verdict.code) == (False, "inadmissible"), verdict
    assert verdict.retry_after_ms is not None
    assert 0 < verdict.retry_after_ms <= 6500
    answer = ask(fleet["thin"], session_id="small", destination="A", live=False, deadline_ms=5500)
    assert 0 < problem(answer, 429, "inadmissible")["retry_after_ms"] <= verdict.retry_after_ms
    assert client.dry_run(hopeless).retry_after_ms is None, "it would be too late alone, too"
    assert client.wait(move).state == "released"
    assert client.dry_run(small).admissible
