"""Lanes as they are: processes, real UCX over loopback, memfds, and callers of every kind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.transport_kit import (
    MB,
    MOVE,
    Arena,
    cpu_seconds,
    cut,
    lanes,
    lease_pair,
    mapped,
    until_gone,
    whole,
)
from worldmove.errors import (
    DeadlineError,
    FramingError,
    ProcessLostError,
    TransportError,
)
from worldmove.manifest import Span
from worldmove.transport import framing
from worldmove.transport import pool as lane_pool
from worldmove.transport.framing import Kind
from worldmove.transport.handshake import introduce
from worldmove.transport.lane_process import MAX_CALLERS
from worldmove.transport.pool import LanePool, LaneRegion, mint_token
from worldmove.transport.table import RegionTable
from worldmove.transport.ucx_connection import UcxConnection
from worldmove.transport.ucx_transport import MAX_GREETING, UcxTransport


@pytest.fixture
async def pool() -> AsyncIterator[LanePool]:
    async with lanes(stall_ms=1000) as made:
        yield made


async def test_a_large_region_arrives_and_lanes_are_used_again(pool: LanePool) -> None:
    pids = set()
    async with lanes(stall_ms=1000, spare=1) as there:
        for seed in range(3):
            source, destination = Arena(40 * MB + 12_345, seed), Arena(40 * MB + 12_345)
            giver = await pool.lease(MOVE, [(source.fd, source.nbytes)], whole(source), writable=False)
            taker = await there.lease(
                MOVE, [(destination.fd, destination.nbytes)], whole(source), writable=True
            )
            pids.add(taker.pid)
            token = mint_token()
            await giver.serve(token)
            await taker.connect("127.0.0.1", giver.port, token, 5000)
            assert (taker.pid, taker.port, MOVE) in there.lanes
            landed = await asyncio.gather(*(taker.pull(spans) for spans in cut(source.nbytes, 16 * MB)))
            assert sum(landed) == source.nbytes
            assert np.array_equal(source.bytes, destination.bytes)
            await taker.release()
            await giver.release()
            assert (taker.pid, taker.port, None) in there.lanes
            assert not mapped(taker.pid)
    assert len(pids) == 1


def children() -> set[str]:
    return set(Path("/proc/self/task", str(os.getpid()), "children").read_text().split())


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8])
async def test_a_pool_that_closes_ends_lanes_that_are_just_being_started(turns: int) -> None:
    source = Arena(MB)
    before = children()
    async with lanes() as starting:
        lease = asyncio.create_task(starting.lease(MOVE, [(source.fd, MB)], whole(source), writable=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await starting.close()
        with pytest.raises(ProcessLostError, match="closed"):
            await lease
        assert not starting.lanes
    assert children() <= before


async def test_thousands_of_regions_of_any_size_in_many_extents(pool: LanePool) -> None:
    rng = np.random.default_rng(5)
    sizes = [1, 0, 8191, 8192, 131_071, 131_072, 5 * MB + 1, *rng.integers(0, 2000, 4000).tolist()]
    extents = 300  # more than one message can carry descriptors
    where = [number % extents for number in range(len(sizes))]
    used = [512] * extents
    regions = []
    for extent, size in zip(where, sizes, strict=True):
        regions.append(LaneRegion(extent, used[extent], size))
        used[extent] += size + 3
    sources = [Arena(size, seed) for seed, size in enumerate(used)]
    targets = [Arena(size) for size in used]
    giver = await pool.lease(MOVE, [(a.fd, a.nbytes) for a in sources], regions, writable=False)
    taker = await pool.lease(MOVE, [(a.fd, a.nbytes) for a in targets], regions, writable=True)
    token = mint_token()
    await giver.serve(token)
    await taker.connect("127.0.0.1", giver.port, token, 5000)
    spans = [Span(number, 0, size) for number, size in enumerate(sizes) if size]
    assert await taker.pull(spans) == sum(sizes)
    for region in regions:
        part = slice(region.offset, region.offset + region.nbytes)
        assert np.array_equal(sources[region.extent].bytes[part], targets[region.extent].bytes[part])
    assert sum(int(np.count_nonzero(a.bytes)) for a in targets) <= sum(sizes)
    assert not any(a.bytes[:512].any() for a in targets)
    await giver.release()
    await taker.release()


async def test_the_two_sides_may_place_regions_differently(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(2 * MB)
    regions = [LaneRegion(0, 0, 700_000), LaneRegion(0, 700_160, 5)]
    others = [LaneRegion(0, MB, 700_000), LaneRegion(0, 3, 5)]
    giver, taker = await lease_pair(pool, source, destination, regions, their_regions=others)
    assert await taker.pull([Span(1, 1, 3), Span(0, 17, 600_000)]) == 600_003
    expected = np.zeros(2 * MB, np.uint8)
    expected[MB + 17 : MB + 600_017] = source.bytes[17:600_017]
    expected[4:7] = source.bytes[700_161:700_164]
    assert np.array_equal(destination.bytes, expected)
    await taker.release()
    await giver.release()


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([Span(0, MB, 1)], "leaves its region"),
        ([Span(1, 0, 1)], "names region"),
        ([Span(0, 0, 0)], "empty"),
        ([Span(0, 0, 1)] * (framing.MAX_SPANS + 1), "at most"),
    ],
)
async def test_bad_pulls_are_refused_and_the_lane_goes_on(
    pool: LanePool, spans: list[Span], reason: str
) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    with pytest.raises(TransportError, match=reason):
        await taker.pull(spans)
    assert await taker.pull([]) == 0
    assert await taker.pull([Span(0, 0, MB)]) == MB
    with pytest.raises(TransportError, match="not connected as a destination"):
        await giver.pull([Span(0, 0, 1)])
    await taker.release()
    await giver.release()


async def test_wrong_and_replayed_tokens_are_turned_away(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False)
    token = mint_token()
    await giver.serve(token)

    async def attempt(token: bytes, move_id: str = MOVE) -> None:
        stranger = await pool.lease(move_id, [(destination.fd, MB)], whole(source), writable=True)
        with pytest.raises((TransportError, DeadlineError)):
            await stranger.connect("127.0.0.1", giver.port, token, 3000)
        await stranger.gone()

    await attempt(mint_token())
    await attempt(token, "m-2")
    taker = await pool.lease(MOVE, [(destination.fd, MB)], whole(source), writable=True)
    await taker.connect("127.0.0.1", giver.port, token, 5000)
    await attempt(token)
    assert not giver.lost.done()
    assert await taker.pull([Span(0, 0, MB)]) == MB
    assert np.array_equal(source.bytes, destination.bytes)
    await taker.release()
    await giver.release()


async def test_a_token_that_two_callers_prove_at_once_lets_one_of_them_in(pool: LanePool) -> None:
    source = Arena(MB, 1)
    giver = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False)
    token = mint_token()
    await giver.serve(token)
    transport = UcxTransport()
    table = RegionTable([memoryview(bytearray(MB))], whole(source))
    try:
        callers = [await transport.connect("127.0.0.1", giver.port, 5.0) for _ in range(4)]
        outcomes = await asyncio.gather(
            *(introduce(caller, token, MOVE, table) for caller in callers), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            *["ConnectionLostError"] * 3,
            "ProcessId",
        ]
    finally:
        await transport.close()


async def test_a_silent_stranger_is_turned_away_and_does_not_block(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False)
    token = mint_token()
    await giver.serve(token)
    transport = UcxTransport()
    try:
        silent = await transport.connect("127.0.0.1", giver.port, 5.0)
        taker = await pool.lease(MOVE, [(destination.fd, MB)], whole(source), writable=True)
        await taker.connect("127.0.0.1", giver.port, token, 5000)
        assert await taker.pull([Span(0, 0, MB)]) == MB
        with pytest.raises(TransportError):
            await silent.receive()
        await taker.release()
        await giver.release()
    finally:
        await transport.close()


@pytest.mark.parametrize("mute", [False, True], ids=["greeted", "mute"])
async def test_strangers_who_say_nothing_do_not_touch_a_move(pool: LanePool, *, mute: bool) -> None:
    """More than a lane takes, before the right lane calls and after: nobody is kept out or ended."""
    source, destination = Arena(MB, 1), Arena(MB)
    transport = UcxTransport()
    strangers: list[UcxConnection] = []

    async def crowd(port: int, count: int) -> None:
        for _ in range(count):
            if mute:
                strangers.append(transport.adopt(transport.worker.connect("127.0.0.1", port)))
            else:
                strangers.append(await transport.connect("127.0.0.1", port, 5.0))

    giver = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False)
    token = mint_token()
    await giver.serve(token)
    await crowd(giver.port, MAX_GREETING + 1 if mute else MAX_CALLERS + 1)
    taker = await pool.lease(MOVE, [(destination.fd, MB)], whole(source), writable=True)
    await taker.connect("127.0.0.1", giver.port, token, 5000)
    await crowd(taker.port, 3)
    if not mute:
        for stranger in strangers:  # those who were there before the token was used time out after that
            with pytest.raises(TransportError):
                await stranger.receive()
    assert await taker.pull([Span(0, 0, MB)]) == MB
    assert np.array_equal(source.bytes, destination.bytes)
    await taker.release()
    await giver.release()
    assert not giver.lost.done()
    await transport.close()


@pytest.mark.parametrize("words", [b"", bytes(4096), b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n"])
async def test_strangers_who_do_not_speak_ucx_do_not_touch_a_move(pool: LanePool, words: bytes) -> None:
    """At every port that UCX has opened: where it is called, and where its own connections come in."""
    source, destination = Arena(8 * MB, 1), Arena(8 * MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    with ExitStack() as stack:
        for address in (*listening(giver.pid), *listening(taker.pid)):
            for _ in range(20):
                stranger = stack.enter_context(socket.create_connection(address))
                with suppress(ConnectionError):
                    stranger.sendall(words)
        for _ in range(4):
            assert await taker.pull([Span(0, 0, 8 * MB)]) == 8 * MB
    assert await taker.pull([Span(0, 0, 8 * MB)]) == 8 * MB
    assert np.array_equal(source.bytes, destination.bytes)
    await taker.release()
    await giver.release()


def listening(pid: int) -> list[tuple[str, int]]:
    """The TCP addresses (IPv4) at which a process can be reached from here."""
    links = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.add(str(entry.readlink()))
    found = []
    for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:]):
        host, port = fields[1].split(":")
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
            address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            found.append(("127.0.0.1" if address == "0.0.0.0" else address, int(port, 16)))
    assert len(found) > 1
    return found


async def test_a_caller_with_the_token_that_breaks_the_rules_is_cut(pool: LanePool) -> None:
    source = Arena(MB, 1)
    giver = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False)
    token = mint_token()
    await giver.serve(token)
    transport = UcxTransport()
    try:
        rogue = await transport.connect("127.0.0.1", giver.port, 5.0)
        await introduce(rogue, token, MOVE, RegionTable([memoryview(bytearray(MB))], whole(source)))
        greedy = framing.pack_spans([Span(0, 1, MB)])
        rogue.send(framing.tag_of(Kind.PULL, 1), memoryview(greedy.tobytes()))
        error = await giver.lost
        assert isinstance(error, FramingError)
        assert "leaves its region" in error.message
        await giver.gone()
    finally:
        await transport.close()


async def test_regions_of_other_sizes_are_refused(pool: LanePool) -> None:
    with pytest.raises(TransportError, match="different sizes"):
        await lease_pair(
            pool, Arena(MB, 1), Arena(MB), [LaneRegion(0, 0, 10)], their_regions=[LaneRegion(0, 0, 11)]
        )


async def test_memory_that_is_not_as_described_is_refused(pool: LanePool) -> None:
    arena = Arena(MB)
    for extents, regions in (
        ([(arena.fd, 2 * MB)], [LaneRegion(0, 0, 1)]),
        ([(arena.fd, MB)], [LaneRegion(0, MB, 1)]),
        ([(arena.fd, MB)], [LaneRegion(1, 0, 1)]),
    ):
        with pytest.raises(TransportError):
            await pool.lease(MOVE, extents, regions, writable=True)


async def test_nobody_serves_there(pool: LanePool) -> None:
    arena = Arena(MB)
    idle = await pool.lease("other", [(arena.fd, MB)], whole(arena), writable=False)
    taker = await pool.lease(MOVE, [(arena.fd, MB)], whole(arena), writable=True)
    with pytest.raises((TransportError, DeadlineError)):
        await taker.connect("127.0.0.1", idle.port, mint_token(), 1500)
    await taker.gone()
    assert not idle.lost.done()
    await idle.release()


async def test_an_idle_pair_uses_next_to_no_cpu(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    assert await taker.pull([Span(0, 0, MB)]) == MB
    before = [cpu_seconds(lane.pid) for lane in (giver, taker)]
    await asyncio.sleep(2.0)  # the time over which the use is measured
    used = [cpu_seconds(lane.pid) - start for lane, start in zip((giver, taker), before, strict=True)]
    assert max(used) < 0.2, used  # polling would use about 2 seconds
    await taker.release()
    await giver.release()


async def test_lanes_that_a_burst_left_behind_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two moves at once need two lanes; a minute later (here at once) one that nobody needed has ended."""
    arena = Arena(1 * MB)
    async with lanes() as pool:
        for linger, left in ((60.0, 2), (0.0, 0)):
            monkeypatch.setattr(lane_pool, "LINGER_S", linger)
            leased = [
                await pool.lease(f"m{n}", [(arena.fd, arena.nbytes)], whole(arena), writable=True)
                for n in range(2)
            ]
            pids = [lane.pid for lane in leased]
            for lane in leased:
                await lane.release()
            if left:
                assert [pid for pid, _, _ in pool.lanes] == pids
            else:
                await asyncio.gather(*(until_gone(pid) for pid in pids))
                assert pool.lanes == []
