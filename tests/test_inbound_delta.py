"""A round that moves leaves about at the destination: real executors copy, the path brings the rest.

On host memory, and on GPUs that are imagined (tests/fake_gpu): there the runs of a launch are worked on in
the reverse of their order, as no order may be relied on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from inbound_kit import Bench, equal
from moving_kit import (
    LEAF,
    LEAVES,
    PLACES,
    STATE,
    Change,
    exchange,
    fresh,
    moved_once,
    permute,
    pools,
    rewrite,
    ring,
    shift,
    shift_with_sink,
    zeros,
)

from worldmove.errors import ConnectionLostError, ValidationError
from worldmove.executor.devices import Executors
from worldmove.manifest import Span
from worldmove.messages import TablePart

# Starting executors takes longer than most of these tests: one set for all of those of a kind.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["host", "gpu"])
def devices(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return PLACES[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executors(devices: tuple[str, ...]) -> AsyncIterator[Executors]:
    async with pools(devices) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def both(executors: Executors, devices: tuple[str, ...]) -> AsyncIterator[Bench]:
    async with moved_once(executors, devices) as made:
        yield made


PATTERNS: list[tuple[Change, int, int]] = [
    (shift, 3 * (LEAVES - 4), 12),
    (shift_with_sink, 3 * (LEAVES - 10), 12),
    (ring, 0, 12),
    (zeros, 0, 2 + LEAVES),
    (exchange, 2 * LEAVES, 0),
    (rewrite, 0, 3 * LEAVES),
]


@pytest.mark.parametrize("final", [False, True], ids=["live", "paused"])
@pytest.mark.parametrize(("change", "copied", "sent"), PATTERNS, ids=[each[0].__name__ for each in PATTERNS])
async def test_a_round_sends_what_is_new_and_copies_what_has_moved(
    both: Bench, change: Change, copied: int, sent: int, *, final: bool
) -> None:
    gaps = both.target.gaps()
    change(both, np.random.default_rng(1))
    assert await both.round(2, final=final) == (sent, sent * LEAF)
    assert both.inbound.count.copied_bytes == copied * LEAF
    assert both.inbound.kept_bytes == STATE - (copied + sent) * LEAF
    assert both.path.pulled() == sent * LEAF
    assert equal(both.source, both.target)
    assert both.target.gaps() == gaps
    if not final:
        assert await both.round(3, final=True) == (0, 0)
    assert both.inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1
    assert both.errors == []


async def test_leaves_in_any_order_are_copied_once_around(both: Bench) -> None:
    permute(both, np.random.default_rng(2))
    assert await both.round(2, final=True) == (0, 0)
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1


@pytest.mark.parametrize("devices", ["host", "gpu", "mixed"], indirect=True)
async def test_many_rounds_of_everything_end_with_the_sources_bytes(both: Bench) -> None:
    rng = np.random.default_rng(3)
    changes: list[Change] = [change for change, *_ in PATTERNS] + [permute]
    for number in range(2, 14):
        for choice in rng.integers(0, len(changes), int(rng.integers(1, 3))).tolist():
            changes[choice](both, rng)
        await both.round(number, final=number == 13)
        if number < 13 and rng.integers(2):
            await both.inbound.shift_ahead()
            continue
        assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0
    assert len(set(await both.roots())) == 1


async def test_content_that_left_and_came_back_is_sent_once_more_and_right(both: Bench) -> None:
    """It is gone from the destination meanwhile: what is copied is what is there, not what was once."""
    rng = np.random.default_rng(14)
    before = [region.copy() for region in both.source.regions]
    rewrite(both, rng)
    await both.round(2, final=False)
    for region, old in zip(both.source.regions, before, strict=True):
        region[:] = old
    both.source.regions[1][: 4 * LEAF] = both.source.regions[0][4 * LEAF : 8 * LEAF]
    leaves, _ = await both.round(3, final=True)
    assert leaves == 3 * LEAVES
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_a_cache_that_moves_on_in_every_round_sends_each_block_once(both: Bench) -> None:
    rng = np.random.default_rng(4)
    for number in range(2, 8):
        shift_with_sink(both, rng)
        await both.round(number, final=number == 7)
        assert both.path.pulled() == 12 * LEAF
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_a_world_that_rewrites_itself_does_not_wait_for_the_whole_table(both: Bench) -> None:
    rng = np.random.default_rng(5)
    rewrite(both, rng)
    await both.round(2, final=False)
    rewrite(both, rng)
    both.inbound.start_round(3, final=True)
    parts = await both.parts(3)
    both.inbound.plan(parts[0])
    assert both.inbound.count.leaves == len(parts[0].digests) // 16
    for part in parts[1:]:
        both.inbound.plan(part)
    await both.inbound.close_round()
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_what_moved_within_its_region_is_planned_region_by_region(both: Bench) -> None:
    rng = np.random.default_rng(12)
    shift(both, rng)
    await both.round(2, final=False)
    shift(both, rng)
    both.inbound.start_round(3, final=True)
    parts = await both.parts(3)
    for part in parts[: -(-LEAVES // 5)]:
        both.inbound.plan(part)
    assert both.inbound._rearranger.copied_bytes == (LEAVES - 4) * LEAF
    for part in parts[-(-LEAVES // 5) :]:
        both.inbound.plan(part)
    await both.inbound.close_round()
    assert both.inbound.count.leaves == 12
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_what_crosses_regions_after_all_is_sent_and_right(both: Bench) -> None:
    """Planned apart, a region takes nothing from another one."""
    rng = np.random.default_rng(13)
    shift(both, rng)
    await both.round(2, final=False)
    exchange(both, rng)
    leaves, _ = await both.round(3, final=True)
    assert leaves == 2 * LEAVES
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_haste_ends_with_the_first_leaf_that_lies_elsewhere(both: Bench) -> None:
    """What was asked for too soon is no longer taken from, and sent: it costs bytes."""
    rng = np.random.default_rng(6)
    rewrite(both, rng)
    await both.round(2, final=False)
    both.source.regions[0][: 8 * LEAF] = fresh(rng, 8 * LEAF)
    first, second = both.source.regions[1], both.source.regions[2]
    first[:], second[:] = second.copy(), first.copy()
    leaves, _ = await both.round(3, final=True)
    assert leaves == 8
    assert both.inbound.count.copied_bytes == 2 * LEAVES * LEAF
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_a_round_that_failed_in_the_middle_leaves_nothing_that_the_next_one_trusts(both: Bench) -> None:
    rng = np.random.default_rng(70)
    shift(both, rng)
    failed = ConnectionLostError("the lane died")

    async def fail(_spans: list[Span]) -> None:
        for region in both.target.regions:
            region[-2 * LEAF :] = 0xEE
        raise failed

    both.path.hook = fail
    await both.round(2, final=False)
    assert set(both.errors) == {failed}
    both.path.hook = None
    shift(both, rng)
    await both.round(3, final=True)
    assert both.inbound.damaged().size == 0
    assert equal(both.source, both.target)


async def test_stopping_while_leaves_move_leaves_no_row_that_lies(both: Bench) -> None:
    rng = np.random.default_rng(8)
    shift_with_sink(both, rng)
    exchange(both, rng)
    both.inbound.start_round(2, final=False)
    for part in await both.parts(2):
        both.inbound.plan(part)
    await asyncio.sleep(0)
    await both.inbound.stop()
    for (_, device), key in both.mine._keys.items():
        await both.pool.of(device).settle(key)
    await both.round(3, final=True)
    assert both.inbound.damaged().size == 0
    assert equal(both.source, both.target)


async def test_what_was_copied_is_read_where_it_lies_now(both: Bench) -> None:
    """A kept leaf flips in memory and is copied on: the row of its old place would not tell."""
    shift(both, np.random.default_rng(9))
    both.target.regions[0][20 * LEAF + 5] ^= 1
    await both.round(2, final=True)
    assert both.inbound.damaged().tolist() == [16]
    await both.inbound.repair()
    assert both.inbound.damaged().size == 0
    assert both.inbound.repair_bytes == LEAF
    assert equal(both.source, both.target)
    assert len(set(await both.roots())) == 1


async def test_a_damage_carried_on_by_a_live_copy_is_found_in_the_pause(both: Bench) -> None:
    shift(both, np.random.default_rng(10))
    both.target.regions[0][20 * LEAF + 5] ^= 1
    await both.round(2, final=False)
    await both.round(3, final=True)
    assert both.inbound.damaged().tolist() == [16]


async def test_a_part_after_a_complete_table_is_refused(both: Bench) -> None:
    shift(both, np.random.default_rng(11))
    both.inbound.start_round(2, final=True)
    parts = await both.parts(2)
    for part in parts:
        both.inbound.plan(part)
    with pytest.raises(ValidationError, match="came before"):
        both.inbound.plan(TablePart(number=2, first=0, digests=parts[0].digests))
    await both.inbound.close_round()
    assert equal(both.source, both.target)
