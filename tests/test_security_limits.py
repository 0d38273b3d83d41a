"""Rate limits by client, and that nobody's body is read before the caller is known."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from faces_kit import SPEC, FakeNode, served, settings
from hypothesis import given
from hypothesis import strategies as st
from security_kit import OPERATOR, PEER, WORKER, exchange, write_tokens
from starlette.requests import HTTPConnection

from api.app import create_app
from api.limits import BURST_S, Buckets, client_of


@given(st.floats(0.01, 1000), st.lists(st.floats(0, 10), max_size=200))
def test_a_bucket_never_lets_more_through_than_its_rate(rate: float, pauses: list[float]) -> None:
    buckets, now, taken = Buckets(rate), 0.0, 0
    for pause in pauses:
        now += pause
        wait = buckets.take("c", now)
        if wait == 0:
            taken += 1
        else:
            assert buckets.take("c", now + wait * (1 - 1e-9) - 1e-9) > 0 or wait < 1e-6
        assert taken <= (now + BURST_S) * rate + 2
    assert buckets.take("other", now) == 0


def test_a_bucket_fills_again_and_0_is_no_limit() -> None:
    buckets = Buckets(1.0)
    got = [buckets.take("c", 0.0) for _ in range(8)]
    assert got[:6] == [0.0] * 6
    assert got[6] == pytest.approx(1.0)
    assert got[7] == pytest.approx(1.0)
    assert buckets.take("c", 1.0) == 0
    assert buckets.take("c", 1.0) > 0
    free = Buckets(0)
    assert not any(free.take("c", 0.0) for _ in range(1000))


def test_clients_are_bounded_and_the_quietest_is_forgotten() -> None:
    buckets = Buckets(0.001, clients=3)
    for name in "abcd":
        buckets.take(name, 0.0)
    assert len(buckets) == 3
    assert buckets.take("d", 0.0) > 0
    assert buckets.take("a", 0.0) == 0


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("testclient", "testclient"),
    ],
)
def test_an_ipv6_client_is_its_site(host: str, client: str) -> None:
    assert client_of(cast("HTTPConnection", SimpleNamespace(client=SimpleNamespace(host=host)))) == client


def test_a_caller_without_an_address_has_a_bucket_too() -> None:
    assert client_of(cast("HTTPConnection", SimpleNamespace(client=None))) == ""


def headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_who_calls_too_often_is_told_when_to_come_back(run_dir: Path) -> None:
    tokens = write_tokens(run_dir / "tokens.toml")
    made = settings(run_dir, token_file=tokens, register_rate="0.4", move_rate="0.2")
    app = create_app(FakeNode(made, "http://a"))
    transport = httpx.ASGITransport(app=app, client=("10.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:

        async def statuses(path: str, body: dict[str, Any], token: str, count: int) -> list[int]:
            calls = [await http.post(path, json=body, headers=headers(token)) for _ in range(count)]
            for call in calls:
                if call.status_code == 429:
                    assert call.json()["code"] == "rate-limited"
                    assert 1 <= int(call.headers["Retry-After"]) <= 5
            return [call.status_code for call in calls]

        assert await statuses("/v1/sessions", SPEC, WORKER, 2) == [201] * 2
        # One bucket for sessions and standbys; a bad body counts, a wrong role does not.
        assert await statuses("/v1/standbys", SPEC, WORKER, 2) == [201, 429]
        assert await statuses("/v1/sessions", SPEC, PEER, 5) == [403] * 5
        assert await statuses("/v1/sessions", {}, OPERATOR, 4) == [422, 422, 422, 429]
        move = {"session_id": "none", "destination": "B"}
        assert await statuses("/v1/migrations", move, OPERATOR, 3) == [404, 404, 429]
        for path in ("/v1/sessions", "/v1/node", "/v1/migrations"):
            assert (await http.get(path, headers=headers(WORKER))).status_code == 200
    other = httpx.ASGITransport(app=app, client=("10.0.0.2", 1))
    async with httpx.AsyncClient(transport=other, base_url="http://a") as http:
        assert await statuses("/v1/sessions", SPEC, WORKER, 1) == [201]


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        tokens = write_tokens(Path(name) / "tokens.toml")
        (Path(name) / "run").mkdir(mode=0o700)
        with served(Path(name) / "run", f"token_file={tokens}") as (url, _):
            yield url


@pytest.mark.parametrize("announced", [b"Content-Length: 500000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("token", [b"", b"Authorization: Bearer wrong-token-wrong-token\r\n"])
def test_a_strangers_body_is_not_read(announced: bytes, token: bytes, guarded: str) -> None:
    # The body never comes: an answer shows that it was not waited for.
    answer = exchange(guarded, b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\n" + token + announced + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()
    assert b"www-authenticate: bearer" in answer.lower()
    assert b"application/problem+json" in answer


def test_known_callers_bodies_are(guarded: str) -> None:
    made = httpx.post(f"{guarded}/v1/sessions", json=SPEC, headers=headers(WORKER), trust_env=False)
    assert made.status_code == 201
    refused = httpx.post(f"{guarded}/v1/sessions", json=SPEC, headers=headers(PEER), trust_env=False)
    assert refused.status_code == 403
