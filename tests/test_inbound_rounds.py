"""The destination's memory during a move: real executors digest it, damage is found and repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from executor_kit import executors
from inbound_kit import KIB, REGIONS, Bench, bench, equal

from worldmove.errors import ConnectionLostError, ProcessLostError, ValidationError
from worldmove.executor.pool import ExecutorPool
from worldmove.inbound import World
from worldmove.manifest import Region, Span
from worldmove.messages import DamagedLeaf, TablePart


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[ExecutorPool]:
    async with executors(1) as made:
        yield made


@pytest_asyncio.fixture
async def both(pool: ExecutorPool) -> AsyncIterator[Bench]:
    async with bench(pool) as made:
        yield made


def leaf_of(both: Bench, region: int, leaf: int) -> int:
    return int(both.source.holding.leaf_map.first[region]) + leaf


async def test_the_first_round_asks_for_everything_without_a_table(both: Bench) -> None:
    gaps = both.target.gaps()
    total = both.source.holding.manifest.nbytes
    leaves, nbytes = await both.round(1, final=False, table=False)
    assert (leaves, nbytes) == (both.source.holding.leaf_map.count, total)
    assert both.landed == both.path.pulled() == total
    assert equal(both.source, both.target)
    assert both.target.gaps() == gaps
    assert both.errors == []
    assert not any(both.path.urgent)


async def test_a_move_that_was_not_live_is_one_final_round(both: Bench) -> None:
    leaves, nbytes = await both.round(1, final=True)
    assert (leaves, nbytes) == (both.source.holding.leaf_map.count, both.source.holding.manifest.nbytes)
    assert both.inbound.damaged().size == 0
    assert all(both.path.urgent)
    source, destination = await both.roots()
    assert source == destination
    assert both.inbound.kept_bytes == 0
    assert both.inbound.damages() == ()


async def test_later_rounds_bring_only_what_has_changed(both: Bench) -> None:
    await both.round(1, final=False, table=False)
    both.path.pulled()
    both.source.regions[0][5] ^= 1
    both.source.regions[4][-1] ^= 1
    leaves, nbytes = await both.round(2, final=False)
    first = int(both.source.holding.leaf_map.leaf_bytes[0])
    assert leaves == 2
    assert nbytes == both.path.pulled() == first + 17
    both.source.regions[3][:] ^= 255
    leaves, nbytes = await both.round(3, final=True)
    assert nbytes == both.source.regions[3].size
    assert leaves == REGIONS[3].leaves
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1
    assert both.inbound.kept_bytes == both.source.holding.manifest.nbytes - nbytes


async def test_nothing_changed_is_nothing_sent(both: Bench) -> None:
    await both.round(1, final=False, table=False)
    both.path.pulled()
    assert await both.round(2, final=False) == (0, 0)
    assert await both.round(3, final=True) == (0, 0)
    assert both.path.pulls == []
    assert both.inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1


async def test_a_world_that_writes_while_it_is_copied_arrives_whole(both: Bench) -> None:
    """Every live batch is torn: the world writes into its leaves right after they were copied."""

    async def write(spans: list[Span]) -> None:
        for span in spans:
            both.source.span(span)[0] ^= 1

    both.path.hook = write
    await both.round(1, final=False, table=False)
    leaves, _ = await both.round(2, final=False)
    assert leaves > 0
    both.path.hook = None
    await both.round(3, final=True)
    assert both.inbound.damaged().size == 0
    assert equal(both.source, both.target)
    assert len(set(await both.roots())) == 1


async def test_damage_on_arrival_is_found_and_repaired(both: Bench) -> None:
    """A bit flips after it has landed and before it is read back."""
    wrong = Span(0, 0, 1)

    async def flip(spans: list[Span]) -> None:
        for span in spans:
            if span.region == wrong.region and span.offset == 0 and not flipped:
                both.target.span(span)[3] ^= 4
                flipped.append(span)

    flipped: list[Span] = []
    both.path.hook = flip
    await both.round(1, final=True)
    assert both.inbound.damaged().tolist() == [leaf_of(both, 0, 0)]
    source, destination = await both.roots()
    assert source != destination
    both.path.pulled()
    await both.inbound.repair()
    assert both.path.pulled() == REGIONS[0].leaf_bytes == both.inbound.repair_bytes
    assert both.inbound.count.bytes == both.source.holding.manifest.nbytes
    assert both.inbound.kept_bytes == 0
    assert both.inbound.damaged().size == 0
    assert both.inbound.damages() == (DamagedLeaf("k", 0, 1),)
    assert equal(both.source, both.target)
    assert len(set(await both.roots())) == 1


async def test_damage_that_stays_is_counted(both: Bench) -> None:
    async def flip(spans: list[Span]) -> None:
        for span in spans:
            if span.region == 4:
                both.target.regions[4][-1] ^= 1

    both.path.hook = flip
    await both.round(1, final=True)
    last = REGIONS[4].leaves - 1
    for attempt in (1, 2, 3):
        assert both.inbound.damaged().tolist() == [leaf_of(both, 4, last)]
        await both.inbound.repair()
        assert both.inbound.damages() == (DamagedLeaf("odd", last, attempt),)
    assert both.inbound.damaged().size == 1


@pytest.mark.parametrize(("region", "byte"), [(0, 0), (2, 0), (3, 40_000), (4, -1)])
async def test_a_kept_leaf_that_flips_in_memory_before_the_last_round_is_found(
    both: Bench, region: int, byte: int
) -> None:
    """Nothing asks for it again: only reading the kept memory once more can find it."""
    await both.round(1, final=False, table=False)
    await both.round(2, final=False)
    both.target.regions[region][byte] ^= 32
    assert await both.round(3, final=True) == (0, 0)
    (wrong,) = both.inbound.damaged().tolist()
    await both.inbound.repair()
    assert both.inbound.damaged().size == 0
    (found,) = both.inbound.damages()
    assert found.region == REGIONS[region].name
    assert wrong == leaf_of(both, region, found.leaf)
    assert equal(both.source, both.target)
    assert len(set(await both.roots())) == 1


async def test_a_leaf_written_by_somebody_else_while_it_was_kept_is_not_trusted(both: Bench) -> None:
    """The same in a live round is only found at the end: live rounds do not read what they keep."""
    await both.round(1, final=False, table=False)
    both.target.regions[3][:] = 0
    assert await both.round(2, final=False) == (0, 0)
    assert await both.round(3, final=True) == (0, 0)
    assert both.inbound.damaged().size == REGIONS[3].leaves


async def test_a_table_with_a_hole_never_verifies(both: Bench) -> None:
    both.inbound.start_round(1, final=True)
    parts = await both.parts(1)
    for part in parts[:-1]:
        both.inbound.plan(part)
    await both.inbound.close_round()
    missing = len(parts[-1].digests) // 16
    assert both.inbound.damaged().size == missing
    await both.inbound.repair()
    assert both.inbound.damaged().size == missing


async def test_a_table_of_lies_never_verifies(both: Bench) -> None:
    both.inbound.start_round(1, final=True)
    count = both.source.holding.leaf_map.count
    both.inbound.plan(TablePart(number=1, first=0, digests=bytes(16) * count))
    await both.inbound.close_round()
    assert both.inbound.damaged().size == count


async def test_an_old_rounds_table_does_not_count_in_the_next(both: Bench) -> None:
    await both.round(1, final=False)
    both.inbound.start_round(2, final=True)
    await both.inbound.close_round()
    assert both.inbound.damaged().size == both.source.holding.leaf_map.count


@pytest.mark.parametrize(("first", "count"), [(10_000, 1), (0, 10_000), (1 << 40, 1)])
async def test_a_part_outside_the_session_is_refused(both: Bench, first: int, count: int) -> None:
    both.inbound.start_round(1, final=True)
    with pytest.raises(ValidationError):
        both.inbound.plan(TablePart(number=1, first=first, digests=bytes(16) * count))
    await both.inbound.close_round()


async def test_the_path_is_never_asked_for_more_than_its_width(pool: ExecutorPool) -> None:
    async with bench(pool, batch_bytes=8 * KIB, width=3) as both:
        gate = asyncio.Event()

        async def wait(_spans: list[Span]) -> None:
            await gate.wait()

        both.path.hook = wait
        both.inbound.start_round(1, final=False)
        closing = asyncio.ensure_future(both.inbound.close_round())
        for _ in range(50):
            await asyncio.sleep(0)
        assert both.path.under_way == both.path.most == 3
        gate.set()
        await closing
        assert both.path.most == 3
        assert both.path.under_way == 0
        assert equal(both.source, both.target)


async def test_a_failing_path_is_an_error_and_the_round_still_ends(both: Bench) -> None:
    async def fail(_spans: list[Span]) -> None:
        raise ConnectionLostError("the lane died")

    both.path.hook = fail
    both.inbound.start_round(1, final=True)
    for part in await both.parts(1):
        both.inbound.plan(part)
    await both.inbound.close_round()
    assert both.errors
    assert all(isinstance(error, ConnectionLostError) for error in both.errors)
    assert both.inbound.damaged().size == both.source.holding.leaf_map.count


async def test_stop_ends_everything_in_the_middle(both: Bench) -> None:
    both.path.hook = lambda _spans: asyncio.Event().wait()  # type: ignore[assignment,return-value]
    both.inbound.start_round(1, final=True)
    closing = asyncio.ensure_future(both.inbound.close_round())
    for _ in range(10):
        await asyncio.sleep(0)
    assert both.path.under_way > 0
    await both.inbound.stop()
    await closing
    assert both.path.under_way == 0
    assert both.errors == []


async def test_an_executor_that_dies_is_an_error_not_a_digest(both: Bench, pool: ExecutorPool) -> None:
    await both.round(1, final=False, table=False)
    pool.abort()
    both.inbound.start_round(2, final=True)
    await both.inbound.close_round()
    assert [type(error) for error in both.errors] == [ProcessLostError]


@pytest.mark.parametrize(
    "regions",
    [
        (),
        (Region("zero", "float32", (0,)),),
        (Region("one", "uint8", (1,)),),
        tuple(Region(f"r{number}", "uint8", (number % 5,), rank=number % 2) for number in range(600)),
    ],
    ids=["no region", "no byte", "one byte", "many on two ranks"],
)
async def test_odd_sessions(pool: ExecutorPool, regions: tuple[Region, ...]) -> None:
    async with bench(pool, regions) as both:
        gaps = both.target.gaps()
        await both.round(1, final=False, table=False)
        for region in both.source.regions[::7]:
            region[:] ^= 1
        await both.round(2, final=True)
        assert both.inbound.damaged().size == 0
        assert equal(both.source, both.target)
        assert both.target.gaps() == gaps
        assert len(set(await both.roots())) == 1


async def test_the_root_covers_every_byte_and_the_host_state(both: Bench) -> None:
    await both.round(1, final=True)
    fields = {"session_id": "world", "epoch": 3, "block": 12}
    root = await both.inbound.root(World(**fields, host_states=(b"state",)))  # type: ignore[arg-type]
    others = {
        await both.inbound.root(World(**fields, host_states=states))  # type: ignore[arg-type]
        for states in ((b"statf",), (), (b"state", b""))
    }
    assert len({root, *others}) == 4
    assert len(root) == 64


async def test_random_rounds_always_arrive(pool: ExecutorPool) -> None:
    """Many small sessions with random writes and random damage between the rounds."""
    rng = np.random.default_rng(3)
    for _ in range(6):
        async with bench(pool, batch_bytes=int(rng.integers(1, 400 * KIB)), width=2) as both:
            last = int(rng.integers(2, 5))
            await both.round(1, final=False, table=False)
            for number in range(2, last + 1):
                for _ in range(int(rng.integers(0, 4))):
                    region = both.source.regions[int(rng.choice([0, 2, 3, 4]))]
                    region[int(rng.integers(0, region.size))] ^= 1
                memory = both.target.regions[int(rng.choice([0, 2, 3, 4]))]
                memory[int(rng.integers(0, memory.size))] ^= 1
                await both.round(number, final=number == last)
            for _ in range(3):
                if both.inbound.damaged().size:
                    await both.inbound.repair()
            assert both.inbound.damaged().size == 0
            assert equal(both.source, both.target)
            assert len(set(await both.roots())) == 1
            assert both.errors == []
