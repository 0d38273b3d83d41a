"""The two sides of a lane on the in-memory transport, with every fault where it hurts."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from transport_twin import Fault, MemoryNetwork, MemoryTransport

from tests.transport_kit import join
from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, TransportError
from worldmove.manifest import Span
from worldmove.transport import framing
from worldmove.transport.base import Connection, take
from worldmove.transport.exchange import Destination, Source
from worldmove.transport.faults import Faults
from worldmove.transport.framing import CHUNK, Kind
from worldmove.transport.handshake import examine, introduce, welcome
from worldmove.transport.table import LaneRegion, RegionTable

TOKEN = os.urandom(32)
MOVE = "m-1"
SIZES = (5 * 1024 * 1024 + 3, 0, 1, 700_001, *(range(1, 300)))
STALL = 0.5


class Side:
    """One side's memory."""

    def __init__(self, data: bytes, sizes: tuple[int, ...] = SIZES) -> None:
        self.data = bytearray(data)
        offsets = np.cumsum([0, *sizes]).tolist()
        regions = [LaneRegion(0, offset, size) for offset, size in zip(offsets, sizes, strict=False)]
        self.table = RegionTable([memoryview(self.data)], regions)


class Pair:
    """A source and a destination that have introduced themselves and run."""

    def __init__(self, *, faults: list[Fault] | None = None, their: list[Fault] | None = None) -> None:
        network = MemoryNetwork()
        self.transports = MemoryTransport(network, their or []), MemoryTransport(network, faults or [])
        self.noise = os.urandom(sum(SIZES))
        self.source_side, self.destination_side = Side(self.noise), Side(bytes(sum(SIZES)))
        self.runs: list[asyncio.Task[None]] = []

    async def start(self, names: tuple[str, ...] = ()) -> Destination:
        mine, theirs, _ = await join(*self.transports)
        self.connections = mine, theirs
        table = self.source_side.table

        async def admit() -> None:
            await welcome(theirs, TOKEN, MOVE, table, await examine(theirs, TOKEN, MOVE))

        await asyncio.gather(admit(), introduce(mine, TOKEN, MOVE, self.destination_side.table))
        self.source = Source(theirs, table, STALL, Faults(names))
        self.destination = Destination(mine, self.destination_side.table, STALL)
        self.runs = [asyncio.create_task(side.run()) for side in (self.source, self.destination)]
        return self.destination

    async def fates(self) -> list[BaseException | None]:
        return await asyncio.gather(*self.runs, return_exceptions=True)

    @property
    def landed(self) -> bytes:
        return bytes(self.destination_side.data)


def everything() -> Any:
    return framing.pack_spans([Span(region, 0, size) for region, size in enumerate(SIZES) if size])


async def test_all_regions_whatever_their_size() -> None:
    pair = Pair()
    destination = await pair.start()
    assert await destination.pull(everything()) == sum(SIZES)
    assert pair.landed == pair.noise
    assert bytes(pair.source_side.data) == pair.noise
    await destination.close(1.0)
    assert await pair.fates() == [None, None]


async def test_pulls_overlap_and_finish_in_order() -> None:
    pair = Pair()
    destination = await pair.start()
    order: list[int] = []
    pulls = []
    for number in range(10):
        pulls.append(
            destination.pull(framing.pack_spans([Span(0, number * 500_000, 500_000), Span(2, 0, 1)]))
        )
        pulls[-1].add_done_callback(lambda _, number=number: order.append(number))
    assert await asyncio.gather(*pulls) == [500_001] * 10
    await asyncio.sleep(0)
    assert order == list(range(10))
    assert pair.landed[:5_000_000] == pair.noise[:5_000_000]
    await pair.source.close(1.0)
    assert await pair.fates() == [None, None]
    with pytest.raises(ConnectionLostError):
        destination.pull(everything())


async def test_nothing_outside_a_pull_changes() -> None:
    pair = Pair()
    destination = await pair.start()
    await destination.pull(framing.pack_spans([Span(0, 1000, 300_000), Span(3, 5, 7)]))
    start = SIZES[0] + SIZES[1] + SIZES[2] + 5
    expected = bytearray(sum(SIZES))
    expected[1000:301_000] = pair.noise[1000:301_000]
    expected[start : start + 7] = pair.noise[start : start + 7]
    assert pair.landed == bytes(expected)
    await destination.close(1.0)
    await pair.fates()


async def test_an_out_of_bounds_pull_is_refused_at_home_and_harms_nothing() -> None:
    pair = Pair()
    destination = await pair.start()
    with pytest.raises(FramingError, match="leaves its region"):
        destination.pull(framing.pack_spans([Span(2, 0, 2)]))
    assert await destination.pull(everything()) == sum(SIZES)
    await destination.close(1.0)
    assert await pair.fates() == [None, None]


