"""Before a *direct* lane's first pull: its ring travels once as it is, which opens the way and measures it.

The first use of a peer's memory takes ten times as long as the next. And UCX takes TCP, without a word,
where it finds nothing better, so that only a rate tells which way the bytes went. What is slow is found by
little, so that it is found soon.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

from worldmove.errors import ConnectionLostError, FramingError
from worldmove.transport import framing
from worldmove.transport.base import Connection
from worldmove.transport.device import LaneGpu
from worldmove.transport.exchange import take
from worldmove.transport.framing import WARM, Kind
from worldmove.transport.packing import AT_ONCE, SLOT_BYTES

SMALL_BYTES, LARGE_BYTES = 4 << 20, 32 << 20
STEPS = {(1, SMALL_BYTES): 0.0, (2, SMALL_BYTES): 8.0, (2, LARGE_BYTES): 100.0, (8, SLOT_BYTES): 0.0}
"""Messages and bytes of each step, and the rate below which it is the last; the first only opens the way."""


class Gauge(NamedTuple):
    """What was measured: 10⁹ bit/s, and how many messages this side has sent and received so far."""

    gbps: float
    sent: int
    received: int


async def measure(connection: Connection, gpu: LaneGpu) -> Gauge:
    """As destination, after the introduction; the caller sets the deadline.

    Raises:
        TransportError: the connection broke, or the source answers something else.
    """
    gbps, sent, received = 0.0, 1, 1
    for (messages, nbytes), least_gbps in STEPS.items():
        began = time.perf_counter()
        connection.send(framing.tag_of(Kind.WARM, sent), memoryview(WARM.pack(messages, nbytes)))
        sent += 1
        landing: deque[asyncio.Future[None]] = deque()
        for number in range(messages):
            if len(landing) == AT_ONCE:
                await landing.popleft()
            incoming = await connection.receive()
            if incoming is None:
                raise ConnectionLostError("the other side closed in the middle of a measurement")
            kind = framing.read_tag(incoming.tag, incoming.nbytes, received, SLOT_BYTES)
            if kind is not Kind.DATA or incoming.nbytes != nbytes:
                raise FramingError(f"{kind.name} of {incoming.nbytes} bytes came in a measurement")
            received += 1
            landing.append(incoming.into(gpu.slot(number % gpu.slots, nbytes)))
        for future in landing:
            await future
        gbps = messages * nbytes * 8 / (time.perf_counter() - began) / 1e9
        if gbps < least_gbps:
            break
    await connection.send(framing.tag_of(Kind.WARM, sent), memoryview(WARM.pack(0, 0)))
    return Gauge(gbps, sent + 1, received)


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
        messages, nbytes = WARM.unpack(await asyncio.wait_for(take(incoming), stall_s))
        if not messages:
            return Gauge(0.0, sent, received)
        if (messages, nbytes) not in STEPS:
            raise FramingError(f"{messages} messages of {nbytes} bytes are no step of a measurement")
        sending: deque[asyncio.Future[None]] = deque()
        for number in range(messages):
            if len(sending) == AT_ONCE:
                await asyncio.wait_for(sending.popleft(), stall_s)
            data = gpu.slot(number % gpu.slots, nbytes)
            sending.append(connection.send(framing.tag_of(Kind.DATA, sent), data))
            sent += 1
        for future in sending:
            await asyncio.wait_for(future, stall_s)
