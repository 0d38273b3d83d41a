"""Asking for a move again: idempotency keys, nodes that do not own the session, and asking without moving."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet_kit import Fleet, until
from refusal_kit import REGIONS, ask, problem

from worldmove.client import Client
from worldmove.views import MigrationRequest


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", "C") as fleet:
        yield fleet


def running(fleet: Fleet) -> None:
    """World `w` generates on A."""
    source = fleet.actor("A")
    source.register("w", REGIONS)
    source.run()


def test_the_same_key_twice(fleet: Fleet) -> None:
    """While the move runs, when it has ended, and at another node: always the one move."""
    source, target = fleet.actor("A"), fleet.actor("B")
    source.register("w", REGIONS)
    source.step()
    target.wait_for(REGIONS)
    first = ask(fleet["A"], key="twice")
    assert first.status_code == 202
    move = first.json()["id"]
    again = ask(fleet["A"], key="twice")
    assert (again.status_code, again.json()["id"]) == (202, move)
    problem(ask(fleet["A"], key="twice", horizon_ms=77.0), 422, "idempotency-mismatch")
    problem(ask(fleet["A"], key="twice", destination="C"), 422, "idempotency-mismatch")
    source.ask("run")
    assert fleet["A"].client.wait(move).state == "released"
    for node in ("A", "B", "C"):
        late = ask(fleet[node], key="twice")
        assert (late.status_code, late.json()["id"], late.json()["state"]) == (202, move, "released")
    assert fleet.owner("w") == "B"


def test_the_same_key_at_once(fleet: Fleet) -> None:
    running(fleet)
    fleet.actor("B").wait_for(REGIONS)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: ask(fleet["A"], key="at-once"), range(6)))
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    (move,) = {answer.json()["id"] for answer in answers}
    assert fleet["A"].client.wait(move).state == "released"


def test_a_rejection_is_not_kept(fleet: Fleet) -> None:
    running(fleet)
    problem(ask(fleet["A"], key="patient"), 429, "no-worker")
    problem(ask(fleet["A"], key="patient"), 429, "no-worker")
    fleet.actor("B").wait_for(REGIONS)
    taken = ask(fleet["A"], key="patient")
    assert taken.status_code == 202, taken.text
    assert fleet["A"].client.wait(taken.json()["id"]).state == "released"


def test_an_aborted_move_keeps_its_key(fleet: Fleet) -> None:
    """The key stands for what was asked once: whoever wants another try takes another key."""
    source = fleet.actor("A")
    source.register("w", REGIONS)
    source.step()
    fleet.actor("B").wait_for(REGIONS)
    move = ask(fleet["A"], key="once").json()["id"]
    fleet["A"].client.cancel(move)
    again = ask(fleet["A"], key="once")
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (202, move, "aborted")


def test_a_node_that_does_not_own_the_session(fleet: Fleet) -> None:
    running(fleet)
    target = fleet.actor("B")
    target.standby(REGIONS)
    arriving = target.tell("wait")
    body = problem(ask(fleet["C"]), 409, "not-owner")
    assert (body["owner"], body["owner_url"]) == ("A", fleet["A"].url)
    here, there = fleet["A"].client.session("w"), fleet["C"].client.session("w")
    assert (here.state, there.state, there.owner_url) == ("live", "elsewhere", fleet["A"].url)
    for field in ("bytes", "ranks", "block_ms", "horizon_ms", "epoch"):
        assert getattr(here, field) == getattr(there, field) > 0, field
    # The client goes there by itself, and finds the move there again.
    with Client(fleet["C"].url) as client:
        view = client.migrate(MigrationRequest(session_id="w", destination="B"))
        assert client.wait(view.id).state == "released"
        assert client.migration(view.id).receipt is not None
        arriving.result(10)
        body = problem(ask(fleet["A"]), 409, "not-owner")
        assert (body["owner"], body["owner_url"]) == ("B", fleet["B"].url)
        assert client.session("w").owner_url == fleet["B"].url


def test_asking_without_moving(fleet: Fleet) -> None:
    running(fleet)
    client = fleet["A"].client
    wanted = MigrationRequest(session_id="w", destination="B")
    refused = client.dry_run(wanted)
    assert (refused.admissible, refused.code) == (False, "no-worker")
    assert refused.reason
    fleet.actor("B").standby(REGIONS, fingerprint={"stack": "another"})
    assert client.dry_run(wanted).code == "fingerprint-mismatch"
    fleet.actor("B").wait_for(REGIONS)
    admitted = client.dry_run(wanted)
    assert (admitted.admissible, admitted.code) == (True, None)
    assert admitted.required["state_bytes"] == sum(region.nbytes for region in REGIONS)
    for name in ("A", "B"):
        view = fleet[name].view()
        assert view.migrations == 0
        assert "bound" not in [standby.state for standby in view.standbys]
    until(lambda: client.session("w").state == "live", "the world lives")
    # It can be asked at any node: the client follows.
    with Client(fleet["C"].url) as elsewhere:
        assert elsewhere.dry_run(wanted).admissible
