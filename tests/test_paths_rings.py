"""The staged path through rings: real lanes and real executors, whose device is host memory here."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fault_kit import gone
from inbound_kit import REGIONS, SEED, Memory, equal, manifest

from worldmove.delta import batches
from worldmove.errors import FramingError, NoMemoryError, WorldMoveError
from worldmove.executor.pool import ExecutorPool
from worldmove.gate import Gate
from worldmove.hosting.memory import take
from worldmove.inbound import Inbound
from worldmove.manifest import Region, Span
from worldmove.memory.arena import MemoryBudget
from worldmove.messages import TablePart
from worldmove.offering import Serving, regions_of
from worldmove.reading import Reader
from worldmove.rings import SHAPE, Ring, Rings
from worldmove.staging import RingPath, Stage, lease
from worldmove.transport.framing import pack_spans, plan
from worldmove.transport.pool import LanePool, LaneRegion, mint_token
from worldmove.transport.slots import ALIGN, RingShape, SlotTable, loads

BIG = (
    *REGIONS,
    Region("big", "uint8", (21 << 20,)),
    *(Region(f"s{n}", "uint8", (n * 37,)) for n in range(1, 90)),
)
MOVE = "m-rings"


class Node:
    """What one node lends to a move."""

    def __init__(self, faults: str = "") -> None:
        self.pool = ExecutorPool(1, nice=0)
        self.lanes = LanePool(spare=1, faults=faults)
        self.budget = MemoryBudget()
        self.rings = Rings(self.pool, self.budget, keep=1)

    async def close(self) -> None:
        await self.lanes.close()
        await self.rings.close()
        assert self.budget.held == 0
        await self.pool.close()


class Ends:
    """Two nodes with one memory each, and the path between them."""

    def __init__(self, nodes: list[Node], memories: list[Memory]) -> None:
        self.near, self.far = nodes
        self.source, self.target = memories
        self.theirs = Reader(self.source.holding, self.near.pool, SEED)
        self.mine = Reader(self.target.holding, self.far.pool, SEED)
        self.serving = Serving(self.near.lanes, self.near.rings, Stage(self.theirs, self.near.pool))
        self.path: RingPath

    async def open(self, lanes: int) -> None:
        await self.theirs.open(writable=False)
        await self.mine.open()
        leased = []
        for _ in range(lanes):
            giver = await self.serving.lease(MOVE, self.source.holding)
            token = mint_token()
            await giver.serve(token)
            taker = await lease(self.far.rings, self.far.lanes, MOVE, self.target.holding, writable=True)
            await taker.lane.connect("127.0.0.1", giver.port, token, 5000)
            leased.append(taker)
        self.path = RingPath(
            leased, Stage(self.mine, self.far.pool), Gate(None, 1 << 24).join("m", "S"), self.far.rings
        )

    def batches(self) -> list[list[Span]]:
        return list(batches(self.mine.all_spans(), self.mine.memory.leaf_map, self.path.batch_bytes))

    async def pull_all(self) -> None:
        await asyncio.gather(*(self.path.pull(batch, urgent=True) for batch in self.batches()))

    async def close(self) -> None:
        self.path.abort()
        await self.path.quiet()
        await self.serving.end()
        await self.theirs.close()
        await self.mine.close()


@asynccontextmanager
async def ends(
    lanes: int = 1, *, regions: tuple[Region, ...] = BIG, near: str = "", far: str = ""
) -> AsyncIterator[Ends]:
    nodes = [Node(near), Node(far)]
    for node in nodes:
        await node.pool.start()
    budget = MemoryBudget()
    memories = [Memory(await take(manifest(regions), budget, name)) for name in ("from", "to")]
    rng = np.random.default_rng(3)
    for memory in memories:
        memory.fill(rng)
    made = Ends(nodes, memories)
    try:
        await made.open(lanes)
        yield made
        await made.close()
    finally:
        for node in nodes:
            await node.close()
        for memory in memories:
            memory.close()


@pytest.mark.parametrize("lanes", [1, 3])
async def test_everything_passes_through_the_rings(lanes: int) -> None:
    """Twice over the same rings: what a slot held before doesn't matter."""
    async with ends(lanes) as both:
        gaps = both.target.gaps()
        for seed in (5, 6):
            for region in both.source.regions:
                region[:] = np.random.default_rng(seed).integers(0, 256, region.size, dtype=np.uint8)
            await both.pull_all()
            assert equal(both.source, both.target)
        assert both.target.gaps() == gaps
        await both.path.release()
        assert await both.serving.release() == []
        for node in (both.near, both.far):
            waiting = [leased for _, _, leased in node.lanes.lanes]
            assert waiting == [None] * lanes, "kept for a while"


