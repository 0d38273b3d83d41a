"""Every route over a small node: shapes of answers, problems, limits, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from faces_kit import SPEC, FakeNode, kinds, settings
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from api.app import App, create_app
from api.guard import MAX_BODY, MAX_REGISTRATION
from api.problems import MEDIA_TYPE, status_of
from worldmove import errors

MOVE = {"session_id": "w", "destination": "B"}


@pytest.fixture
def node(run_dir: Path) -> FakeNode:
    return FakeNode(settings(run_dir), "http://127.0.0.1:1")


@pytest.fixture
def app(node: FakeNode) -> App:
    return create_app(node)


@pytest.fixture
async def http(app: App) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
        yield client


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the form of a problem and returns it."""
    assert response.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["status"], body["code"]) == (status, status, code), body
    assert body["type"].endswith(code)
    assert body["title"]
    assert body["detail"]
    return body


async def test_health_readiness_and_metrics(http: httpx.AsyncClient, node: FakeNode) -> None:
    assert (await http.get("/v1/healthz")).json() == {"status": "ok"}
    assert (await http.get("/v1/readyz")).json() == {"ready": True}
    node.missing = ["lanes", "ledger"]
    assert problem(await http.get("/v1/readyz"), 503, "not-ready")["missing"] == ["lanes", "ledger"]
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics.content == node.metrics()


async def test_nodes(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/node")).json()["keeper"] == 4
    assert [node["name"] for node in (await http.get("/v1/nodes")).json()["nodes"]] == ["A"]


async def test_registration_becomes_a_manifest(http: httpx.AsyncClient, node: FakeNode) -> None:
    region = {
        "name": "k",
        "dtype": "bfloat16",
        "shape": [2, 4096],
        "rank": 0,
        "stride_bytes": 8192,
        "source": {"kind": "shm", "name": "cache", "offset": 4096},
    }
    body = SPEC | {"id": "w", "endpoint": "http://v", "regions": [region], "fingerprint": {"cpu": "x"}}
    response = await http.post("/v1/sessions", json=body)
    assert response.status_code == 201
    assert response.headers["location"] == "/v1/sessions/w"
    assert response.json()["tickets"] == [{"rank": 0, "token": "once-0"}]
    spec = node.specs["w"]
    assert spec.fingerprint == {"cpu": "x"}
    assert (spec.manifest.endpoint, spec.manifest.host_state_bytes) == ("http://v", 65536)
    assert spec.regions[0].shape == (2, 4096)
    assert spec.regions[0].leaf_bytes == 8192
    assert (spec.regions[0].source.kind, spec.regions[0].source.name) == ("shm", "cache")
    problem(await http.post("/v1/sessions", json=body), 409, "session-exists")


async def test_sessions_are_paged_shown_and_ended(http: httpx.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await http.post("/v1/sessions", json=SPEC | {"id": name})
    page = (await http.get("/v1/sessions", params={"limit": 2})).json()
    assert [view["id"] for view in page["sessions"]] == ["a", "b"]
    page = (await http.get("/v1/sessions", params={"after": page["next"]})).json()
    assert ([view["id"] for view in page["sessions"]], page["next"]) == (["c"], None)
    assert (await http.get("/v1/sessions/a")).json()["bytes"] == 128
    deleted = await http.delete("/v1/sessions/a")
    assert (deleted.status_code, deleted.content) == (204, b"")
    problem(await http.get("/v1/sessions/a"), 404, "not-found")


async def test_digest_keeps_whole_seeds(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "w"})
    assert (await http.get("/v1/sessions/w/digest")).json()["seed"] == 2**64 - 1


async def test_boundary_and_attach(http: httpx.AsyncClient, node: FakeNode) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "w"})
    state = base64.b64encode(b"\0\xff").decode()
    body = {"rank": 0, "block": 9, "host_state": state, "wait_ms": 20}
    assert (await http.post("/v1/sessions/w/boundary", json=body)).json()["action"] == "continue"
    assert node.boundaries == [("w", 0, 9, b"\0\xff", 20.0)]
    assert (await http.post("/v1/sessions/w/attach", json={})).json()["epoch"] == 2
    problem(await http.post("/v1/sessions/w/boundary", json=body | {"host_state": "?"}), 422, "validation")
    longest = body | {"host_state": base64.b64encode(bytes(4 * 1024 * 1024)).decode()}
    assert (await http.post("/v1/sessions/w/boundary", json=longest)).status_code == 200
    longer = body | {"host_state": base64.b64encode(bytes(4 * 1024 * 1024 + 1)).decode()}
    said = problem(await http.post("/v1/sessions/w/boundary", json=longer), 422, "validation")
    assert said["field"] == "host_state"


