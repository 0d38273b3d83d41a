"""Moves that are refused: each says why and what was missing, and changes nothing on either node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from fault_kit import Usage, settles
from fleet_kit import Actor, ActorError, Fleet, until
from pulse_kit import Pulse
from refusal_kit import REGIONS, ask, problem

from worldmove.manifest import Region
from worldmove.views import MigrationRequest

LIMIT = 24_000_000


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    each = {
        "A": ("--memory-limit", "100MB"),
        "B": ("--memory-limit", str(LIMIT)),
        "far": ("--min-gbps", "100000"),
    }
    with Fleet("A", "B", "far", each=each) as fleet:
        yield fleet


@pytest.fixture
def world(fleet: Fleet) -> Actor:
    """The worker of world `w` on node A, which generates."""
    actor = fleet.actor("A")
    actor.register("w", REGIONS)
    actor.run()
    return actor


@pytest.fixture
def unchanged(fleet: Fleet, world: Actor) -> Iterator[Callable[[], None]]:
    """Call it where the world stands as it will; afterwards nothing of a refused move may be left."""
    before: dict[str, Usage] = {}
    epoch = world.ask("about")["epoch"]

    def note() -> None:
        before.update({name: Usage.of(fleet[name]) for name in ("A", "B")})

    with Pulse(fleet["A"], fleet["B"]):
        yield note
    view = fleet["A"].client.session("w")
    assert (view.owner, view.epoch, view.state, view.migration_id) == ("A", epoch, "live", None)
    for name, usage in before.items():
        settles(fleet[name], usage)
        assert fleet[name].view().migrations == 0
    assert not world.events
    block = world.block
    until(lambda: world.block > block, "the world generates on")


@pytest.mark.parametrize(
    ("request_", "status", "code", "field"),
    [
        ({"destination": "nowhere"}, 404, "not-found", None),
        ({"session_id": "nobody"}, 404, "not-found", None),
        ({"destination": "A"}, 409, "same-place", None),
        ({"horizon_ms": 0}, 422, "validation", "horizon_ms"),
        ({"horizon_ms": -5.0}, 422, "validation", "horizon_ms"),
        ({"horizon_ms": "soon"}, 422, "validation", "horizon_ms"),
        ({"deadline_ms": 0}, 422, "validation", "deadline_ms"),
        ({"deadline_ms": -1}, 422, "validation", "deadline_ms"),
        ({"path": "pigeon"}, 422, "validation", "path"),
        ({"codec": "zip"}, 422, "validation", "codec"),
        ({"live": "perhaps"}, 422, "validation", "live"),
        ({"devices": {"host": "gpu-1"}}, 422, "validation", "devices"),
        ({"devices": {"gpu-0": "host"}}, 422, "validation", "devices"),
        ({"devices": ["host"]}, 422, "validation", "devices"),
        ({"destination": None}, 422, "validation", "destination"),
        ({"session_id": 7}, 422, "validation", "session_id"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_what_is_asked_for(
    fleet: Fleet, request_: dict[str, Any], status: int, code: str, field: str | None
) -> None:
    for dry_run in (False, True):
        body = problem(ask(fleet["A"], dry_run=dry_run, **request_), status, code)
        assert field is None or body["field"].startswith(field)


def test_no_worker_waits(fleet: Fleet, unchanged: Callable[[], None]) -> None:
    unchanged()
    answer = ask(fleet["A"])
    body = problem(answer, 429, "no-worker")
    assert (body["required"], body["available"]) == (1, 0)
    assert int(answer.headers["Retry-After"]) >= 1


def test_the_worker_that_waited_has_gone(fleet: Fleet, unchanged: Callable[[], None]) -> None:
    unchanged()
    gone = fleet.actor("B")
    gone.standby(REGIONS)
    fleet.actors.remove(gone)
    gone.kill()
    until(lambda: fleet["B"].view().standbys[0].state == "waiting", "the standby has no worker")
    problem(ask(fleet["A"]), 429, "no-worker")
    fleet["B"].client.drop_standby(fleet["B"].view().standbys[0].id)


def test_another_fingerprint(fleet: Fleet, unchanged: Callable[[], None]) -> None:
    fleet.actor("B").standby(REGIONS, fingerprint={"stack": "another", "gpu": "none"})
    unchanged()
    body = problem(ask(fleet["A"]), 409, "fingerprint-mismatch")
    assert body["fields"] == ["gpu", "stack"]
    assert "stack" in body["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shape": (1 << 10,)}, "shape"),
        ({"dtype": "int8"}, "dtype"),
        ({"name": "other"}, "regions.other"),
        ({"stride_bytes": 4096}, "stride_bytes"),
    ],
    ids=["shape", "dtype", "name", "stride"],
)
def test_another_manifest(
    fleet: Fleet, unchanged: Callable[[], None], change: dict[str, Any], field: str
) -> None:
    first, *rest = REGIONS
    fleet.actor("B").standby([msgspec.structs.replace(first, **change), *rest])
    unchanged()
    body = problem(ask(fleet["A"]), 422, "manifest")
    assert any(field in each for each in body["fields"]), body["fields"]


def test_regions_in_another_order_or_fewer(fleet: Fleet, unchanged: Callable[[], None]) -> None:
    fleet.actor("B").standby(REGIONS[:1])
    fleet.actor("B").standby(tuple(reversed(REGIONS)))
    unchanged()
    assert problem(ask(fleet["A"]), 422, "manifest")["fields"]


def test_memory(fleet: Fleet) -> None:
    """Memory is reserved before anything moves; what was missing is told, and nothing stays reserved."""
    large = [Region("cache", "uint8", (LIMIT + 1,))]
    source = fleet.actor("A")
    source.register("large", large)
    source.run(work_ms=20)
    before = {name: Usage.of(fleet[name]) for name in ("A", "B")}
    answer = ask(fleet["A"], session_id="large", allow_unattended=True)
    body = problem(answer, 429, "no-memory")
    assert body["required_bytes"] > body["available_bytes"] > 0
    assert "Retry-After" in answer.headers
    with pytest.raises(ActorError, match="no-memory") as refused:
        fleet.actor("B").standby(large)
    assert refused.value.details["required_bytes"] > LIMIT
    for name, usage in before.items():
        settles(fleet[name], usage)
    # What fits is taken as before.
    fleet.actor("B").standby(REGIONS)


def test_a_path_below_the_floor(fleet: Fleet) -> None:
    """Slower than the destination allows: refused, never silently slow."""
    regions = [Region("cache", "uint8", (17 << 20,))]
    source = fleet.actor("A")
    source.register("w", regions)
    source.run(work_ms=20)
    fleet.actor("far").wait_for(regions)
    view = fleet.move("w", "far")
    assert (view.state, view.code) == ("aborted", "path-too-slow")
    assert view.reason is not None
    assert "--min-gbps" in view.reason
    block = source.block
    until(lambda: source.block > block, "the world generates on")


def test_no_worker_at_the_source(fleet: Fleet) -> None:
    """An unattended world moves only if that is asked for."""
    source, target = fleet.actor("A"), fleet.actor("B")
    source.register("w", REGIONS)
    source.step(3)
    source.ask("close")
    target.wait_for(REGIONS)
    view = fleet.move("w", "B")
    assert (view.state, view.code) == ("aborted", "no-worker")
    assert fleet.owner("w") == "A"
    assert fleet.moved("w", "B", allow_unattended=True).block == 3


def test_a_session_in_a_move(fleet: Fleet) -> None:
    """It can neither be moved twice, nor ended, nor digested."""
    source, target = fleet.actor("A"), fleet.actor("B")
    source.register("w", REGIONS)
    source.step()
    arriving = target.wait_for(REGIONS)
    client = fleet["A"].client
    move = client.migrate(MigrationRequest(session_id="w", destination="B"))
    until(lambda: client.migration(move.id).state == "pausing", "the move waits for a boundary")
    assert problem(ask(fleet["A"]), 409, "already-moving")["migration_id"] == move.id
    with pytest.raises(Exception, match="in move") as refused:
        client.end_session("w")
    assert refused.value.code == "conflict"  # type: ignore[attr-defined]
    assert client.migration(move.id).state == "pausing"
    with pytest.raises(ActorError, match="session-moved"):
        source.step()
    assert arriving.result(10)["block"] == 2


def test_many_ask_at_once(fleet: Fleet) -> None:
    """One of them gets the move."""
    source, target = fleet.actor("A"), fleet.actor("B")
    source.register("w", REGIONS)
    source.step()
    target.wait_for(REGIONS)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: ask(fleet["A"]), range(6)))
    (taken,) = [answer.json() for answer in answers if answer.status_code == 202]
    for answer in answers:
        if answer.status_code != 202:
            assert problem(answer, 409, "already-moving")["migration_id"] == taken["id"]
    assert fleet["A"].view().migrations == 1
    assert fleet["A"].client.cancel(taken["id"]).state == "aborted"
