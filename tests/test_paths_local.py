"""The path between two memories on one host, with real executors."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from inbound_kit import KIB, REGIONS, SEED, Memory, equal, manifest

from worldmove.errors import FramingError, ProcessLostError, ValidationError
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.memory import take
from worldmove.inbound import Inbound
from worldmove.ipc import sealed_memfd
from worldmove.manifest import Span
from worldmove.memory.arena import MemoryBudget
from worldmove.messages import TablePart
from worldmove.paths import LocalPath, ShownTable
from worldmove.reading import Reader


class Ends:
    """Two memories, and the local path between them."""

    def __init__(self, pool: ExecutorPool, source: Memory, target: Memory) -> None:
        self.pool = pool
        self.source = source
        self.target = target
        self.theirs = Reader(source.holding, pool, SEED)
        self.mine = Reader(target.holding, pool, SEED)
        self.path = LocalPath(self.theirs, self.mine)

    def all(self) -> list[Span]:
        return self.mine.all_spans()


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    pool = ExecutorPool(2, nice=0)
    await pool.start()
    budget = MemoryBudget()
    memories = [Memory(await take(manifest(), budget, name)) for name in ("from", "to")]
    rng = np.random.default_rng(1)
    for memory in memories:
        memory.fill(rng)
    made = Ends(pool, *memories)
    await made.theirs.open(writable=False)
    await made.mine.open()
    yield made
    await made.theirs.close()
    await made.mine.close()
    await pool.close()
    for memory in memories:
        memory.close()


async def test_a_pull_brings_exactly_its_spans(ends: Ends) -> None:
    gaps, before = ends.target.gaps(), [region.copy() for region in ends.target.regions]
    spans = [Span(3, 32 * KIB, 64 * KIB), Span(2, 0, 1), Span(4, 64 * KIB * 3, 17)]
    await ends.path.pull(spans, urgent=False)
    for span in spans:
        assert np.array_equal(ends.target.span(span), ends.source.span(span))
        before[span.region][span.offset : span.offset + span.length] = ends.source.span(span)
    assert all(np.array_equal(a, b) for a, b in zip(before, ends.target.regions, strict=True))
    assert ends.target.gaps() == gaps


async def test_many_pulls_at_once(ends: Ends) -> None:
    await asyncio.gather(*(ends.path.pull([span], urgent=True) for span in ends.all()))
    assert equal(ends.source, ends.target)
    await ends.path.release()
    with pytest.raises((ValidationError, IndexError)):
        await ends.path.pull(ends.all(), urgent=False)


async def test_after_an_abort_nothing_is_copied(ends: Ends) -> None:
    ends.path.abort()
    with pytest.raises(asyncio.CancelledError):
        await ends.path.pull(ends.all(), urgent=False)
    await ends.path.quiet()
    assert not equal(ends.source, ends.target)


async def test_quiet_means_that_nothing_writes_any_more(ends: Ends) -> None:
    """Pulls that were cancelled go on in the executors: `quiet` waits for them, and then memory stands."""
    spans = ends.all()
    for attempt in range(10):
        pulls = [asyncio.ensure_future(ends.path.pull([span], urgent=False)) for span in spans]
        for _ in range(attempt):
            await asyncio.sleep(0)
        for pull in pulls:
            pull.cancel()
        await asyncio.wait(pulls)
    ends.path.abort()
    await ends.path.quiet()
    stands = [region.copy() for region in ends.target.regions]
    for region in ends.source.regions:
        region[:] = 0
    # Executors work in order: when they have digested everything, nothing older is left.
    await ends.mine.read(await ends.mine.table(), ends.all(), urgent=False)
    assert all(np.array_equal(a, b) for a, b in zip(stands, ends.target.regions, strict=True))
    await ends.mine.fill(0)
    assert not any(region.any() for region in ends.target.regions)


async def test_quiet_waits_for_a_copy_whose_caller_is_gone(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def copy(*_: object, **__: object) -> None:
        begun.set()
        await go.wait()

    monkeypatch.setattr(ends.mine, "copy_from", copy)
    pull = asyncio.ensure_future(ends.path.pull(ends.all(), urgent=False))
    await begun.wait()
    pull.cancel()
    await asyncio.wait([pull])
    ends.path.abort()
    quiet = asyncio.ensure_future(ends.path.quiet())
    await asyncio.wait([quiet], timeout=0.1)
    assert not quiet.done()
    go.set()
    await quiet


async def test_quiet_without_a_pull_returns_and_unmaps(ends: Ends) -> None:
    ends.path.abort()
    await ends.path.quiet()
    await ends.path.quiet()


async def test_executors_that_die_fail_the_pull_and_do_not_hang_quiet(ends: Ends) -> None:
    ends.pool.abort()
    with pytest.raises(ProcessLostError):
        await ends.path.pull(ends.all(), urgent=True)
    ends.path.abort()
    async with asyncio.timeout(10):
        await ends.path.quiet()


async def test_the_sources_memory_cannot_be_written(ends: Ends) -> None:
    with pytest.raises(ValidationError, match="read-only"):
        await ends.theirs.copy_from(ends.mine, ends.all(), urgent=False)
    with pytest.raises(ValidationError, match="read-only"):
        await ends.theirs.fill(0)


async def test_a_whole_move_over_the_local_path(ends: Ends) -> None:
    errors: list[BaseException] = []
    landed: list[int] = []
    inbound = Inbound(ends.mine, ends.path, errors.append, landed.append)
    await inbound.open()
    inbound.start_round(1, final=False)
    await inbound.close_round()
    ends.source.regions[0][77] ^= 1
    ends.target.regions[3][99] ^= 1
    table = await ends.theirs.table()
    inbound.start_round(2, final=True)
    await ends.theirs.read(
        table,
        ends.theirs.all_spans(),
        urgent=True,
        on_read=lambda first, count: inbound.plan(
            TablePart(number=2, first=first, digests=table.slice(first, count))
        ),
    )
    count = await inbound.close_round()
    assert count.leaves == 1
    assert inbound.damaged().size == 1
    await inbound.repair()
    assert inbound.damaged().size == 0
    assert equal(ends.source, ends.target)
    assert sum(landed) == ends.source.holding.manifest.nbytes + count.bytes + inbound.repair_bytes
    assert [damage.region for damage in inbound.damages()] == ["v"]
    assert errors == []


async def test_a_table_that_is_shown_is_read_where_it_lies(ends: Ends) -> None:
    errors: list[BaseException] = []
    table = await ends.theirs.table()
    ends.path.shown = ShownTable(os.dup(table.fd), table.count)
    inbound = Inbound(ends.mine, ends.path, errors.append, lambda _nbytes: None)
    await inbound.open()
    inbound.start_round(1, final=False)
    await inbound.close_round()
    ends.source.regions[0][77] ^= 1
    inbound.start_round(2, final=True)
    await ends.theirs.read(
        table,
        ends.theirs.all_spans(),
        urgent=True,
        on_read=lambda first, count: inbound.plan(TablePart(number=2, first=first, shown=count)),
    )
    table.rows[:] = 0  # what was looked at counts, and nobody looks twice
    assert (await inbound.close_round()).leaves == 1
    assert inbound.damaged().size == 0
    assert equal(ends.source, ends.target)
    assert errors == []
    await ends.path.release()


async def test_a_table_that_is_shown_is_never_read_outside(ends: Ends) -> None:
    inbound = Inbound(ends.mine, ends.path, lambda _error: None, lambda _nbytes: None)
    await inbound.open()
    inbound.start_round(1, final=True)
    with pytest.raises(ValidationError, match="not offered"):
        inbound.plan(TablePart(number=1, first=0, shown=1))
    shown = ShownTable(sealed_memfd("table", 5 * 16), 5)
    assert shown.rows(0, 5) == bytes(5 * 16)
    with pytest.raises(FramingError, match="table of 5"):
        shown.rows(4, 2)
    shown.close()
    shown.close()
    await inbound.stop()


async def test_a_table_that_the_system_does_not_read_ends_the_move_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad memory under it, a file that ends although it is sealed: what no system should do."""
    shown = ShownTable(sealed_memfd("table", 5 * 16), 5)

    def poisoned(*_args: int) -> bytes:
        raise OSError(errno.EIO, "the page is poisoned")

    for read, reason in [(poisoned, "cannot be read"), (lambda *_: bytes(16), "ends before leaf 2")]:
        monkeypatch.setattr(os, "pread", read)
        with pytest.raises(FramingError, match=reason):
            shown.rows(0, 2)
    monkeypatch.undo()
    shown.close()


