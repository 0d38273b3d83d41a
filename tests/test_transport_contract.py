"""One suite for every transport: UCX over real sockets, and its in-memory twin."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from transport_twin import MemoryNetwork, MemoryTransport

from tests.transport_kit import join
from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, TransportError
from worldmove.transport.base import MAX_TAG, Connection, Transport
from worldmove.transport.ucx_transport import UcxTransport

BIG = 3 * 1024 * 1024 + 7


@pytest.fixture(params=["memory", "ucx"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Transport]]:
    network = MemoryNetwork()
    made: list[Transport] = []

    def build() -> Transport:
        transport: Transport = MemoryTransport(network) if request.param == "memory" else UcxTransport()
        made.append(transport)
        return transport

    yield build
    for transport in made:
        await transport.close()


@pytest.fixture
async def ends(make: Callable[[], Transport]) -> tuple[Connection, Connection]:
    mine, theirs, _ = await join(make(), make())
    return mine, theirs


async def take(connection: Connection) -> tuple[int, bytes]:
    incoming = await connection.receive()
    assert incoming is not None
    body = bytearray(incoming.nbytes)
    await incoming.into(memoryview(body))
    return incoming.tag, bytes(body)


@pytest.mark.parametrize("size", [0, 1, 13, 4096, 8191, 8192, 8193, 65_537, BIG])
async def test_a_message_arrives_whole_both_ways(ends: tuple[Connection, Connection], size: int) -> None:
    for sender, receiver in (ends, ends[::-1]):
        data = os.urandom(size)
        sent = sender.send(7, memoryview(data))
        assert await take(receiver) == (7, data)
        await sent


async def test_messages_keep_their_order_whatever_their_sizes(ends: tuple[Connection, Connection]) -> None:
    bodies = [os.urandom(size) for size in (BIG, 0, 1, 70_000, 5, BIG, 8192, 3)]
    sent = [ends[0].send(number, memoryview(body)) for number, body in enumerate(bodies)]
    for number, body in enumerate(bodies):
        assert await take(ends[1]) == (number, body)
    await asyncio.gather(*sent)


async def test_several_land_at_once(ends: tuple[Connection, Connection]) -> None:
    bodies = [os.urandom(BIG) for _ in range(6)]
    sent = [ends[0].send(1, memoryview(body)) for body in bodies]
    buffers, landed = [], []
    for _ in bodies:
        incoming = await ends[1].receive()
        assert incoming is not None
        buffers.append(bytearray(incoming.nbytes))
        landed.append(incoming.into(memoryview(buffers[-1])))
    await asyncio.gather(*landed, *sent)
    assert [bytes(buffer) for buffer in buffers] == bodies


async def test_a_read_only_buffer_can_be_sent_and_not_received_into(
    ends: tuple[Connection, Connection],
) -> None:
    ends[0].send(1, memoryview(b"abc"))
    incoming = await ends[1].receive()
    assert incoming is not None
    with pytest.raises(FramingError, match="read-only"):
        incoming.into(memoryview(b"xyz"))
    await incoming.into(memoryview(bytearray(3)))


@pytest.mark.parametrize("room", [99, 101, 0])
async def test_another_length_is_refused_before_a_byte_lands(
    ends: tuple[Connection, Connection], room: int
) -> None:
    ends[0].send(1, memoryview(b"x" * 100))
    incoming = await ends[1].receive()
    assert incoming is not None
    buffer = bytearray(room)
    with pytest.raises(FramingError, match="100 bytes"):
        incoming.into(memoryview(buffer))
    assert buffer == bytearray(room)
    right = bytearray(100)
    await incoming.into(memoryview(right))
    assert right == b"x" * 100
    with pytest.raises(FramingError, match="once"):
        incoming.into(memoryview(right))


@pytest.mark.parametrize("tag", [-1, MAX_TAG + 1, 0xFFFF])
async def test_reserved_tags_are_refused(ends: tuple[Connection, Connection], tag: int) -> None:
    with pytest.raises(FramingError, match="tag"):
        ends[0].send(tag, memoryview(b""))


async def test_close_drains_and_the_peer_sees_the_end(ends: tuple[Connection, Connection]) -> None:
    body = os.urandom(BIG)
    ends[0].send(1, memoryview(body))
    ends[0].send(2, memoryview(b"last"))
    closing = asyncio.create_task(ends[0].close())
    assert await take(ends[1]) == (1, body)
    await closing
    assert await take(ends[1]) == (2, b"last")
    assert await ends[1].receive() is None
    assert await ends[1].receive() is None
    await ends[1].close()


async def test_both_may_close_at_once(ends: tuple[Connection, Connection]) -> None:
    await asyncio.gather(ends[0].close(), ends[1].close())
    for end in ends:
        await end.close()


async def test_closed_ends_send_nothing(ends: tuple[Connection, Connection]) -> None:
    await ends[0].close()
    with pytest.raises(ConnectionLostError):
        ends[0].send(1, memoryview(b"x"))


async def test_close_has_a_deadline(ends: tuple[Connection, Connection]) -> None:
    sent = ends[0].send(1, memoryview(bytes(BIG)))  # nobody takes it
    with pytest.raises(DeadlineError, match="did not confirm"):
        await ends[0].close(0.05)
    with pytest.raises(ConnectionLostError):
        await sent


async def test_abort_wakes_both_ends(ends: tuple[Connection, Connection]) -> None:
    here, there = (asyncio.create_task(end.receive()) for end in ends)
    sent = ends[0].send(1, memoryview(bytes(BIG)))
    incoming = await there
    assert incoming is not None
    there = asyncio.create_task(ends[1].receive())
    ends[0].abort()
    for waiting in (here, there, sent):
        with pytest.raises(ConnectionLostError):
            await waiting
    ends[0].abort()


async def test_cancelled_waits_lose_no_message(ends: tuple[Connection, Connection]) -> None:
    for _ in range(3):
        waiting = asyncio.create_task(ends[1].receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    ends[0].send(5, memoryview(b"kept"))
    assert await take(ends[1]) == (5, b"kept")


async def test_cancelling_a_transfer_only_stops_the_waiting(ends: tuple[Connection, Connection]) -> None:
    body = os.urandom(BIG)
    sent = ends[0].send(1, memoryview(body))
    incoming = await ends[1].receive()
    assert incoming is not None
    buffer = bytearray(BIG)
    incoming.into(memoryview(buffer)).cancel()
    await sent
    ends[0].send(2, memoryview(b"next"))
    assert await take(ends[1]) == (2, b"next")
    assert buffer == body


async def test_nobody_listens(make: Callable[[], Transport]) -> None:
    transport = make()
    listener = await transport.listen()
    port = listener.port
    await listener.close()
    with pytest.raises((TransportError, DeadlineError)):
        await make().connect("127.0.0.1", port, 2.0)


async def test_a_listener_serves_many_and_ends_alone(make: Callable[[], Transport]) -> None:
    server = make()
    listener = await server.listen()
    pairs = []
    for number in range(4):
        mine = await make().connect("127.0.0.1", listener.port, 5.0)
        theirs = await listener.accept()
        pairs.append((number, mine, theirs))
    await listener.close()
    for number, mine, theirs in reversed(pairs):
        mine.send(number, memoryview(bytes([number])))
        assert await take(theirs) == (number, bytes([number]))
        theirs.send(9, memoryview(b"back"))
        assert await take(mine) == (9, b"back")


UCX_TYPES = {"UCXContext", "UCXWorker", "UCXListener", "UCXEndpoint", "UCXRequest"}


def of_ucx() -> list[str]:
    return sorted(type(each).__name__ for each in gc.get_objects() if type(each).__name__ in UCX_TYPES)


@pytest.mark.parametrize("ended", ["closed", "aborted", "unread", "lost"])
async def test_a_closed_transport_leaves_nothing_of_ucx_to_the_collector(ended: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = of_ucx()
        one, other = UcxTransport(), UcxTransport()
        mine, theirs, _ = await join(one, other)
        if ended == "unread":
            mine.send(1, memoryview(bytes(BIG)))
            mine.send(2, memoryview(b"abc"))
            await theirs.receive()
        elif ended == "lost":
            with pytest.raises(ConnectionLostError):
                await one.connect("127.0.0.1", 1, 5.0)
        elif ended == "closed":
            await asyncio.gather(mine.close(), theirs.close())
        else:
            mine.abort()
        await one.close()
        await other.close()
        assert of_ucx() == before
    finally:
        gc.enable()


async def test_who_calls_while_a_transport_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that comes into being then would be ended by nobody before the worker goes."""

    async def known(host: str) -> str:
        return host

    monkeypatch.setattr("worldmove.transport.ucx_transport._address", known)
    one, other = UcxTransport(), UcxTransport()
    _, _, listener = await join(one, other)
    closing = asyncio.gather(
        one.close(), one.connect("127.0.0.1", listener.port, 5.0), return_exceptions=True
    )
    _, called = await closing
    assert isinstance(called, ConnectionLostError)
    await other.close()


async def test_a_closed_transport_says_so(make: Callable[[], Transport]) -> None:
    transport = make()
    listener = await transport.listen()
    await transport.close()
    await transport.close()
    with pytest.raises(TransportError):
        await transport.listen()
    with pytest.raises(TransportError):
        await transport.connect("127.0.0.1", listener.port, 5.0)
    await listener.close()
