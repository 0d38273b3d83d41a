"""The served application as a process: clients, streams, peers' sockets, tokens, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets
from faces_kit import served
from websockets.asyncio.client import connect

from worldmove import errors
from worldmove.client import AsyncClient, Client
from worldmove.manifest import Manifest, Region
from worldmove.messages import MAX_MESSAGE
from worldmove.views import MigrationRequest, SessionSpec

OPERATOR, WORKER, PEER = ("operator-" + "o" * 20, "worker-" + "w" * 20, "peer-" + "p" * 20)
EVERYBODY = {None, OPERATOR, WORKER, PEER}


def spec(name: str | None) -> SessionSpec:
    regions = (Region("k", "float32", (4, 8)), Region("empty", "u1", (0,)))
    return SessionSpec(manifest=Manifest("tiny", regions, 750.0, 250.0, endpoint="http://v"), id=name)


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="wm-"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    path = folder()
    with served(path) as (found, process):
        yield found
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    path = folder()
    tokens = path / "tokens.toml"
    tokens.write_text(f'operator = ["{OPERATOR}"]\nworker = ["{WORKER}"]\npeer = ["{PEER}"]\n')
    tokens.chmod(0o600)
    with served(path, f"token_file={tokens}") as (found, _):
        yield found
    shutil.rmtree(path)


def test_the_blocking_client_makes_every_call(url: str) -> None:
    with Client(url) as client:
        assert client.register(spec("sync")).id == "sync"
        assert client.session("sync").bytes == 128
        assert client.sessions(limit=1000).next is None
        assert client.digest("sync").seed == 2**64 - 1
        assert client.boundary("sync", block=3, host_state=b"\0", wait_ms=1).action == "continue"
        assert client.attach("sync", {"cpu": "x"}).epoch == 2
        client.drop_standby(client.open_standby(spec(None)).id)
        assert client.node().name == client.nodes()[0].name == "A"
        request = MigrationRequest(session_id="sync", destination="B")
        assert client.dry_run(request).admissible
        move = client.migrate(request, "key-sync")
        assert client.migrate(request, "key-sync").id == move.id
        assert client.migration(move.id).state == "admitted"
        assert [view.state for view in client.migration_events(move.id)][-1] == "released"
        assert client.wait(move.id).receipt is not None
        assert move.id in [view.id for view in client.migrations().migrations]
        assert client.cancel(client.migrate(request).id).state == "aborted"
        assert [event.seq for event in client.session_events("sync", 1)] == [2, 3]
        client.end_session("sync")


async def test_the_asynchronous_client_makes_every_call(url: str) -> None:
    async with AsyncClient(url) as client:
        assert (await client.register(spec("async"))).id == "async"
        assert (await client.session("async")).bytes == 128
        assert (await client.sessions(limit=1000)).next is None
        assert (await client.digest("async")).seed == 2**64 - 1
        assert (await client.boundary("async", block=3)).action == "continue"
        assert (await client.attach("async", {})).epoch == 2
        await client.drop_standby((await client.open_standby(spec(None))).id)
        assert (await client.node()).name == (await client.nodes())[0].name == "A"
        request = MigrationRequest(session_id="async", destination="B")
        assert (await client.dry_run(request)).admissible
        move = await client.migrate(request)
        assert (await client.migration(move.id)).state == "admitted"
        assert (await client.wait(move.id)).state == "released"
        assert move.id in [view.id for view in (await client.migrations()).migrations]
        assert (await client.cancel((await client.migrate(request)).id)).state == "aborted"
        assert [event.seq async for event in client.session_events("async")] == [1, 2, 3]
        await client.end_session("async")


def test_problems_come_back_as_our_errors(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(errors.NoMemoryError) as caught:
            client.session("raise-no-memory")
        assert caught.value.details["required_bytes"] == 5
        assert caught.value.details["status"] == 429
        with pytest.raises(errors.NotFoundError):
            next(client.session_events("none"))
        with pytest.raises(errors.WorldMoveError, match="longer"):
            client.register(
                SessionSpec(manifest=Manifest("m", (), 1.0, 1.0), fingerprint={"a": "x" * 3_000_000})
            )
        move = client.migrate(
            MigrationRequest(session_id=client.register(spec(None)).id, destination="vanishes")
        )
        with pytest.raises(errors.ConnectionLostError, match="stopped before it ended"):
            client.wait(move.id)


def test_a_node_that_is_not_there(url: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(nobody) as client, pytest.raises(errors.PeerError):
            client.node()
        listener.listen()
        with Client(nobody, timeout=0.05) as client, pytest.raises(errors.DeadlineError):
            client.node()
    with Client("http://[bad") as client, pytest.raises(errors.PeerError):
        client.node()


async def test_the_owner_is_asked_instead(url: str) -> None:
    path = folder()
    with served(path) as (other, _):
        async with AsyncClient(other) as owner:
            await owner.register(spec("elsewhere"))
        request = MigrationRequest(session_id="elsewhere", destination=f"owner-{other.rpartition(':')[2]}")
        async with AsyncClient(url) as client:
            await client.register(spec("elsewhere"))
            move = await client.migrate(request)
            assert (await client.wait(move.id)).state == "released"
            gone = MigrationRequest(session_id="elsewhere", destination="owner-1")
            with pytest.raises(errors.PeerError):
                await client.migrate(gone)
    shutil.rmtree(path)


def peer_url(url: str, move_id: str) -> str:
    return f"ws{url.removeprefix('http')}/v1/peer/moves/{move_id}"


async def test_a_peers_socket_carries_whole_binary_messages(url: str) -> None:
    async with connect(peer_url(url, "m7"), max_size=MAX_MESSAGE + 16) as peer:
        await peer.send(b"hello ")
        assert await peer.recv() == b"hello m7"
        largest = bytes(MAX_MESSAGE - 2)
        await peer.send(largest)
        assert await peer.recv() == largest + b"m7"
        await peer.send(b"close")
        with pytest.raises(websockets.ConnectionClosedOK):
            await peer.recv()


@pytest.mark.parametrize(
    ("message", "code"), [("text", 1002), (bytes(MAX_MESSAGE + 1), 1009), (bytes(MAX_MESSAGE), 1002)]
)
async def test_a_peer_that_breaks_the_rules_is_cut(url: str, message: str | bytes, code: int) -> None:
    async with connect(peer_url(url, "m7")) as peer:
        with contextlib.suppress(websockets.ConnectionClosed):
            await peer.send(message)
        with pytest.raises(websockets.ConnectionClosedError) as caught:
            await peer.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == code


async def test_an_error_of_the_node_closes_the_socket_with_its_code(url: str) -> None:
    async with connect(peer_url(url, "raise-fenced")) as peer:
        with pytest.raises(websockets.ConnectionClosedError) as caught:
            await peer.recv()
    assert caught.value.rcvd is not None
    assert (caught.value.rcvd.code, caught.value.rcvd.reason[:6]) == (1011, "fenced")


async def test_a_bug_closes_the_socket_without_its_details(url: str) -> None:
    async with connect(peer_url(url, "peer-bug")) as peer:
        with pytest.raises(websockets.ConnectionClosedError) as caught:
            await peer.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1011
    assert "secret" not in caught.value.rcvd.reason


async def test_a_stream_that_breaks_ends_with_its_problem(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.register(spec("breaks"))
        stream = client.session_events("breaks", 2)
        assert (await anext(stream)).seq == 3
        with pytest.raises(errors.LedgerError) as caught:
            await anext(stream)
        assert caught.value.details == {"since_ms": 5, "status": 503}


async def test_web_pages_get_no_socket(url: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        await connect(peer_url(url, "m7"), origin=websockets.Origin("http://evil.example"))
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/healthz", EVERYBODY),
        ("GET", "/v1/readyz", EVERYBODY),
        ("GET", "/metrics", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/node", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/nodes", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/sessions", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/sessions/w/events", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/sessions/w/digest", {OPERATOR, WORKER, PEER}),
        ("POST", "/v1/sessions", {OPERATOR, WORKER}),
        ("POST", "/v1/sessions/w/boundary", {OPERATOR, WORKER}),
        ("POST", "/v1/sessions/w/attach", {OPERATOR, WORKER}),
        ("DELETE", "/v1/sessions/w", {OPERATOR, WORKER}),
        ("POST", "/v1/standbys", {OPERATOR, WORKER}),
        ("DELETE", "/v1/standbys/w", {OPERATOR, WORKER}),
        ("GET", "/v1/migrations", {OPERATOR, WORKER, PEER}),
        ("GET", "/v1/migrations/m/events", {OPERATOR, WORKER, PEER}),
        ("POST", "/v1/migrations", {OPERATOR}),
        ("DELETE", "/v1/migrations/m", {OPERATOR}),
    ],
)
def test_roles(guarded: str, method: str, path: str, allowed: set[str | None]) -> None:
    with httpx.Client(base_url=guarded) as http:
        for token in (None, OPERATOR, WORKER, PEER, "x" * 20, "x" * 2000):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            status = http.request(method, path, headers=headers).status_code
            refused = 403 if token in (OPERATOR, WORKER, PEER) else 401
            may = None in allowed or token in allowed
            assert (status == refused) == (not may), f"{token}: {status}"


async def test_a_peers_socket_needs_a_peers_token(guarded: str) -> None:
    for token, status in ((OPERATOR, 403), ("x" * 20, 401)):
        with pytest.raises(websockets.InvalidStatus) as caught:
            await connect(peer_url(guarded, "m"), additional_headers={"Authorization": f"Bearer {token}"})
        assert caught.value.response.status_code == status
    async with connect(
        peer_url(guarded, "m"), additional_headers={"Authorization": f"Bearer {PEER}"}
    ) as peer:
        await peer.send(b"x")
        assert await peer.recv() == b"xm"


def test_clients_send_their_token(guarded: str) -> None:
    with Client(guarded, OPERATOR) as client:
        assert client.node().name == "A"
    with Client(guarded) as client, pytest.raises(errors.UnauthorizedError):
        client.node()
    with Client(guarded, WORKER) as client, pytest.raises(errors.ForbiddenError):
        client.migrate(MigrationRequest(session_id="w", destination="B"))


async def test_a_stop_ends_open_streams_and_closes_the_node_first(run_dir: Path) -> None:
    with served(run_dir, "log_level=debug") as (url, process):
        async with AsyncClient(url) as client:
            await client.register(spec("quiet"))
            stream = client.session_events("quiet")
            assert (await anext(stream)).seq == 1
            process.send_signal(signal.SIGTERM)
            assert [event.seq async for event in stream] == [2, 3]
        output = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        lines = output[1].splitlines()
        assert lines[0] == f"listening on {url} (loopback only: there is no token file)"
        events = [json.loads(line)["event"] for line in lines[1:]]
        assert events.index("node is up") < events.index("stopped")


def until_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stderr is not None
    while (line := process.stderr.readline()) != wanted:
        assert line, f"{wanted!r} never came"


def test_a_second_signal_ends_at_once(run_dir: Path) -> None:
    with served(run_dir, "faults=close-hangs") as (_, process):
        process.send_signal(signal.SIGINT)
        until_line(process, "closing\n")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130


def test_a_node_that_cannot_start_says_why(run_dir: Path) -> None:
    with served(run_dir, "faults=start-raises") as (url, process):
        assert url == ""
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "the ledger is away" in said


def test_a_signal_during_the_start_ends_it(run_dir: Path) -> None:
    with served(run_dir, "faults=start-hangs", ready=False) as (_, process):
        until_line(process, "starting\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 143


def test_a_taken_address_is_a_config_error(run_dir: Path, url: str) -> None:
    address = url.removeprefix("http://")
    with served(run_dir, f"http={address}") as (nothing, process):
        assert nothing == ""
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "ConfigError" in said
        assert address in said