async def test_standbys(http: httpx.AsyncClient, node: FakeNode) -> None:
    response = await http.post("/v1/standbys", json=SPEC)
    assert (response.status_code, response.headers["location"]) == (201, "/v1/standbys/standby-0")
    problem(await http.post("/v1/standbys", json=SPEC | {"id": "w"}), 422, "validation")
    assert (await http.delete("/v1/standbys/standby-0")).status_code == 204
    problem(await http.delete("/v1/standbys/standby-0"), 404, "not-found")


async def test_a_move_from_request_to_cancellation(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "w"})
    response = await http.post("/v1/migrations", json=MOVE, headers={"Idempotency-Key": "k1"})
    assert (response.status_code, response.headers["location"]) == (202, "/v1/migrations/m0")
    again = await http.post("/v1/migrations", json=MOVE, headers={"Idempotency-Key": "k1"})
    assert again.json()["id"] == "m0"
    assert (await http.get("/v1/migrations/m0")).json()["state"] == "admitted"
    assert len((await http.get("/v1/migrations")).json()["migrations"]) == 1
    assert (await http.delete("/v1/migrations/m0")).json()["state"] == "aborted"
    problem(await http.delete("/v1/migrations/m9"), 404, "not-found")
    refused = await http.post("/v1/migrations", json=MOVE, headers={"Idempotency-Key": "a b"})
    assert problem(refused, 422, "validation")["field"] == "header.idempotency-key"


async def test_a_dry_run_is_an_answer_and_no_refusal(http: httpx.AsyncClient) -> None:
    url = "/v1/migrations?dry_run=true"
    assert (await http.post(url, json=MOVE)).json()["admissible"] is True
    verdict = (await http.post(url, json=MOVE | {"destination": "full"})).json()
    assert (verdict["code"], verdict["required"]) == ("no-memory", {"bytes": 5.0})


async def test_event_streams(http: httpx.AsyncClient, node: FakeNode) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "w"})
    response = await http.get("/v1/sessions/w/events", headers={"Last-Event-ID": "1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert node.after_seq == 1
    events = [
        dict(line.split(": ", 1) for line in e.split("\n")) for e in response.text.strip().split("\n\n")
    ]
    assert [(event["id"], event["event"]) for event in events] == [("2", "state"), ("3", "state")]
    assert json.loads(events[0]["data"])["session"]["id"] == "w"
    await http.post("/v1/migrations", json=MOVE)
    text = (await http.get("/v1/migrations/m0/events")).text
    assert [line for line in text.split("\n") if line.startswith("event")] == [
        "event: copying",
        "event: copying",
        "event: released",
    ]


async def test_a_reader_that_leaves_ends_its_stream(
    http: httpx.AsyncClient, app: App, node: FakeNode
) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "quiet"})
    left = asyncio.Event()
    chunks = []

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        chunks.append(message)
        if b"id: 3" in message.get("body", b""):
            assert node.streams == 1
            left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "GET",
        "path": "/v1/sessions/quiet/events",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)
    assert chunks[0]["status"] == 200
    assert node.streams == 0


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *SPEC,
    "id",
    "endpoint",
    "host_state_bytes",
    "fingerprint",
    "name",
    "dtype",
    "shape",
    "rank",
    "source",
]


@settings_of_hypothesis(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3), st.booleans())
async def test_no_registration_is_answered_with_a_5xx(change: dict[str, Any], inside: bool) -> None:
    app = create_app(FakeNode(settings(Path("/run/fake")), "http://127.0.0.1:1"))
    body = SPEC | ({"regions": [SPEC["regions"][0] | change]} if inside else change)
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    ) as client:
        response = await client.post("/v1/sessions", content=json.dumps(body), headers=headers)
    assert response.status_code in (201, 400, 422)
    if response.status_code != 201:
        assert response.headers["content-type"] == MEDIA_TYPE


@pytest.mark.parametrize("path", ["/v1/sessions/none/events", "/v1/migrations/none/events"])
async def test_events_of_nothing_are_a_404_and_no_stream(http: httpx.AsyncClient, path: str) -> None:
    problem(await http.get(path), 404, "not-found")


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
async def test_every_error_is_a_problem(http: httpx.AsyncClient, kind: type[errors.WorldMoveError]) -> None:
    response = await http.get(f"/v1/sessions/raise-{kind.code}")
    body = problem(response, status_of(kind), kind.code)
    assert (body["required_bytes"], body["available_bytes"]) == (5, 3)
    assert ("retry-after" in response.headers) == (status_of(kind) == 429)
    assert response.headers.get("retry-after", "3") == "3"


