"""What is worked out before it is needed: roots, sizes, plans; and that it never replaces a reading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
import pytest_asyncio
from executor_kit import executors
from inbound_kit import REGIONS, Bench, bench

from worldmove.errors import ValidationError
from worldmove.executor.pool import ExecutorPool
from worldmove.inbound import World, bytes_before
from worldmove.manifest import LeafMap, Region, Span
from worldmove.messages import TablePart

WORLD = World("world", 3, 12, (b"state",))


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[ExecutorPool]:
    async with executors(2) as made:
        yield made


@pytest_asyncio.fixture
async def both(pool: ExecutorPool) -> AsyncIterator[Bench]:
    async with bench(pool) as both:
        yield both


async def test_a_foreseen_root_is_the_one_that_is_found(both: Bench) -> None:
    await both.round(1, final=True)
    await both.inbound.foresee(WORLD)
    assert both.inbound.damaged().size == 0
    foreseen = await both.inbound.root(WORLD)
    assert foreseen == await both.root(WORLD)
    assert await both.inbound.root(WORLD._replace(block=13)) != foreseen


async def test_a_root_foreseen_for_other_bytes_than_those_in_memory_is_not_used(both: Bench) -> None:
    async def spoil(spans: list[Span]) -> None:
        if any((span.region, span.offset) == (0, 0) for span in spans):
            both.target.regions[0][0] ^= 1

    both.path.hook = spoil
    await both.round(1, final=True)
    await both.inbound.foresee(WORLD)
    foreseen = await both.root(WORLD)
    assert both.inbound._foreseen == (WORLD, foreseen)
    assert both.inbound.damaged().tolist() == [0]
    assert await both.inbound.root(WORLD) != foreseen


async def test_a_plan_is_refused_once_its_memory_is_detached(pool: ExecutorPool, both: Bench) -> None:
    plan = both.theirs.plan_read(both.table, both.theirs.all_spans())
    await both.theirs.prepare(plan)
    await both.theirs.close()
    with pytest.raises(ValidationError):
        await both.theirs.perform(plan, urgent=True)


@pytest.mark.parametrize(
    "regions",
    [REGIONS, (Region("none", "uint8", (0,)),), (Region("a", "uint8", (7,)), Region("b", "uint8", (0,)))],
)
def test_bytes_between_leaves(regions: tuple[Region, ...]) -> None:
    leaf_map = LeafMap(regions)
    rng = np.random.default_rng(1)
    cuts = sorted({0, leaf_map.count, *rng.integers(0, leaf_map.count + 1, 20).tolist()})
    for first, stop in pairwise(cuts):
        wanted = sum(span.length for span in leaf_map.spans(first, stop - first))
        assert bytes_before(leaf_map, stop) - bytes_before(leaf_map, first) == wanted
    assert bytes_before(leaf_map, leaf_map.count) == sum(region.nbytes for region in regions)


async def test_rows_compared_as_they_land_come_once_in_a_round(both: Bench) -> None:
    await both.round(1, final=True)
    inbound = both.inbound
    for first in range(0, inbound._own.count, 7):
        inbound._note_landed(first, min(7, inbound._own.count - first))
    assert inbound._proven.all()
    assert inbound.damaged().size == 0
    parts = await both.parts(1)
    with pytest.raises(ValidationError, match="came before"):
        inbound.plan(TablePart(number=1, first=parts[0].first, digests=bytes(len(parts[0].digests))))
    assert inbound._proven.all()
    assert inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1


async def test_rows_that_differ_are_not_proven(both: Bench) -> None:
    await both.round(1, final=True)
    both.inbound._own.rows[3, 1] ^= np.uint64(1)
    both.inbound._note_landed(0, both.inbound._own.count)
    assert both.inbound.damaged().tolist() == [3]
