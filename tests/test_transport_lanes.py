"""Lanes as they are: processes, real UCX over loopback, memfds, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.transport_kit import MOVE, Arena, lanes, lease_pair
from worldmove.errors import (
    DeadlineError,
    FramingError,
    ProcessLostError,
    RejectedError,
    TransportError,
    WorldMoveError,
)
from worldmove.manifest import Span
from worldmove.transport import framing
from worldmove.transport.exchange import introduce
from worldmove.transport.framing import Kind
from worldmove.transport.pool import LanePool, LaneRegion, mint_token
from worldmove.transport.table import RegionTable
from worldmove.transport.ucx_transport import UcxTransport

MB = 1 << 20
HZ = os.sysconf("SC_CLK_TCK")


@pytest.fixture
async def pool() -> AsyncIterator[LanePool]:
    async with lanes(stall_ms=1000) as made:
        yield made


@pytest.fixture
async def keeping() -> AsyncIterator[LanePool]:
    """A pool whose released lanes live on."""
    async with lanes(stall_ms=1000, spare=1) as made:
        yield made


def mapped(pid: int) -> bool:
    return "test-arena" in Path(f"/proc/{pid}/maps").read_text()


def whole(arena: Arena) -> list[LaneRegion]:
    return [LaneRegion(0, 0, arena.nbytes)]


def cut(nbytes: int, step: int) -> list[list[Span]]:
    return [[Span(0, start, min(step, nbytes - start))] for start in range(0, nbytes, step)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HZ


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until_gone(pid: int) -> None:
    """Waits for the end of a process by its pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["source", "destination"])
async def test_the_loss_of_either_lane_is_noticed_by_the_other(
    pool: LanePool, victim: str, number: signal.Signals
) -> None:
    source, destination = Arena(64 * MB, 1), Arena(64 * MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    struck, survivor = (giver, taker) if victim == "source" else (taker, giver)
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(64 * MB, 4 * MB)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
    os.kill(struck.pid, number)
    more = [asyncio.create_task(taker.pull(spans)) for _ in range(3) for spans in cut(64 * MB, 4 * MB)]
    try:
        async with asyncio.timeout(20):
            assert isinstance(await survivor.lost, WorldMoveError)
            outcome = await asyncio.gather(*pulls, *more, return_exceptions=True)
            assert all(isinstance(item, int | WorldMoveError) for item in outcome)
            assert any(isinstance(item, WorldMoveError) for item in outcome)
            assert isinstance(await struck.lost, WorldMoveError)
    finally:
        for lane in (giver, taker):
            lane.abort()
            await lane.gone()


async def test_after_gone_no_byte_lands(pool: LanePool) -> None:
    source, destination = Arena(128 * MB, 1), Arena(128 * MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(128 * MB, 4 * MB)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
    taker.abort()
    await taker.gone()
    assert not alive(taker.pid)
    destination.bytes[:] = 0xA5
    for item in await asyncio.gather(*pulls, return_exceptions=True):
        assert isinstance(item, int | ProcessLostError)
    assert isinstance(await giver.lost, TransportError)
    await giver.gone()
    assert (destination.bytes == 0xA5).all()


async def test_a_cancelled_pull_goes_on_and_release_waits_for_it(keeping: LanePool) -> None:
    source, destination = Arena(32 * MB, 1), Arena(32 * MB)
    giver, taker = await lease_pair(keeping, source, destination, whole(source))
    pull = asyncio.create_task(taker.pull([Span(0, 0, 32 * MB)]))
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await taker.release()
    assert np.array_equal(source.bytes, destination.bytes)
    await giver.release()
    assert not taker.lost.done()
    assert not giver.lost.done()


async def test_a_source_may_end_first_and_its_peer_learns_it(keeping: LanePool) -> None:
    source, destination = Arena(32 * MB, 1), Arena(32 * MB)
    giver, taker = await lease_pair(keeping, source, destination, whole(source))
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(32 * MB, MB)]
    await pulls[0]
    await giver.release()
    # The peer ends with pulls under way; its reset may overtake its confirmation, and then so does this lane.
    assert not alive(giver.pid) or not mapped(giver.pid)
    for outcome in await asyncio.gather(*pulls, return_exceptions=True):
        assert outcome == MB or isinstance(outcome, WorldMoveError)
    taker.abort()
    await taker.gone()


async def test_cancelled_commands_end_their_lane_and_leave_nothing(pool: LanePool) -> None:
    source = Arena(MB, 1)
    for steps in range(0, 12, 2):
        leasing = asyncio.create_task(pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False))
        for _ in range(steps):
            await asyncio.sleep(0)
        leasing.cancel()
        with suppress(asyncio.CancelledError):
            (await leasing).abort()
    taker = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=True)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        waiting = asyncio.create_task(taker.connect("127.0.0.1", port, mint_token(), 60_000))
        called, _ = await asyncio.get_running_loop().run_in_executor(None, mute.accept)
        with called:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    await taker.gone()
    with pytest.raises(ProcessLostError):
        await taker.serve(mint_token())