async def test_too_many_pulls_are_refused() -> None:
    pair = Pair()
    destination = await pair.start()
    one = framing.pack_spans([Span(2, 0, 1)])
    pulls = [destination.pull(one) for _ in range(framing.MAX_PULLS)]
    with pytest.raises(FramingError, match="at once"):
        destination.pull(one)
    await asyncio.gather(*pulls)
    await destination.close(1.0)
    await pair.fates()


# Messages of each direction are numbered from 0, the opening.
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("drop", 2), "is due"),
        (Fault("short", 1), "were pulled"),
        (Fault("cut", 1), "cut"),
        (Fault("cut", 3), "cut"),
    ],
)
async def test_a_broken_source_ends_the_transfer(fault: Fault, reason: str) -> None:
    pair = Pair(faults=[fault])
    destination = await pair.start()
    with pytest.raises(TransportError, match=reason):
        await destination.pull(everything())
    fates = await pair.fates()
    assert all(isinstance(fate, TransportError) for fate in fates), fates


async def test_a_lost_pull_is_found_by_the_next_message() -> None:
    pair = Pair(their=[Fault("drop", 1)])
    destination = await pair.start()
    with pytest.raises(TransportError, match="2 came where 1 is due"):
        await destination.pull(everything())
    await pair.fates()


async def test_a_delayed_message_is_waited_for() -> None:
    until = asyncio.Event()
    pair = Pair(faults=[Fault("delay", 1, until)])
    destination = await pair.start()
    pull = destination.pull(everything())
    await asyncio.sleep(0)
    assert not pull.done()
    until.set()
    assert await pull == sum(SIZES)
    assert pair.landed == pair.noise
    await destination.close(1.0)
    await pair.fates()