async def test_what_is_planned_beforehand_is_copied_and_read_back_in_the_pause(ends: Ends) -> None:
    """What the source writes until it stops comes, too: the plan holds no bytes."""
    errors: list[BaseException] = []
    landed: list[int] = []
    inbound = Inbound(ends.mine, ends.path, errors.append, landed.append)
    assert ends.path.at_once
    await inbound.open(arm=True)
    ends.source.regions[0][77] ^= 1
    inbound.start_round(1, final=True)
    table = await ends.theirs.table()
    await ends.theirs.read(table, ends.theirs.all_spans(), urgent=True)
    inbound.plan(TablePart(number=1, first=0, digests=table.slice(0, table.count)))
    await inbound.close_round()
    assert inbound.damaged().size == 0
    assert equal(ends.source, ends.target)
    assert sum(landed) == ends.source.holding.manifest.nbytes
    assert errors == []


async def test_reading_reports_every_leaf_once_and_knows_them_then(ends: Ends) -> None:
    table = await ends.theirs.table()
    seen = np.zeros(table.count, dtype=np.int64)

    def note(first: int, count: int) -> None:
        assert table.known[first : first + count].all()
        seen[first : first + count] += 1

    await ends.theirs.read(table, ends.theirs.all_spans(), urgent=False, on_read=note)
    assert (seen == 1).all()
    assert seen.size == sum(region.leaves for region in REGIONS)
    await ends.theirs.read(table, [], urgent=False, on_read=note)
    assert (seen == 1).all()
