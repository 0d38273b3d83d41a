"""Hostile requests to a real node: refused by a problem that names the field; the node stays healthy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_node import Node
from security_kit import exchange, lonely_node, open_socket, unharmed

from api import wire
from worldmove.errors import TransportError
from worldmove.transport.confine import device_address

GOOD = {
    "model": "tiny",
    "regions": [{"name": "k", "dtype": "float32", "shape": [4, 8]}],
    "block_ms": 750,
    "horizon_ms": 250,
}
JSON = {"Content-Type": "application/json"}
OPTIONS = ("--memory-limit", "64MB", "--peer-timeout-ms", "1000")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with lonely_node(*OPTIONS) as found:
        yield found


@pytest.fixture
def http(node: Node) -> Iterator[httpx.Client]:
    with unharmed(node) as client:
        yield client


def region(**changed: Any) -> dict[str, Any]:
    return {"regions": [GOOD["regions"][0] | changed]}  # type: ignore[index]


def twice(name: str) -> dict[str, Any]:
    return {"regions": [{"name": name, "dtype": "u1", "shape": [1]}] * 2}


BAD = [
    (region(dtype="float33"), "regions[0].dtype"),
    (region(dtype="object"), "regions[0].dtype"),
    (region(shape=[-1, 4]), "regions[0].shape[0]"),
    (region(shape=[2**40, 2**40]), "regions[0].shape"),
    (region(shape=[2**200]), "regions[0].shape[0]"),
    (region(shape=[2**39, 0, 2**39]), "regions[0].shape"),
    (region(shape=[1] * 17), "regions[0].shape"),
    (twice("k"), "regions[1].name"),
    (region(source={"kind": "shm", "name": f"none-{uuid.uuid4().hex}"}), "regions[0].source.name"),
    (region(source={"kind": "shm", "name": "../etc/passwd"}), "regions[0].source.name"),
    (region(source={"kind": "shm", "name": "a\0b"}), "regions[0].source.name"),
    (region(source={"kind": "shm"}), "regions[0].source.name"),
    (region(source={"kind": "file", "name": "x"}), "regions[0].source.kind"),
    (region(rank=63), "regions.rank"),
    (region(stride_bytes=0), "regions[0].stride_bytes"),
    ({"horizon_ms": 0}, "horizon_ms"),
    ({"horizon_ms": -1}, "horizon_ms"),
    ({"horizon_ms": 1e400}, "horizon_ms"),
    ({"block_ms": "NaN"}, "block_ms"),
    ({"host_state_bytes": 2**40}, "host_state_bytes"),
    ({"id": "\ud800"}, "id"),
    ({"id": "a b"}, "id"),
    ({"id": "a\n"}, "id"),
    ({"id": "x" * 129}, "id"),
    ({"model": "\udfff"}, "model"),
    ({"model": "tiny\x1b]0;owned\x07"}, "model"),
    ({"endpoint": "http://x/\r\nSet-Cookie: a=b"}, "endpoint"),
    (region(name="k\x1b[2J"), "regions[0].name"),
    ({"fingerprint": {"\ud800": "x"}}, "fingerprint"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=range(len(BAD)))
def test_a_bad_registration_names_its_field(change: dict[str, Any], field: str, http: httpx.Client) -> None:
    for path in ("/v1/sessions", "/v1/standbys"):
        if path == "/v1/standbys" and "id" in change:
            continue
        answer = http.post(path, content=json.dumps(GOOD | change), headers=JSON)
        assert answer.status_code == 422, answer.text
        problem = answer.json()
        assert problem["code"] in ("validation", "manifest")
        assert field in problem["field"]
        assert field.rpartition(".")[2].partition("[")[0] in problem["detail"]


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
NONSENSE = [
    b"",
    b"\xff\xfe",
    b'{"id": "\xff"}',
    b"[" * 100_000,
    DEEP,
    b'{"model": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"block_ms": ' + b"9" * 10_000 + b"}",
    b'"\\ud800"',
    b"null",
]


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_a_problem(content: bytes, http: httpx.Client) -> None:
    for path in ("/v1/sessions", "/v1/migrations", "/v1/sessions/x/boundary"):
        answer = http.post(path, content=content, headers=JSON)
        assert answer.status_code in (400, 422)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["field"] == "body"


def test_memory_that_is_not_there_is_refused_before_it_is_taken(http: httpx.Client) -> None:
    answer = http.post("/v1/sessions", json=GOOD | region(shape=[2**28]))
    assert answer.status_code == 429
    assert answer.json()["code"] == "no-memory"
    assert answer.json()["required_bytes"] > answer.json()["available_bytes"]


def test_ten_megabytes_are_refused_unread(http: httpx.Client, node: Node) -> None:
    resident = _resident(node.pid)
    head = b"POST /v1/migrations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10485760\r\n\r\n"
    assert exchange(node.url, head).startswith(b"HTTP/1.1 413 ")
    chunked = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    answer = exchange(node.url, chunked, *[part] * 160)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")
    assert _resident(node.pid) - resident < 8 * 2**20


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
        b"GET / HTTP/1.1\r\n" + b"x" * 200_000 + b": y\r\n",
    ],
)
def test_heads_have_a_bounded_length(head: bytes, http: httpx.Client, node: Node) -> None:
    answer = exchange(node.url, *[head[at : at + 8192] for at in range(0, len(head), 8192)])
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


def test_a_long_head_that_is_complete_is_refused_too(http: httpx.Client, node: Node) -> None:
    assert http.get("/v1/healthz", headers={"X": "a" * 30_000}).status_code == 200
    head = b"GET /v1/healthz HTTP/1.1\r\nHost: localhost\r\nX: "
    with open_socket(node.url) as sock:
        sock.sendall(head + b"a" * (wire.MAX_HEAD + 1))
        assert sock.recv(65536).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET  HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(data: bytes, http: httpx.Client, node: Node) -> None:
    answer = exchange(node.url, data)
    assert answer.startswith(b"HTTP/1.1 4"), answer


@pytest.mark.slow
def test_a_head_that_never_ends_is_not_waited_for(http: httpx.Client, node: Node) -> None:
    begun = [open_socket(node.url) for _ in range(3)]
    begun[1].sendall(b"GET /v1/healthz HTTP/1.1\r\nHost: loc")
    begun[2].sendall(b"GET /v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
    first = HTTPResponse(begun[2])
    first.begin()
    assert (first.status, json.loads(first.read())["status"]) == (200, "ok")
    for sock in begun:
        with sock:
            answer = sock.recv(65536)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


def test_lanes_of_a_node_on_loopback_listen_there_only(node: Node) -> None:
    for pid in node.lanes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[command.index(b"--device") + 1] == b"lo"


def test_confined_sockets_name_their_device() -> None:
    code = (
        "import socket; from worldmove.transport.confine import confine\n"
        "a, b = socket.create_server(('0.0.0.0', 0)), socket.socket()\n"
        "c = socket.create_server(('127.0.0.1', 0))\n"
        "print(confine('lo'), *(s.getsockopt(1, socket.SO_BINDTODEVICE, 16) for s in (a, b, c)))\n"
        "try: confine('nosuch')\n"
        "except Exception as error: print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.splitlines()[0] == r"2 b'lo\x00' b'' b'lo\x00'"
    assert "nosuch" in child.stdout.splitlines()[1]


def test_lanes_kept_on_a_device_are_reached_at_its_address() -> None:
    assert device_address("lo") == "127.0.0.1"
    with pytest.raises(TransportError, match="'nosuch' has no IPv4 address"):
        device_address("nosuch")
