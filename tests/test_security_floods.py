"""Floods at the node's port: descriptors and memory stay bounded, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from faces_kit import served
from fleet_node import until
from security_kit import PEER, Authority, open_socket, trusting, write_tokens
from starve_kit import limited
from websockets.asyncio.client import connect

from api import entrance, wire

DESCRIPTORS = 120
BOUND = DESCRIPTORS // entrance.CONNECTION_SHARE
ELSEWHERE = "127.0.0.2"
"""Another address of this host."""


class Site:
    """A served node; `context` is what its clients trust, where it has TLS."""

    def __init__(self, url: str, pid: int, context: ssl.SSLContext | None) -> None:
        self.url = url
        self.pid = pid
        self.context = context

    def open(self, receive_bytes: int = 1 << 17) -> socket.socket:
        """A connection over which requests can be sent."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(5)
        sock.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        return sock if self.context is None else self.context.wrap_socket(sock, server_hostname="127.0.0.1")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def healthy(self, source: str = "127.0.0.1") -> bool:
        """Whether a caller from an address of this host is served."""
        transport = httpx.HTTPTransport(
            local_address=source, verify=self.context if self.context is not None else False
        )
        with httpx.Client(transport=transport, timeout=20) as client, contextlib.suppress(httpx.HTTPError):
            return client.get(f"{self.url}/v1/healthz").status_code == 200
        return False


@pytest.fixture(scope="module", params=["http", "https"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        folder = Path(name)
        authority = Authority(folder)
        node = authority.sign("node")
        tls = {"tls_cert": node.cert, "tls_key": node.key, "tls_ca": authority.ca}
        options = {"token_file": write_tokens(folder / "tokens.toml")}
        if request.param == "https":
            options |= tls
        (folder / "run").mkdir(mode=0o700)
        with served(folder / "run", *(f"{key}={value}" for key, value in options.items())) as (url, process):
            context = trusting(authority, node) if request.param == "https" else None
            yield Site(url, process.pid, context)


def test_connections_that_say_nothing_leave_room_for_others(site: Site) -> None:
    """Before a byte, a handshake or a token: one address gets its part of the connections, and no more."""
    before = site.descriptors()
    with limited(site.pid, resource.RLIMIT_NOFILE, DESCRIPTORS):
        with contextlib.ExitStack() as flood:
            for _ in range(2 * DESCRIPTORS):
                flood.enter_context(open_socket(site.url))
            until(lambda: not site.healthy(), "the address has no place left")
            assert site.descriptors() <= before + BOUND // entrance.SITE_SHARE + 1
            assert site.healthy(ELSEWHERE)
        until(site.healthy, "places come back")
        until(lambda: site.descriptors() <= before + 1, "descriptors come back")


async def test_places_come_back_after_sockets_of_peers(site: Site) -> None:
    url = site.url.replace("http", "ws", 1) + "/v1/peer/moves/m"
    headers = {"Authorization": f"Bearer {PEER}"}
    with limited(site.pid, resource.RLIMIT_NOFILE, DESCRIPTORS):
        for _ in range(BOUND):
            async with connect(url, proxy=None, ssl=site.context, additional_headers=headers):
                pass
    assert site.healthy()


def test_an_unfinished_handshake_has_a_deadline() -> None:
    assert 0 < entrance.HANDSHAKE_SECONDS <= wire.HEAD_SECONDS


def test_requests_that_wait_for_answers_are_few(site: Site) -> None:
    """Thousands of requests whose answers nobody reads take no memory."""
    asked = b"GET /v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    resident = _resident(site.pid)
    with site.open(receive_bytes=2048) as sock:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                sock.sendall(asked * 100)
        assert _resident(site.pid) - resident < 8 << 20
        assert site.healthy()
    with site.open() as sock:
        sock.sendall(asked * wire.MAX_WAITING)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < wire.MAX_WAITING:
            answers += sock.recv(65536)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
