"""Hostile peers, workers and users at the sockets of a real node; it stays healthy."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_node import Node
from security_kit import lonely_node, unharmed
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from worldmove import messages as m
from worldmove.ipc import HEADER, MAGIC, MAX_BODY, SPILLED
from worldmove.manifest import Manifest, Region

OPTIONS = ("--memory-limit", "64MB", "--peer-timeout-ms", "1000")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with lonely_node(*OPTIONS) as found:
        yield found


@pytest.fixture
def http(node: Node) -> Iterator[httpx.Client]:
    with unharmed(node) as client:
        yield client


def hello(**changed: Any) -> dict[str, Any]:
    made = m.Hello(
        move_id="m",
        session_id="w",
        source="B",
        source_incarnation=1,
        boot_id="elsewhere",
        epoch=1,
        seed=0,
        manifest=Manifest("tiny", (Region("k", "float32", (4, 8)),), 750.0, 250.0),
        fingerprint={},
        live=True,
        path="auto",
        horizon_ms=250.0,
        deadline_ms=1000.0,
        allow_unattended=True,
    )
    decoded: dict[str, Any] = m.msgspec.msgpack.decode(m.encode(made)[1:])
    return decoded | changed


def packed(content: Any, version: int = m.VERSION) -> bytes:
    return bytes([version]) + m.msgspec.msgpack.encode(content)


LIES = [
    b"",
    b"\1",
    b"\1\xff",
    packed(hello(), version=m.VERSION + 1),
    packed(hello(move_id="other")),
    packed(hello(deadline_ms=float("nan"))),
    packed(hello(deadline_ms=1e300)),
    packed(hello(horizon_ms=-1.0)),
    packed(hello(epoch=-1)),
    packed(hello(seed=-1)),
    packed(hello(unknown=1)),
    packed(hello() | {"t": "Committed"}),
    packed({"t": "Released"}),
    packed({"t": "Rejected", "code": "c", "message": "m", "details": {"a": 1}}),
    b"\1" + b"\x81\xa1t" + b"\x91" * 100_000,
]


@pytest.mark.parametrize("message", LIES, ids=range(len(LIES)))
async def test_a_peer_that_lies_is_closed(message: bytes, http: httpx.Client, node: Node) -> None:
    url = node.url.replace("http", "ws") + "/v1/peer/moves/m"
    async with connect(url, proxy=None) as socket:
        await socket.send(message)
        with pytest.raises(ConnectionClosed):
            await _until_closed(socket)
    assert socket.close_code in (1002, 1011)


async def _until_closed(socket: ClientConnection) -> None:
    async with asyncio.timeout(20):
        while True:
            await socket.recv()


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest("tiny", (Region("k", "object", (4, 8)),), 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (-4, 8)),), 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (2**40, 2**40)),), 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (4,)),) * 2, 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (4,), rank=9),), 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (2**30,)),), 750.0, 250.0),
        Manifest("tiny", (Region("k", "u1", (4,)),), float("nan"), 250.0),
    ],
    ids=range(7),
)
async def test_a_peers_impossible_session_is_rejected(
    manifest: Manifest, http: httpx.Client, node: Node
) -> None:
    url = node.url.replace("http", "ws") + f"/v1/peer/moves/{uuid.uuid4().hex}"
    move_id = url.rpartition("/")[2]
    async with connect(url, proxy=None) as socket:
        await socket.send(packed(hello(move_id=move_id, manifest=m.msgspec.to_builtins(manifest))))
        answer = m.decode(await asyncio.wait_for(socket.recv(), 20))  # type: ignore[arg-type]
    assert isinstance(answer, m.Rejected)
    assert answer.code in ("manifest", "no-memory")


async def test_a_peer_that_says_nothing_or_leaves_is_let_go(http: httpx.Client, node: Node) -> None:
    url = node.url.replace("http", "ws") + "/v1/peer/moves/silent"
    async with connect(url, proxy=None) as silent:
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(silent.recv(), 20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
    gone = await connect(url, proxy=None)
    gone.transport.abort()


SOCKETS = ("node.sock", "peer.sock", "keeper.sock")
PACKETS = [
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    HEADER.pack(MAGIC, 0, 5),
    HEADER.pack(MAGIC, 0, 2**32 - 1),
    HEADER.pack(MAGIC, SPILLED, MAX_BODY),
    HEADER.pack(MAGIC, 0, 1000) + b"\x91" * 1000,
    HEADER.pack(MAGIC, 0, 90_000) + b"\x81\xa4type" + b"\x91" * 89_994,
    b"x" * 90_000,
]


@pytest.mark.parametrize("name", SOCKETS)
def test_garbage_at_a_unix_socket_closes_that_connection(name: str, http: httpx.Client, node: Node) -> None:
    before = _descriptors(node)
    for packet in PACKETS:
        for fds in ([], [0], [0] * 200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(20)
                sock.connect(str(node.run_dir / name))
                socket.send_fds(sock, [packet], fds)
                try:
                    while sock.recv(65536):
                        pass
                except ConnectionResetError:
                    pass
    _settled(node, before)


def _descriptors(node: Node) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (node.pid, node.view().keeper))


def _settled(node: Node, before: int) -> None:
    deadline = time.monotonic() + 20
    while _descriptors(node) > before + 1:
        assert time.monotonic() < deadline, f"{_descriptors(node)} descriptors; {before} before"
        node.view()


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        try:
            sock.connect(path)
            sock.sendall(bytes.fromhex("00"))
            print(sock.recv(1000))
        except PermissionError:
            print("PermissionError")
        except (ConnectionError, BrokenPipeError):
            print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_reaches_no_unix_socket(http: httpx.Client, node: Node) -> None:
    paths = [str(node.run_dir / name) for name in SOCKETS]

    def ask() -> list[str]:
        child = subprocess.run(
            [sys.executable, "-I", "-c", STRANGER, *paths],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
        )
        return child.stdout.splitlines()

    assert ask() == ["PermissionError"] * len(paths)
    folders = (node.run_dir.parent, node.run_dir)
    modes = [path.stat().st_mode & 0o777 for path in (*folders, *map(Path, paths))]
    assert modes[1:] == [0o700, 0o600, 0o600, 0o600]
    try:
        for path in folders:
            path.chmod(0o711)
        for path in map(Path, paths):
            path.chmod(0o666)
        # Let to the sockets, the stranger is known by the kernel's word and gets nothing.
        answers = ask()
    finally:
        for path, mode in zip((*folders, *map(Path, paths)), modes, strict=True):
            path.chmod(mode)
    assert len(answers) == len(paths)
    for answer in answers:
        assert answer == "b''" or "unauthorized" in answer or "Refused" in answer
