"""Connections of our clients that rest: used again for a while, never once a node may be closing them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop

from api.serve import REST_SECONDS
from worldmove import dialing
from worldmove.client import AsyncClient, Client
from worldmove.sdk.rest import NodeApi

ANSWER = json.dumps({"nodes": [], "id": "world-1"}).encode()
HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()


class Server:
    """Answers the first `answers` requests of each connection, and hangs up on the one after them."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for _ in range(self.answers):
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            writer.write(HEAD + ANSWER)
            await writer.drain()
        else:
            await reader.read(1)
        writer.close()


@contextmanager
def serving(answers: int) -> Iterator[Server]:
    """In a thread of its own."""
    server, started, loop = Server(answers), threading.Event(), uvloop.new_event_loop()
    over = asyncio.Event()

    async def run() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        await over.wait()
        listening.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def rest(monkeypatch: pytest.MonkeyPatch) -> float:
    """Makes the time short after which a connection is not used again; seconds that are longer."""
    monkeypatch.setattr(dialing, "IDLE_S", 0.05)
    return 0.1


def test_a_node_keeps_a_connection_for_longer_than_its_clients_use_it() -> None:
    assert dialing.IDLE_S + 5.0 <= REST_SECONDS


def test_a_connection_that_was_used_just_now_is_used_again() -> None:
    with serving(2) as server, Client(server.url) as client:
        assert client.nodes() == client.nodes() == ()
        assert server.connections == 1


def test_a_connection_that_has_rested_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = rest(monkeypatch)
    with serving(1) as server, Client(server.url) as client:
        client.nodes()
        time.sleep(longer)
        client.nodes()
        assert server.connections == 2


async def test_nor_by_the_asynchronous_client(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = rest(monkeypatch)
    with serving(1) as server:
        async with AsyncClient(server.url) as client:
            await client.nodes()
            await asyncio.sleep(longer)
            await client.nodes()
        assert server.connections == 2


def test_nor_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = rest(monkeypatch)
    with serving(1) as server:
        api = NodeApi(server.url, None, 5.0)
        api.end("/v1/sessions/world-1")
        time.sleep(longer)
        api.end("/v1/sessions/world-1")
        api.close()
        assert server.connections == 2