async def test_a_pull_brings_exactly_its_spans() -> None:
    async with ends() as both:
        before = [region.copy() for region in both.target.regions]
        spans = [Span(3, 32768, 65536), Span(2, 0, 1), Span(5, 7, (9 << 20) + 5), Span(20, 3, 11)]
        await both.path.pull(spans, urgent=False)
        for span in spans:
            before[span.region][span.offset : span.offset + span.length] = both.source.span(span)
        assert all(np.array_equal(a, b) for a, b in zip(before, both.target.regions, strict=True))


@pytest.mark.parametrize("staged", ["source", "destination"])
async def test_one_end_may_stage_without_the_other_knowing(staged: str) -> None:
    """A pull of more than a slot holds, answered through a ring; and a ring filled from plain memory."""
    async with ends() as both:
        plain = both.target if staged == "source" else both.source
        extents = [
            (fd, extent.nbytes) for fd, extent in zip(plain.holding.fds, plain.holding.extents, strict=True)
        ]
        node, places = Node(), regions_of(plain.holding)
        span = Span(5, 0, 20 << 20) if staged == "source" else Span(5, 3, 15 << 20)
        token = mint_token()
        lane = await node.lanes.lease(MOVE, extents, places, writable=staged == "source")
        if staged == "source":
            giver = await both.serving.lease(MOVE, both.source.holding)
            await giver.serve(token)
            await lane.connect("127.0.0.1", giver.port, token, 5000)
            await lane.pull([span])
        else:
            await lane.serve(token)
            taker = await lease(both.far.rings, both.far.lanes, MOVE, both.target.holding, writable=True)
            await taker.lane.connect("127.0.0.1", lane.port, token, 5000)
            path = RingPath(
                [taker], Stage(both.mine, both.far.pool), Gate(None, 1 << 24).join("m", "S"), both.far.rings
            )
            await path.pull([span], urgent=False)
            await path.release()
        assert np.array_equal(both.target.span(span), both.source.span(span))
        await node.close()


async def test_what_does_not_fit_a_slot_is_refused_and_the_lane_goes_on() -> None:
    async with ends() as both:
        with pytest.raises(WorldMoveError, match="slot"):
            await both.path.pull([Span(5, 0, 20 << 20)], urgent=False)
        await both.pull_all()
        assert equal(both.source, both.target)


@pytest.mark.parametrize("side", ["near", "far"])
async def test_a_byte_that_flips_in_a_ring_is_caught_and_sent_again(side: str) -> None:
    faults: dict[str, Any] = {side: "ring-flip-once"}
    async with ends(**faults) as both:
        errors: list[BaseException] = []
        inbound = Inbound(both.mine, both.path, errors.append, lambda _: None)
        await inbound.open()
        table = await both.theirs.table()
        inbound.start_round(1, final=True)
        await both.theirs.read(
            table,
            both.theirs.all_spans(),
            urgent=True,
            on_read=lambda first, count: inbound.plan(
                TablePart(number=1, first=first, digests=table.slice(first, count))
            ),
        )
        await inbound.close_round()
        assert inbound.damaged().size == 1
        assert not equal(both.source, both.target)
        await inbound.repair()
        assert inbound.damaged().size == 0
        assert equal(both.source, both.target)
        assert len(inbound.damages()) == 1
        assert errors == []
        await inbound.stop()


async def test_after_quiet_nothing_is_written_and_rings_are_used_again() -> None:
    """An abort in the middle of many pulls; then memory stands, lanes are gone, and every ring is back."""
    async with ends(2) as both:
        pulls = [asyncio.ensure_future(both.path.pull(batch, urgent=False)) for batch in both.batches()]
        await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        pids = [pid for pid, _, _ in both.far.lanes.lanes]
        both.path.abort()
        await both.path.quiet()
        assert all(gone(pid) for pid in pids)
        assert not both.path._tasks, "a copy into memory is under way"
        stands = [region.copy() for region in both.target.regions]
        await asyncio.wait(pulls)
        for region in both.source.regions:
            region[:] = 0
        await both.mine.read(await both.mine.table(), both.mine.all_spans(), urgent=False)
        assert all(np.array_equal(a, b) for a, b in zip(stands, both.target.regions, strict=True))
        await both.serving.end()
        assert both.near.budget.held == both.far.budget.held == SHAPE.slots * SHAPE.slot_bytes
        ring = await both.far.rings.borrow(["host"])
        assert both.far.budget.held == ring.nbytes
        await both.far.rings.give(ring)


