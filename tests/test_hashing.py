"""Hashes of a table's regions, while it fills and afterwards, by real executors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from executor_kit import executors
from inbound_kit import REGIONS, Bench, bench

from worldmove import hashing
from worldmove.digest import LeafTable
from worldmove.errors import ProcessLostError, ValidationError
from worldmove.executor.pool import ExecutorPool
from worldmove.hashing import RegionHashes

GRAIN = 5


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[ExecutorPool]:
    async with executors(2) as made:
        yield made


@pytest_asyncio.fixture
async def both(pool: ExecutorPool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """Tables of any size count as large ones."""
    monkeypatch.setattr("worldmove.reading.INLINE_BYTES", 0)
    monkeypatch.setattr(hashing, "GRAIN_LEAVES", GRAIN)
    async with bench(pool) as made:
        yield made


async def table_of(both: Bench) -> LeafTable:
    table = await both.theirs.table()
    table.rows[:] = np.random.default_rng(1).integers(0, 1 << 63, table.rows.shape, dtype=np.uint64)
    return table


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_regions_are_hashed_as_the_table_fills(both: Bench, step: int) -> None:
    table = await table_of(both)
    wanted = table.hashes(both.theirs._edges)
    hashes = RegionHashes(both.theirs, table)
    begun = 0
    for first in range(0, table.count, step):
        hashes.note(first, min(step, table.count - first))
        begun = max(begun, int(hashes._begun.sum()))
    assert begun >= len(REGIONS) - 1 - (GRAIN if step < GRAIN else 0)
    assert await hashes.all() == wanted
    assert await hashes.all() == wanted


async def test_who_noted_nothing_gets_all_the_same(both: Bench) -> None:
    table = await table_of(both)
    assert await RegionHashes(both.theirs, table).all() == table.hashes(both.theirs._edges)
    lazy = RegionHashes(both.theirs, table, at_once=False)
    lazy.note(0, table.count)
    assert not lazy._begun.any()
    assert await lazy.all() == table.hashes(both.theirs._edges)


async def test_rows_are_noted_once(both: Bench) -> None:
    table = await table_of(both)
    hashes = RegionHashes(both.theirs, table)
    hashes.note(0, 2)
    with pytest.raises(ValidationError, match="came before"):
        hashes.note(1, 2)
    hashes.note(2, table.count - 2)
    assert await hashes.all() == table.hashes(both.theirs._edges)


async def test_a_pool_that_ends_fails_whoever_asks_and_nobody_else(both: Bench, pool: ExecutorPool) -> None:
    table = await table_of(both)
    hashes, forgotten = RegionHashes(both.theirs, table), RegionHashes(both.theirs, table)
    pool.abort()
    forgotten.note(0, table.count)
    hashes.note(0, table.count)
    with pytest.raises(ProcessLostError):
        await hashes.all()