def test_codes_name_one_class_each() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(codes) == len(set(codes))


async def test_a_bug_is_told_without_its_details(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sessions", json=SPEC | {"id": "bug"})
    response = await http.get("/v1/sessions/bug")
    problem(response, 500, "internal")
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"regions": [{"name": "k", "dtype": "nope", "shape": [1]}]}, "regions[0].dtype"),
        ({"regions": [{"name": "k", "dtype": "object", "shape": [1]}]}, "regions[0].dtype"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [-1]}]}, "regions[0].shape[0]"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [2**40, 2**40]}]}, "regions[0].shape"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [2**80]}]}, "regions[0].shape[0]"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": ["1"]}]}, "regions[0].shape[0]"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [1]}] * 2}, "regions[1].name"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [1], "rank": 3}]}, "regions.rank"),
        ({"regions": [{"name": "", "dtype": "u1", "shape": [1]}]}, "regions[0].name"),
        ({"regions": [{"name": "k", "dtype": "u1", "shape": [1], "device": "GPU-9"}]}, "regions[0].device"),
        ({"regions": [{"dtype": "u1", "shape": [1]}]}, "regions[0].name"),
        ({"regions": "all"}, "regions"),
        ({"horizon_ms": 0}, "horizon_ms"),
        ({"block_ms": float("inf")}, "block_ms"),
        ({"host_state_bytes": 2**30}, "host_state_bytes"),
        ({"model": ""}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"id": "ü"}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": "a\n"}, "id"),
        ({"colour": "blue"}, "colour"),
        ({"fingerprint": {"a": 1}}, "fingerprint.a"),
        ({"fingerprint": {"\ud800": "x", "b": 1}}, "fingerprint"),
    ],
)
async def test_a_bad_registration_names_its_field(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    content = json.dumps(SPEC | change)
    response = await http.post("/v1/sessions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.json()["code"] in ("validation", "manifest")
    assert response.json()["field"].startswith(field)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"null", b"[" * 100_000, b"{" * 5 + b'"a":' * 5, b'{"a":1e999}', b"1" * 9999],
)
async def test_nonsense_is_refused(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post(
        "/v1/migrations", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == MEDIA_TYPE


async def test_long_bodies_are_refused_before_they_are_parsed(http: httpx.AsyncClient) -> None:
    problem(await http.post("/v1/migrations", content=b" " * (MAX_BODY + 1)), 413, "too-large")
    problem(await http.post("/v1/sessions", content=b" " * (MAX_REGISTRATION + 1)), 413, "too-large")

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * (MAX_BODY // 4)

    problem(await http.post("/v1/migrations", content=unannounced()), 413, "too-large")


async def test_as_many_regions_as_are_allowed_fit_and_one_more_does_not(http: httpx.AsyncClient) -> None:
    regions = [{"name": f"layer{n:04d}.attention.k", "dtype": "u1", "shape": [1]} for n in range(4097)]
    assert (await http.post("/v1/sessions", json=SPEC | {"regions": regions[:4096]})).status_code == 201
    said = problem(await http.post("/v1/sessions", json=SPEC | {"regions": regions}), 422, "validation")
    assert said["field"] == "regions"


async def test_what_http_refuses_is_a_problem_too(http: httpx.AsyncClient) -> None:
    problem(await http.get("/v1/nothing"), 404, "not-found")
    assert problem(await http.put("/v1/node"), 405, "method-not-allowed")["title"]
    problem(await http.get("/v1/sessions?limit=0"), 422, "validation")
    problem(await http.get("/v1/sessions/%FF"), 422, "validation")
    problem(await http.get("/v1/sessions/" + "x" * 200), 422, "validation")
    problem(await http.get("/v1/healthz", headers={"Host": "evil.example"}), 421, "misdirected")
    assert (await http.get("/v1/healthz", headers={"Host": "[::1]:80"})).status_code == 200


async def test_the_document_describes_every_answer(http: httpx.AsyncClient, app: App) -> None:
    document = (await http.get("/v1/openapi.json")).json()
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()
    assert "HTTPValidationError" not in text
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            good = [status for status in operation["responses"] if status.startswith("2")]
            assert good, f"{method} {path}"
            assert operation["description"], f"{method} {path}"
    refusals = document["paths"]["/v1/migrations"]["post"]["responses"]
    assert "`no-memory`" in refusals["429"]["description"]
    assert "`same-place`" in refusals["409"]["description"]
