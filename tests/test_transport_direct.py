"""*Direct* lanes: real processes, real UCX, and a GPU that is imagined (tests/fake_gpu), so over TCP here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest
from gpu_kit import GPUS
from hypothesis import given
from hypothesis import strategies as st
from transport_kit import MB, MOVE, Arena, alive, lanes, mapped, until_gone

from worldmove.errors import (
    ConnectionLostError,
    DeadlineError,
    FramingError,
    ProcessLostError,
    TransportError,
    WorldMoveError,
)
from worldmove.manifest import Span
from worldmove.transport.framing import pack_spans
from worldmove.transport.lane_messages import Wish
from worldmove.transport.packing import SLOT_BYTES, pack
from worldmove.transport.pool import Lane, LanePool, LaneRegion, mint_token

pytestmark = pytest.mark.usefixtures("imagined")

SIZES = (33 * MB + 12_345, 1, 0, 8191, 5 * MB + 1, *range(1, 60))
GRANULE = 2 * MB
REGIONS = [
    LaneRegion(0, 512 + 2 * MB * number + sum(SIZES[:number]), size) for number, size in enumerate(SIZES)
]


class DeviceArena(Arena):
    """Memory of the imagined GPU."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        super().__init__(-(-nbytes // GRANULE) * GRANULE, seed)
        os.close(self.fd)
        self.fd = os.memfd_create("imagined-gpu-0-test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        os.pwrite(self.fd, self.bytes.tobytes() if seed is not None else b"", 0)
        self.bytes = np.memmap(f"/proc/self/fd/{self.fd}", dtype=np.uint8, mode="r+")


def room(regions: list[LaneRegion]) -> int:
    return max(region.offset + region.nbytes for region in regions)


def spans(sizes: tuple[int, ...] = SIZES) -> list[Span]:
    return [Span(number, 0, size) for number, size in enumerate(sizes) if size]


class Pools:
    """The lanes of two GPUs."""

    def __init__(self, near: LanePool, far: LanePool) -> None:
        self.near, self.far = near, far

    async def pair(
        self,
        source: Arena,
        target: Arena,
        regions: list[LaneRegion],
        there: list[LaneRegion] | None = None,
        wish: Wish | None = None,
    ) -> tuple[Lane, Lane]:
        """A connected pair: source's and destination's."""
        giver = await self.near.lease(MOVE, [(source.fd, source.nbytes)], regions, writable=False)
        taker = await self.far.lease(MOVE, [(target.fd, target.nbytes)], there or regions, writable=True)
        token = mint_token()
        await giver.serve(token)
        assert await taker.connect("127.0.0.1", giver.port, token, 20_000, wish) > 0
        return giver, taker


@pytest.fixture
async def pools(request: pytest.FixtureRequest) -> AsyncIterator[Pools]:
    faults = getattr(request, "param", "")
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(lanes(gpu=GPUS[0], slots=2, faults=faults, stall_ms=2000))
        far = await stack.enter_async_context(lanes(gpu=GPUS[1], slots=3, stall_ms=2000))
        yield Pools(near, far)


WISHES = (
    Wish(),
    Wish(chunk_bytes=16 * MB, depth=1, landing="ring"),
    Wish(chunk_bytes=16 * MB, depth=5, landing="straight"),
)


async def test_regions_of_any_size_arrive_and_lanes_are_used_again(pools: Pools) -> None:
    """Whatever the destination wishes, from one lease to the next; and both say where the time went."""
    pids = set()
    for seed, wish in enumerate(WISHES):
        source, target = DeviceArena(room(REGIONS), seed), DeviceArena(room(REGIONS))
        giver, taker = await pools.pair(source, target, REGIONS, wish=wish)
        assert "ring" in taker.opened.rates
        assert wish.landing == "auto" or taker.opened.straight == (wish.landing == "straight")
        pids |= {giver.pid, taker.pid}
        wanted = spans()
        parts = [*([one] for one in wanted[:9]), wanted[9:]]
        landed = await asyncio.gather(*(taker.pull(part) for part in parts))
        assert sum(landed) == sum(SIZES)
        expected = np.zeros_like(target.bytes)
        for region in REGIONS:
            part = slice(region.offset, region.offset + region.nbytes)
            expected[part] = source.bytes[part]
        assert np.array_equal(target.bytes, expected)
        await taker.release()
        await giver.release()
        for lane, steps in ((giver, ("gather", "send")), (taker, ("receive", "scatter"))):
            assert sum(lane.account[step]["bytes"] for step in steps) >= 2 * SIZES[4]
        sent = giver.account["send"]["bytes"]
        straight = taker.account.get("straight", {"bytes": 0})["bytes"]
        assert sent == sum(SIZES) == taker.account["receive"]["bytes"] + straight
        assert (straight > 0) == taker.opened.straight
        files = [f" {os.fstat(arena.fd).st_ino} " for arena in (source, target)]
        assert not any(mapped(pid, name) for pid in pids for name in files)
    assert len(pids) == 2


async def test_a_pull_brings_exactly_its_spans_to_other_places(pools: Pools) -> None:
    """And a region that lies on another device is not brought by this lane."""
    source, target = DeviceArena(MB, 7), DeviceArena(2 * MB)
    regions = [LaneRegion(0, 0, 700_000), LaneRegion(0, 700_160, 5), LaneRegion(-1, 0, 50)]
    there = [LaneRegion(0, MB, 700_000), LaneRegion(0, 3, 5), LaneRegion(-1, 0, 50)]
    giver, taker = await pools.pair(source, target, regions, there)
    assert await taker.pull([Span(1, 1, 3), Span(0, 17, 600_000)]) == 600_003
    expected = np.zeros_like(target.bytes)
    expected[MB + 17 : MB + 600_017] = source.bytes[17:600_017]
    expected[4:7] = source.bytes[700_161:700_164]
    assert np.array_equal(target.bytes, expected)
    for wrong, reason in ((Span(0, 1, 700_000), "leaves its region"), (Span(2, 0, 50), "another device")):
        with pytest.raises(TransportError, match=reason):
            await taker.pull([wrong])
    assert await taker.pull([Span(1, 0, 5)]) == 5
    await taker.release()
    await giver.release()


async def test_memory_that_is_not_this_gpus_is_refused(pools: Pools) -> None:
    host, device = Arena(GRANULE), DeviceArena(MB)
    for extents, regions in (
        ([(host.fd, GRANULE)], [LaneRegion(0, 0, 1)]),
        ([(device.fd, MB)], [LaneRegion(0, GRANULE, 1)]),
    ):
        with pytest.raises(TransportError):
            await pools.far.lease(MOVE, extents, regions, writable=True)


async def test_wrong_and_replayed_tokens_are_turned_away(pools: Pools) -> None:
    source, target = DeviceArena(MB, 1), DeviceArena(MB)
    regions = [LaneRegion(0, 0, MB)]
    giver = await pools.near.lease(MOVE, [(source.fd, MB)], regions, writable=False)
    token = mint_token()
    await giver.serve(token)

    async def attempt(token: bytes) -> None:
        stranger = await pools.far.lease(MOVE, [(target.fd, MB)], regions, writable=True)
        with pytest.raises((TransportError, DeadlineError)):
            await stranger.connect("127.0.0.1", giver.port, token, 3000)
        await stranger.gone()

    await attempt(mint_token())
    taker = await pools.far.lease(MOVE, [(target.fd, MB)], regions, writable=True)
    await taker.connect("127.0.0.1", giver.port, token, 20_000)
    await attempt(token)
    assert await taker.pull([Span(0, 0, MB)]) == MB
    assert np.array_equal(target.bytes[:MB], source.bytes[:MB])
    await taker.release()
    await giver.release()


async def test_a_lane_of_another_kind_is_refused(pools: Pools) -> None:
    async with lanes(stall_ms=2000) as plain:
        source, target = Arena(MB, 1), DeviceArena(MB)
        regions = [LaneRegion(0, 0, MB)]
        giver = await plain.lease(MOVE, [(source.fd, MB)], regions, writable=False)
        taker = await pools.far.lease(MOVE, [(target.fd, MB)], regions, writable=True)
        token = mint_token()
        await giver.serve(token)
        with pytest.raises((TransportError, DeadlineError)):
            await taker.connect("127.0.0.1", giver.port, token, 5000)
        assert isinstance(await giver.lost, WorldMoveError)


@pytest.mark.parametrize("pools", ["lane-flip-once"], indirect=True)
async def test_a_flipped_byte_is_the_rings_and_never_the_worlds(pools: Pools) -> None:
    source, target = DeviceArena(MB, 1), DeviceArena(MB)
    before = source.bytes.copy()
    giver, taker = await pools.pair(source, target, [LaneRegion(0, 0, MB)])
    await taker.pull([Span(0, 0, MB)])
    assert np.count_nonzero(target.bytes[:MB] != source.bytes[:MB]) == 1
    assert np.array_equal(source.bytes, before)
    await taker.pull([Span(0, 0, MB)])
    assert np.array_equal(target.bytes[:MB], source.bytes[:MB])
    await taker.release()
    await giver.release()


@pytest.mark.parametrize("pools", ["lane-short-once", "lane-over-once", "lane-stall"], indirect=True)
async def test_what_comes_short_long_or_not_at_all_ends_the_lane(pools: Pools) -> None:
    source, target = DeviceArena(4 * MB, 1), DeviceArena(4 * MB)
    _, taker = await pools.pair(source, target, [LaneRegion(0, 0, 4 * MB)])
    pulls = [taker.pull([Span(0, part * 2 * MB, 2 * MB)]) for part in range(2)]
    # `lane-stall` lets the first message pass.
    outcomes = await asyncio.gather(*pulls, return_exceptions=True)
    assert isinstance(outcomes[-1], FramingError | DeadlineError)
    await taker.gone()
    stands = target.bytes.copy()
    source.bytes[:] = 0
    assert np.array_equal(target.bytes, stands)


@pytest.mark.parametrize(
    ("victim", "how"),
    [("source", signal.SIGKILL), ("source", signal.SIGSTOP), ("destination", signal.SIGSTOP)],
)
async def test_a_lane_that_dies_or_stops_ends_the_pull_in_time(
    pools: Pools, victim: str, how: signal.Signals
) -> None:
    source, target = DeviceArena(64 * MB, 1), DeviceArena(64 * MB)
    giver, taker = await pools.pair(source, target, [LaneRegion(0, 0, 64 * MB)])
    pulls = [asyncio.ensure_future(taker.pull([Span(0, part << 22, 4 * MB)])) for part in range(16)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
    os.kill(giver.pid if victim == "source" else taker.pid, how)
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        assert isinstance(outcomes[-1], ProcessLostError | ConnectionLostError | DeadlineError)
        for lane in (giver, taker):
            lane.abort()
            await lane.gone()
            await until_gone(lane.pid)
            assert not alive(lane.pid)


async def test_a_lane_ends_when_one_that_it_has_exchanged_with_is_gone() -> None:
    """UCX would keep the memory of that one open; but a lease that it has by then is served to its end."""
    async with AsyncExitStack() as stack:
        options = {"slots": 2, "stall_ms": 2000}
        near, third = [await stack.enter_async_context(lanes(gpu=GPUS[0], **options)) for _ in range(2)]
        far = await stack.enter_async_context(lanes(gpu=GPUS[1], **options))
        source, target = DeviceArena(MB, 7), DeviceArena(MB)
        regions = [LaneRegion(0, 0, MB)]
        giver, taker = await Pools(near, far).pair(source, target, regions)
        await taker.release()
        await giver.release()
        other, same = await Pools(third, far).pair(source, target, regions)
        assert same is taker
        giver.abort()
        await asyncio.wait_for(stale(taker), 10)
        assert await taker.pull([Span(0, 0, MB)]) == MB
        await taker.release()
        await other.release()
        await asyncio.wait_for(until_gone(taker.pid), 10)
        await asyncio.wait_for(until_gone(other.pid), 10)  # it has exchanged with that one
        async with asyncio.timeout(20):
            while not far.lanes or far.lanes[0][0] == taker.pid:  # noqa: ASYNC110 - it starts by itself
                await asyncio.sleep(0.05)


async def stale(lane: Lane) -> None:
    """Returns when a lane has said that it should end."""
    while not lane.stale:  # noqa: ASYNC110 - it comes from another process
        await asyncio.sleep(0.01)


async def test_the_lanes_of_a_gpu_that_is_not_there_do_not_start() -> None:
    async with lanes(gpu="GPU-none") as pool:
        arena = DeviceArena(MB)
        with pytest.raises(ProcessLostError):
            await pool.lease(MOVE, [(arena.fd, MB)], [LaneRegion(0, 0, MB)], writable=False)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 40), st.integers(1, 300)), min_size=1),
    st.integers(1, 100),
)
def test_loads_are_full_without_gaps_and_in_order(wanted: list[tuple[int, int, int]], slot: int) -> None:
    packed = pack_spans([Span(*each) for each in wanted])
    made = list(pack(packed, slot))
    assert [load.nbytes for load in made[:-1]] == [slot] * (len(made) - 1)
    assert 0 < made[-1].nbytes <= slot
    bytes_of = [
        (region, offset + byte)
        for load in made
        for region, offset, length, _ in load.rows.tolist()
        for byte in range(length)
    ]
    assert bytes_of == [
        (region, offset + byte) for region, offset, length in wanted for byte in range(length)
    ]
    for load in made:
        ends = 0
        for _, _, length, place in load.rows.tolist():
            assert place == ends
            ends += length
        assert ends == load.nbytes


