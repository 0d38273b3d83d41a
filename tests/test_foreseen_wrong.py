"""What was foreseen and turns out wrong: the world stood for somebody else, or became something else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import pytest_asyncio
from gpu_kit import GPUS
from inbound_kit import Bench, bench, equal
from moving_kit import (
    LEAF,
    PLACES,
    REGIONS,
    STATE,
    Budget,
    exchange,
    permute,
    pools,
    rewrite,
    ring,
    shift,
)
from msgspec.structs import replace
from test_arming import Page

from worldmove.arming import Sign
from worldmove.executor.devices import Executors
from worldmove.inbound import Inbound
from worldmove.paths import LocalPath

# As in test_inbound_delta: one set of executors for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")
DEVICES = PLACES["gpu"]
ON = {"gpu": DEVICES, "two": (GPUS[0], GPUS[1], GPUS[0])}


class Landing:
    """A world that is copied live beside the memory that it goes to, and its page."""

    def __init__(self, both: Bench, page: Page, path: LocalPath) -> None:
        self.both, self.page, self.path = both, page, path
        self.inbound = Inbound(both.mine, path, both.errors.append, both._on_landed)
        both.inbound = self.inbound

    def stand(self, block: int) -> None:
        self.page.page.pause_at = block
        for rank in range(2):
            self.page.stand(rank, block)

    def go_on(self, block: int) -> None:
        self.page.page.pause_at = 1 << 62
        for rank in range(2):
            self.page.run(rank, block)

    async def looked(self) -> None:
        """Executors have looked at everything that they were asked before."""
        for uuid in sorted({extent.device for extent in self.both.target.holding.extents} - {"host"}):
            await self.both.pool.of(uuid).measure()


@asynccontextmanager
async def landing(executors: Executors, devices: tuple[str, ...]) -> AsyncIterator[Landing]:
    regions = tuple(replace(region, device=on) for region, on in zip(REGIONS, devices, strict=True))
    async with bench(executors, regions, batch_bytes=4 * LEAF, arenas=Budget(executors)) as both:
        await both.inbound.stop()
        page = Page()
        gpus = [executors.of(one) for one in sorted({*devices})]
        sign = await Sign.open(page.fd, gpus)
        path = LocalPath(both.theirs, both.mine, sign)
        path.batch_bytes = 4 * LEAF
        made = Landing(both, page, path)
        await made.inbound.open()
        try:
            yield made
        finally:
            await made.inbound.stop()
            path.abort()
            await path.quiet()
            page.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executors() -> AsyncIterator[Executors]:
    async with pools(tuple(GPUS)) as made:
        yield made


CHANGES = (shift, ring, exchange, permute, rewrite)


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("seed", range(10))
async def test_a_world_that_becomes_something_else_is_brought_whole(
    executors: Executors, seed: int, where: str
) -> None:
    rng = np.random.default_rng(seed)
    async with landing(executors, ON[where]) as made:
        both, inbound = made.both, made.inbound
        await both.round(1, final=False, table=False)
        usual = CHANGES[seed % len(CHANGES)]
        rounds = int(rng.integers(2, 5))
        for number in range(2, rounds + 1):
            usual(both, rng)
            await both.round(number, final=False)
            await inbound.shift_ahead()
        await inbound.expect()
        await asyncio.sleep(0)
        other = bool(rng.integers(2))
        if other:
            made.stand(4)
            await made.looked()
            await asyncio.sleep(0.05)
            made.go_on(4)
        CHANGES[int(rng.integers(len(CHANGES)))](both, rng)
        if rng.integers(2):
            usual(both, rng)
        made.stand(6)
        if rng.integers(2):
            await made.looked()
            await asyncio.sleep(0.05)
        await both.round(rounds + 1, final=True)
        await inbound.confirm(6)
        count = inbound.count
        assert inbound.damaged().size == 0
        assert equal(both.source, both.target)
        assert len(set(await both.roots())) == 1
        assert both.errors == []
        new_bytes = count.bytes - count.again_bytes
        assert new_bytes + count.copied_bytes + inbound.kept_bytes == STATE


async def test_what_came_at_another_stop_counts_twice_and_what_was_kept_once(executors: Executors) -> None:
    """A receipt says how much was sent, and how much was not."""
    rng = np.random.default_rng(5)
    async with landing(executors, DEVICES) as made:
        both, inbound = made.both, made.inbound
        await both.round(1, final=False, table=False)
        ring(both, rng)
        await both.round(2, final=False)
        await inbound.expect()  # the same leaves of each region, a stride further on
        made.stand(4)
        await made.looked()
        await asyncio.sleep(0.1)
        made.go_on(4)
        ring(both, rng)
        made.stand(6)
        await both.round(3, final=True)
        sent, foreseen = 3 * 5 * LEAF, 3 * 4 * LEAF
        assert (inbound.count.bytes, inbound.kept_bytes) == (sent, STATE - sent)
        await inbound.confirm(6)
        assert inbound.damaged().size == 0
        assert equal(both.source, both.target)
        assert (inbound.count.bytes, inbound.kept_bytes) == (sent + foreseen, STATE - sent)


async def test_what_has_waited_for_too_long_is_asked_for_when_the_round_begins(executors: Executors) -> None:
    """A block may last longer than armed work waits: the world stands no longer for that than it has to."""
    rng = np.random.default_rng(6)
    async with landing(executors, DEVICES) as made:
        both, inbound = made.both, made.inbound
        await both.round(1, final=False, table=False)
        rewrite(both, rng)
        await both.round(2, final=False)
        await inbound.expect()
        await made.looked()
        assert made.path.sign is not None
        made.path.sign.release(begin=False)  # as an executor does by itself
        rewrite(both, rng)
        made.stand(6)
        await made.looked()
        await both.round(3, final=True)
        assert inbound._own.known.all()
        assert inbound.damaged().size == 0
        await inbound.confirm(6)
        assert inbound.damaged().size == 0
        assert equal(both.source, both.target)
        assert inbound.count.bytes == STATE


async def test_an_executor_that_dies_before_the_stop_costs_only_time(executors: Executors) -> None:
    rng = np.random.default_rng(3)
    async with landing(executors, DEVICES) as made:
        both, inbound = made.both, made.inbound
        await both.round(1, final=False, table=False)
        rewrite(both, rng)
        await both.round(2, final=False)
        await inbound.expect()
        await made.looked()
        os.kill(executors.of(DEVICES[0]).pids[0], signal.SIGKILL)
        rewrite(both, rng)
        made.stand(6)
        await asyncio.sleep(0.3)
        await both.round(3, final=True)
        await inbound.confirm(6)
        assert inbound.damaged().size == 0
        assert equal(both.source, both.target)