async def test_a_ring_is_given_back_only_when_its_lane_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another move may have it at once: a lane that still ran would write into that one's bytes."""
    async with ends(2) as both:
        pids = [pid for pid, _, _ in both.far.lanes.lanes]
        give, found = both.far.rings.give, []

        async def given(ring: Ring) -> None:
            found.append(all(gone(pid) for pid in pids))
            await give(ring)

        monkeypatch.setattr(both.far.rings, "give", given)
        both.path.abort()
        await both.path.quiet()
        assert found == [True, True]


async def test_cancelled_pulls_go_on_and_keep_their_slots() -> None:
    async with ends() as both:
        for attempt in range(12):
            pulls = [asyncio.ensure_future(both.path.pull(batch, urgent=False)) for batch in both.batches()]
            for _ in range(attempt):
                await asyncio.sleep(0)
            for pull in pulls:
                pull.cancel()
            await asyncio.wait(pulls)
        await both.pull_all()
        assert equal(both.source, both.target)


@pytest.mark.parametrize("victim", ["source lane", "destination lane", "source executor", "far executor"])
async def test_a_part_that_dies_ends_the_pull_with_an_error(victim: str) -> None:
    async with ends() as both:
        pulls = [asyncio.ensure_future(both.path.pull(batch, urgent=True)) for batch in both.batches()]
        if victim == "source executor":
            both.near.pool.abort()
        elif victim == "far executor":
            both.far.pool.abort()
        else:
            [lane] = both.serving._lanes if victim == "source lane" else [both.path._lines[0].lane]
            lane.abort()
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        assert any(isinstance(outcome, WorldMoveError) for outcome in outcomes)


async def test_a_ring_that_does_not_fit_is_refused() -> None:
    node = Node()
    node.rings = Rings(node.pool, MemoryBudget(1 << 20), keep=1)
    await node.pool.start()
    with pytest.raises(NoMemoryError):
        await node.rings.borrow(["host"])
    await node.close()


async def test_a_lane_runs_near_to_the_device_during_its_lease() -> None:
    node = Node()
    await node.pool.start()
    usual = os.sched_getaffinity(0)
    node.rings = Rings(node.pool, node.budget, keep=1, cpus=lambda _: (min(usual),))
    assert node.rings.cpus(["host"]) == ()
    cpus = node.rings.cpus(["GPU-1", "host"])
    ring = await node.rings.borrow(["host"])
    extents = [(ring.fd, ring.nbytes)]
    lane = await node.lanes.lease(MOVE, extents, [LaneRegion(0, 0, 9)], writable=False, ring=SHAPE, cpus=cpus)
    assert os.sched_getaffinity(lane.pid) == {min(usual)}
    await lane.release()
    assert os.sched_getaffinity(lane.pid) == usual
    await node.rings.give(ring)
    await node.close()


def test_loads_hold_every_message_whole_and_in_order() -> None:
    rng = np.random.default_rng(11)
    for _ in range(50):
        lengths = rng.integers(1, 6 << 20, 12).tolist() + rng.integers(1, 5000, 60).tolist()
        rng.shuffle(lengths)
        spans = [Span(int(n % 7), int(rng.integers(0, 1 << 30)), int(size)) for n, size in enumerate(lengths)]
        chunks = list(plan(pack_spans(spans)))
        made = list(loads(iter(chunks), SHAPE.slot_bytes))
        messages = [message for load in made for message in load.messages]
        assert [nbytes for _, nbytes in messages] == [chunk.nbytes for chunk in chunks]
        assert sum(int(load.rows["length"].sum()) for load in made) == sum(lengths)
        for load in made:
            ends_at = 0
            for place, nbytes in load.messages:
                assert place >= ends_at
                assert place % ALIGN == 0
                ends_at = place + nbytes
            assert ends_at <= SHAPE.slot_bytes
        rows = [tuple(row) for load in made for row in load.rows[["region", "offset", "length"]].tolist()]
        found = {(region, at) for region, offset, length in rows for at in (offset, offset + length)}
        wanted = {(span.region, at) for span in spans for at in (span.offset, span.offset + span.length)}
        assert wanted <= found


def test_a_ring_must_have_room_for_its_slots() -> None:
    with pytest.raises(FramingError):
        SlotTable(mmap.mmap(-1, 8 << 20), RingShape(2, 5 << 20), [1])
    table = SlotTable(mmap.mmap(-1, 8 << 20), RingShape(2, 4 << 20), [1])
    with pytest.raises(FramingError):
        table.message(2, 0, 1)
    table.close()