def test_a_message_is_a_slot() -> None:
    loads = list(pack(pack_spans([Span(0, 5, SLOT_BYTES), Span(1, 0, 1)])))
    assert [load.nbytes for load in loads] == [SLOT_BYTES, 1]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 40), st.integers(1, 90_000)), min_size=1),
    st.integers(4096, 40_000),
)
def test_long_spans_travel_alone_and_short_ones_as_if_there_were_no_others(
    wanted: list[tuple[int, int, int]], slot: int
) -> None:
    alone = 8192

    def rows(some: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
        return [load.rows.tolist() for load in pack(pack_spans([Span(*one) for one in some]), slot, alone)]

    long = rows([one for one in wanted if one[2] >= alone])
    short = rows([one for one in wanted if one[2] < alone])
    assert sorted(rows(wanted)) == sorted(long + short)
    ends = {(region, offset): offset + length for region, offset, length in wanted}
    assert all(0 < size <= slot for load in long for _, _, size, _ in load)
    assert sum(size for load in long for _, _, size, _ in load) == sum(
        length for _, _, length in wanted if length >= alone
    )
    assert {(region, start) for region, start in ends if ends[region, start] - start >= alone} <= {
        load[0][:2] for load in long
    }
    assert all(len(load) == 1 and load[0][3] == 0 for load in long)