async def test_release_of_a_broken_pair_leaves_nothing_mapped(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    taker.abort()
    await giver.release()
    assert not alive(giver.pid)
    await taker.release()
    assert not alive(taker.pid)


async def test_a_pool_has_a_limit_and_replaces_what_it_lost() -> None:
    events: list[tuple[str, object]] = []
    ready = asyncio.Event()

    def note(name: str, facts: dict[str, object]) -> None:
        events.append((name, facts["pid"]))
        if sum(kind == "lane-started" for kind, _ in events) == 2:
            ready.set()

    async with lanes(spare=1, limit=2, on_event=note) as pool:
        ((pid, port, leased),) = pool.lanes
        assert port > 0
        assert leased is None
        os.kill(pid, signal.SIGKILL)
        await ready.wait()
        arena = Arena(4096)
        first = await pool.lease("m-1", [(arena.fd, 4096)], whole(arena), writable=False)
        second = await pool.lease("m-2", [(arena.fd, 4096)], whole(arena), writable=False)
        assert pid not in (first.pid, second.pid)
        with pytest.raises(RejectedError, match="all 2 lanes"):
            await pool.lease("m-3", [(arena.fd, 4096)], whole(arena), writable=False)
        await first.release()
        third = await pool.lease("m-3", [(arena.fd, 4096)], whole(arena), writable=False)
        assert third.pid == first.pid
    assert [name for name, _ in events].count("lane-lost") >= 1
    for _, number in events:
        assert not alive(int(str(number)))
    with pytest.raises(ProcessLostError, match="closed"):
        await pool.lease("m-4", [(arena.fd, 4096)], whole(arena), writable=False)


async def test_lanes_do_not_outlive_their_node() -> None:
    program = (
        "import asyncio, sys\n"
        "from worldmove.transport.pool import LanePool\n"
        "async def main():\n"
        "    pool = LanePool(spare=2)\n"
        "    await pool.start()\n"
        "    sys.stdout.write(' '.join(str(pid) for pid, _, _ in pool.lanes) + '\\n')\n"
        "    sys.stdout.flush()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    pids = [int(word) for word in (await node.stdout.readline()).split()]
    assert len(pids) == 2
    node.kill()
    await node.wait()
    async with asyncio.timeout(10):
        for pid in pids:
            await until_gone(pid)


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


@pytest.mark.parametrize(
    ("fault", "damaged"),
    [("lane-flip-once", [1, 0]), ("lane-flip-always", [2, 2])],
)
async def test_faults_damage_what_is_sent_and_never_the_source(fault: str, damaged: list[int]) -> None:
    source, destination = Arena(5 * MB, 1), Arena(5 * MB)
    before = source.bytes.copy()
    async with lanes(faults=fault) as pool:
        _, taker = await lease_pair(pool, source, destination, whole(source))
        for count in damaged:
            await taker.pull([Span(0, 0, 5 * MB)])
            assert int(np.count_nonzero(source.bytes != destination.bytes)) == count
        assert np.array_equal(source.bytes, before)


@pytest.mark.parametrize(
    ("fault", "kind"), [("lane-short-once", TransportError), ("lane-stall", DeadlineError)]
)
async def test_faults_that_break_a_transfer_are_found(fault: str, kind: type[WorldMoveError]) -> None:
    source, destination = Arena(9 * MB, 1), Arena(9 * MB)
    async with lanes(faults=fault, stall_ms=500) as pool:
        _, taker = await lease_pair(pool, source, destination, whole(source))
        with pytest.raises(kind):
            await taker.pull([Span(0, 0, 9 * MB)])
        await taker.lost