async def test_a_flipped_byte_travels_and_the_source_keeps_its_own() -> None:
    pair = Pair(faults=[Fault("corrupt", 1)])
    destination = await pair.start()
    await destination.pull(everything())
    differing = [i for i, (a, b) in enumerate(zip(pair.landed, pair.noise, strict=True)) if a != b]
    assert differing == [CHUNK // 2]
    assert bytes(pair.source_side.data) == pair.noise
    await destination.close(1.0)
    await pair.fates()


async def test_a_stalled_source_is_found_although_it_beats() -> None:
    pair = Pair()
    destination = await pair.start(("lane-stall",))
    with pytest.raises(DeadlineError, match="stood still"):
        await destination.pull(everything())
    pair.connections[0].abort()
    await pair.fates()


async def test_a_source_may_come_late_with_every_message_as_far_as_its_lane_can_tell() -> None:
    """What a grant may take is the gate's affair: it counts from the grant, not from the last message."""
    pair = Pair()
    destination = await pair.start(("lane-drip",))
    begun = asyncio.get_running_loop().time()
    assert await destination.pull(everything()) == sum(SIZES)
    assert asyncio.get_running_loop().time() - begun > STALL
    assert pair.landed == pair.noise
    await destination.close(1.0)
    assert await pair.fates() == [None, None]


async def test_bytes_that_nobody_pulled_are_named_also_to_whoever_pulls_after_them() -> None:
    pair = Pair()
    destination = await pair.start(("lane-unasked-once",))
    reason = "a chunk of 4096 bytes came where|4096 bytes came that nobody pulled"
    with pytest.raises(FramingError, match=reason):
        await destination.pull(everything())
    with pytest.raises(FramingError, match=reason):
        destination.pull(everything())
    pair.connections[0].abort()
    await pair.fates()


async def test_beats_keep_a_silent_pair_alive() -> None:
    pair = Pair()
    destination = await pair.start()
    await asyncio.sleep(3 * STALL)
    assert not any(run.done() for run in pair.runs)
    assert await destination.pull(everything()) == sum(SIZES)
    await destination.close(1.0)
    assert await pair.fates() == [None, None]


async def test_a_silent_peer_is_found_by_both() -> None:
    """Each direction stops carrying anything after the opening, as with a black hole between them."""
    dropped = [Fault("drop", number) for number in range(1, 50)]
    pair = Pair(faults=dropped, their=dropped)
    await pair.start()
    fates = await pair.fates()
    assert all(isinstance(fate, DeadlineError) for fate in fates), fates


async def test_cancelled_pulls_go_on() -> None:
    pair = Pair()
    destination = await pair.start()
    first = destination.pull(everything())
    first.cancel()
    assert await destination.pull(framing.pack_spans([Span(2, 0, 1)])) == 1
    assert pair.landed == pair.noise
    await destination.close(1.0)
    assert await pair.fates() == [None, None]


async def test_a_cancelled_run_leaves_no_task() -> None:
    pair = Pair()
    destination = await pair.start()
    destination.pull(everything())
    before = asyncio.all_tasks()
    for run in pair.runs:
        run.cancel()
    for run in pair.runs:
        with suppress(asyncio.CancelledError):
            await run
    assert asyncio.all_tasks() < before
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Rogue:
    """A caller with the right token that then says what it likes."""

    async def start(self) -> Connection:
        network = MemoryNetwork()
        self.connection, theirs, _ = await join(MemoryTransport(network), MemoryTransport(network))
        side = Side(os.urandom(sum(SIZES)))
        await asyncio.gather(
            introduce(self.connection, TOKEN, MOVE, side.table),
            self._admit(theirs, side),
        )
        self.served = asyncio.create_task(Source(theirs, side.table, STALL, Faults()).run())
        return self.connection

    async def _admit(self, theirs: Connection, side: Side) -> None:
        await welcome(theirs, TOKEN, MOVE, side.table, await examine(theirs, TOKEN, MOVE))


def pull_of(*spans: tuple[int, int, int]) -> bytes:
    return np.array(list(spans), dtype=framing.SPAN).tobytes()


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (Kind.PULL, pull_of((0, 0, SIZES[0] + 1)), "leaves its region"),
        (Kind.PULL, pull_of((0, (1 << 64) - 1, 2)), "leaves its region"),
        (Kind.PULL, pull_of((len(SIZES), 0, 1)), "names region"),
        (Kind.PULL, pull_of((1, 0, 1)), "leaves its region"),
        (Kind.PULL, pull_of((0, 0, 0)), "empty"),
        (Kind.PULL, pull_of((0, 0, 1 << 63), (0, 0, 1 << 63)), "more than"),
        (Kind.PULL, b"x" * 21, "no whole spans"),
        (Kind.PULL, bytes((framing.MAX_SPANS + 1) * framing.SPAN.itemsize), "at most"),
        (Kind.DATA, b"unasked", "came to a lane that serves"),
        (Kind.HELLO, bytes(framing.OPENING.size), "came to a lane that serves"),
    ],
)
async def test_a_rogue_puller_is_cut_and_told_why(kind: Kind, body: bytes, reason: str) -> None:
    rogue = Rogue()
    connection = await rogue.start()
    connection.send(framing.tag_of(kind, 1), memoryview(body))
    told = b""
    while (incoming := await connection.receive()) is not None:
        if incoming.tag >> 12 == Kind.ERROR:
            told = await take(incoming)
    assert reason in told.decode()
    with pytest.raises(FramingError, match=reason):
        await rogue.served


async def test_a_flood_of_pulls_is_cut() -> None:
    rogue = Rogue()
    connection = await rogue.start()
    body = pull_of((0, 0, 4 * 1024 * 1024))
    for number in range(1, 200):
        connection.send(framing.tag_of(Kind.PULL, number), memoryview(body))
    with pytest.raises(FramingError, match="pulls at once"):
        await rogue.served


async def test_bytes_that_nobody_pulled_never_land() -> None:
    network = MemoryNetwork()
    mine, theirs, _ = await join(MemoryTransport(network), MemoryTransport(network))
    side = Side(bytes(sum(SIZES)))

    async def lie() -> None:
        await welcome(theirs, TOKEN, MOVE, side.table, await examine(theirs, TOKEN, MOVE))
        theirs.send(framing.tag_of(Kind.DATA, 1), memoryview(b"unasked"))

    await asyncio.gather(introduce(mine, TOKEN, MOVE, side.table), lie())
    with pytest.raises(FramingError, match="nobody pulled"):
        await Destination(mine, side.table, STALL).run()
    assert not any(side.data)


async def test_regions_of_other_sizes_are_refused_and_both_are_told() -> None:
    network = MemoryNetwork()
    mine, theirs, _ = await join(MemoryTransport(network), MemoryTransport(network))
    one, other = Side(bytes(8), (3, 5)), Side(bytes(8), (5, 3))

    async def admit() -> None:
        await welcome(theirs, TOKEN, MOVE, one.table, await examine(theirs, TOKEN, MOVE))

    outcome = await asyncio.gather(admit(), introduce(mine, TOKEN, MOVE, other.table), return_exceptions=True)
    assert all(isinstance(error, TransportError) and "different sizes" in str(error) for error in outcome)
