"""What moves ahead of a pause, and how leaves move on GPUs that have room for a scratch, or none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf

import numpy as np
import pytest
import pytest_asyncio
from gpu_kit import GPUS
from inbound_kit import Bench, equal
from moving_kit import LEAF, LEAVES, PLACES, STATE, exchange, fresh, moved_once, pools, shift

from worldmove.delta.finding import Index
from worldmove.errors import NoMemoryError
from worldmove.executor.devices import Executors

# As in test_inbound_delta: one set of executors for all tests of a kind.
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


@pytest.mark.parametrize("sink", [0, 6])
@pytest.mark.parametrize("by", [1, 4])
async def test_a_shift_that_was_foreseen_leaves_less_to_the_pause(both: Bench, by: int, sink: int) -> None:
    """Of what has moved by strides one more is made before anybody waits; what is left is found as always."""
    rng = np.random.default_rng(17)
    gaps = both.target.gaps()
    for number in (2, 3, 4):
        shift(both, rng, sink=sink, by=by)
        leaves, _ = await both.round(number, final=number == 4)
        assert leaves == 3 * by
        if number == 2 or by > 1:
            assert both.inbound.count.copied_bytes == 3 * (LEAVES - by - sink) * LEAF
        else:
            assert both.inbound.count.copied_bytes == 0
            assert both.inbound.kept_bytes == STATE - 3 * LEAF
        if number < 4:
            await both.inbound.shift_ahead()
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0
    assert both.target.gaps() == gaps
    assert len(set(await both.roots())) == 1


@pytest.mark.parametrize("within_s", [inf, -1.0], ids=["shifted", "left"])
async def test_what_a_search_takes_is_made_once_a_round_and_of_memory_as_it_is_then(
    both: Bench, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    """Between two rounds, whether memory is moved ahead there or not; never while a part of a table waits."""
    made: list[bytes] = []
    prepare, own = Index.prepare, both.inbound._own

    def counted(index: Index) -> None:
        made.append(own.rows.tobytes())
        prepare(index)

    monkeypatch.setattr(Index, "prepare", counted)
    rng = np.random.default_rng(21)
    for number in (2, 3, 4):
        shift(both, rng)
        before = own.rows.tobytes()
        await both.round(number, final=number == 4)
        assert len(made) == number - 2
        if number < 4:
            landed = own.rows.tobytes()
            await both.inbound.shift_ahead(within_s)
            assert made[number - 2 :] == [own.rows.tobytes()]
            assert (own.rows.tobytes() != landed) == (within_s > 0)
            assert landed != before
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


async def test_a_shift_that_was_foreseen_and_did_not_come_costs_bytes_and_nothing_else(both: Bench) -> None:
    rng = np.random.default_rng(18)
    shift(both, rng, by=1)
    await both.round(2, final=False)
    await both.inbound.shift_ahead()
    leaves, _ = await both.round(3, final=False)
    assert leaves == 3  # the first of each region was written over; the last one still lies where it was
    assert both.inbound.count.copied_bytes == 3 * (LEAVES - 2) * LEAF
    assert equal(both.source, both.target)
    await both.inbound.shift_ahead()  # it has moved backwards: nothing is foreseen
    assert await both.round(4, final=True) == (0, 0)
    assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0


@pytest.mark.parametrize("devices", ["gpu"], indirect=True)
@pytest.mark.parametrize("room", [True, False], ids=["scratch", "no-room"])
async def test_a_short_way_is_gone_through_a_scratch_if_the_gpu_has_room(
    both: Bench, monkeypatch: pytest.MonkeyPatch, *, room: bool
) -> None:
    """By one leaf of 48: more steps than a scratch takes, and as right where there is no room for one."""
    asked: list[int] = []
    pool = both.pool.of(GPUS[0])
    allocate = pool.allocate

    async def counted(nbytes: int) -> int:
        asked.append(nbytes)
        if not room:
            raise NoMemoryError("full", required_bytes=nbytes, available_bytes=0)
        return await allocate(nbytes)

    monkeypatch.setattr(pool, "allocate", counted)
    rng = np.random.default_rng(15)
    for number in (2, 3):
        shift(both, rng, by=1)
        leaves, _ = await both.round(number, final=number == 3)
        assert leaves == 3
        assert equal(both.source, both.target)
    assert both.inbound.damaged().size == 0
    assert len(asked) == 1


@pytest.mark.parametrize("devices", ["gpu"], indirect=True)
@pytest.mark.parametrize("final", [False, True], ids=["live", "paused"])
async def test_what_a_full_gpu_can_not_bring_to_its_place_is_sent(
    both: Bench, monkeypatch: pytest.MonkeyPatch, *, final: bool
) -> None:
    """Regions change places only through a scratch, and there is no room for one."""

    async def full(nbytes: int) -> int:
        raise NoMemoryError("full", required_bytes=nbytes, available_bytes=0)

    monkeypatch.setattr(both.pool.of(GPUS[0]), "allocate", full)
    rng = np.random.default_rng(16)
    exchange(both, rng)
    both.source.regions[1][: 2 * LEAF] = fresh(rng, 2 * LEAF)
    leaves, _ = await both.round(2, final=final)
    assert leaves == 2 * LEAVES + 2
    assert both.inbound.count.copied_bytes == 0
    assert equal(both.source, both.target)
    if not final:
        assert await both.round(3, final=True) == (0, 0)
    assert both.inbound.damaged().size == 0
    assert both.errors == []
