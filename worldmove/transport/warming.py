"""Before a *direct* lane's first pull: its ring travels once as it is, which opens the way and measures it.

The first use of a peer's memory takes ten times as long as the next. And UCX takes TCP, without a word,
where it finds nothing better, so that only a rate tells which way the bytes went. What is slow is found by
little, so that it is found soon.

Then the same goes straight into the session's own memory, which means nothing yet. Where that is as fast,
long messages are landed there at once, and no copy follows them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from worldmove.errors import ConnectionLostError, FramingError
from worldmove.transport import framing
from worldmove.transport.base import Connection, DeviceBytes, Incoming, take
from worldmove.transport.device import DeviceTable, LaneGpu
from worldmove.transport.framing import WARM, Kind
from worldmove.transport.packing import ALONE, LEAST_CHUNK, MOST_DEPTH, SLOT_BYTES, Gauge, Landing, Shape

SMALL_BYTES, LARGE_BYTES = 4 << 20, 32 << 20
STEPS = ((1, SMALL_BYTES, 0.0), (2, SMALL_BYTES, 8.0), (4, LARGE_BYTES, 100.0), (8, SLOT_BYTES, 0.0))
"""Messages and most bytes of each step, and the rate below which it is the last; the first opens the way."""
MOST_MESSAGES = 8
AS_FAST = 0.8
"""Straight landing is taken from this share of the ring's rate on: it saves a copy beside the next one."""


class Warming:
    """As destination, after the introduction.

    Args:
        connection: on which nothing was said yet but the introductions.
        gpu: with the ring.
        shape: what is wanted; no larger than fits the ring twice.
    """

    def __init__(self, connection: Connection, gpu: LaneGpu, shape: Shape) -> None:
        self._connection = connection
        self._gpu = gpu
        self._shape = fitting(shape, gpu)
        self._sent = self._received = 1

    async def measure(self, table: DeviceTable, landing: Landing) -> Gauge:
        """Measures what is to be chosen from; the caller sets the deadline.

        Raises:
            TransportError: the connection broke, or the source answers something else.
        """
        slots = self._gpu.ring_bytes // self._shape.chunk_bytes
        chunk = self._shape.chunk_bytes
        gbps = await self._rate(chunk, lambda number, size: self._gpu.ring(number % slots * chunk, size))
        rates = [("ring", gbps)]
        place, straight = table.largest, False
        if landing != "ring" and place is not None and place.nbytes >= ALONE:
            there = place
            found = await self._rate(
                min(chunk, there.nbytes), lambda _number, size: DeviceBytes(there.address, size)
            )
            rates.append(("straight", found))
            straight = landing == "straight" or found >= AS_FAST * gbps
            gbps = found if straight else gbps
        await self._say(0, 0)
        return Gauge(gbps, self._sent, self._received, self._shape, straight, tuple(rates))

    async def _rate(self, most: int, place: Callable[[int, int], DeviceBytes]) -> float:
        gbps = 0.0
        for messages, step_bytes, least_gbps in STEPS:
            nbytes = min(step_bytes, most)
            began = time.perf_counter()
            await self._say(messages, nbytes)
            landing: deque[asyncio.Future[None]] = deque()
            for number in range(messages):
                if len(landing) == self._shape.depth:
                    await landing.popleft()
                landing.append((await self._next(nbytes)).into(place(number, nbytes)))
            for future in landing:
                await future
            gbps = messages * nbytes * 8 / (time.perf_counter() - began) / 1e9
            if gbps < least_gbps:
                break
        return gbps

    async def _say(self, messages: int, nbytes: int) -> None:
        body = WARM.pack(messages, nbytes, *self._shape)
        self._sent += 1
        await self._connection.send(framing.tag_of(Kind.WARM, self._sent - 1), memoryview(body))

    async def _next(self, nbytes: int) -> Incoming:
        incoming = await self._connection.receive()
        if incoming is None:
            raise ConnectionLostError("the other side closed in the middle of a measurement")
        kind = framing.read_tag(incoming.tag, incoming.nbytes, self._received, SLOT_BYTES)
        if kind is not Kind.DATA or incoming.nbytes != nbytes:
            raise FramingError(f"{kind.name} of {incoming.nbytes} bytes came in a measurement")
        self._received += 1
        return incoming


def fitting(shape: Shape, gpu: LaneGpu) -> Shape:
    """A shape with chunks that fit a ring at least twice."""
    return shape._replace(chunk_bytes=min(shape.chunk_bytes, gpu.ring_bytes // 2))


async def oblige(connection: Connection, gpu: LaneGpu, stall_s: float) -> Gauge:
    """As source, after the introduction: sends what the destination asks for until it has enough.

    Raises:
        TransportError: the connection broke, or the destination asks for something else.
        TimeoutError: for `stall_s` nothing was asked for, or no message was over. All of it may take longer.
    """
    sent, received = 1, 1
    while True:
        incoming = await asyncio.wait_for(connection.receive(), stall_s)
        if incoming is None:
            raise ConnectionLostError("the other side closed in the middle of a measurement")
        kind = framing.read_tag(incoming.tag, incoming.nbytes, received)
        if kind is not Kind.WARM or incoming.nbytes != WARM.size:
            raise FramingError(f"{kind.name} came in a measurement")
        received += 1
        messages, nbytes, *wanted = WARM.unpack(await asyncio.wait_for(take(incoming), stall_s))
        shape = _checked(Shape(*wanted), gpu)
        if not messages:
            return Gauge(0.0, sent, received, shape)
        if messages > MOST_MESSAGES or not 0 < nbytes <= shape.chunk_bytes:
            raise FramingError(f"{messages} messages of {nbytes} bytes are no step of a measurement")
        slots = gpu.ring_bytes // shape.chunk_bytes
        sending: deque[asyncio.Future[None]] = deque()
        for number in range(messages):
            if len(sending) == shape.depth:
                await asyncio.wait_for(sending.popleft(), stall_s)
            data = gpu.ring(number % slots * shape.chunk_bytes, nbytes)
            sending.append(connection.send(framing.tag_of(Kind.DATA, sent), data))
            sent += 1
        for future in sending:
            await asyncio.wait_for(future, stall_s)


def _checked(shape: Shape, gpu: LaneGpu) -> Shape:
    if not LEAST_CHUNK <= shape.chunk_bytes <= min(SLOT_BYTES, gpu.ring_bytes // 2):
        raise FramingError(f"chunks of {shape.chunk_bytes} bytes, and a ring of {gpu.ring_bytes}")
    if not 1 <= shape.depth <= MOST_DEPTH:
        raise FramingError(f"{shape.depth} messages at once")
    return shape
