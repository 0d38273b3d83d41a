"""What is pulled before a world stands: real lanes and executors of an imagined GPU, and a real page."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from test_arming import GPU, REGIONS, Rig, regions_of, rig, table_of
from transport_kit import lanes

from worldmove.config import Settings
from worldmove.directing import DirectPath, DirectServing, connect
from worldmove.errors import DeadlineError, WorldMoveError
from worldmove.inbound import Inbound
from worldmove.intake import Intake
from worldmove.page.looking import open_to_look
from worldmove.transport.lane_messages import Wish

__all__ = ["rig"]
STALL_MS = 1000
TOTAL = sum(region.nbytes for region in REGIONS)


class Ahead:
    """Both ends of a move that waits for its world: everything is asked for, and the source is held."""

    def __init__(self, rig: Rig, serving: DirectServing, path: DirectPath) -> None:
        self.rig, self.serving, self.path = rig, serving, path
        self.failed: list[BaseException] = []
        self.inbound = Inbound(rig.mine, path, self.failed.append, lambda _bytes: None)

    def stand(self, block: int) -> None:
        """The world was told to stop there, and does."""
        self.rig.page.page.pause_at = block
        for rank in range(2):
            self.rig.page.stand(rank, block)

    async def arrived(self) -> None:
        async with asyncio.timeout(30):
            while not self.inbound.arrived:  # noqa: ASYNC110 - nobody else wants to know
                await asyncio.sleep(0.01)

    async def verified(self, block: int) -> None:
        """The pause is at this block: all is compared, and equal."""
        self.inbound.start_round(1, final=True)
        _, part = await table_of(self.rig)
        self.inbound.plan(part)
        await self.inbound.close_round()
        await self.inbound.confirm(block)
        assert self.inbound.damaged().size == 0
        assert regions_of(self.rig.mine.memory) == regions_of(self.rig.theirs.memory)
        assert not self.failed


@pytest_asyncio.fixture
async def ahead(rig: Rig) -> AsyncIterator[Ahead]:
    rig.write(1)
    intake = Intake(Settings(name="B", ledger="sqlite:///unused", run_dir=Path("unused")))
    page = open_to_look(rig.page.fd)
    async with lanes(gpu=GPU, slots=2, stall_ms=STALL_MS) as pool:
        serving = DirectServing({GPU: pool})
        serving.hold(page)
        offers = await serving.offer("m", rig.theirs.memory, "127.0.0.1", lambda _future: None)
        hello: Any = SimpleNamespace(manifest=rig.theirs.memory.manifest, move_id="m")
        path = await connect(
            {GPU: pool},
            hello,
            offers,
            rig.mine.memory,
            lambda: intake.fabric.join("m", "A"),
            floor_gbps=0.0,
            timeout_ms=20_000,
            wish=Wish(),
        )
        path.ahead = True
        made = Ahead(rig, serving, path)
        await made.inbound.open(arm=True)
        yield made
        await made.inbound.stop()
        path.abort()
        await path.quiet()
        await serving.end()
    os.close(page)


async def test_nothing_is_read_before_the_node_says_that_the_world_stands(ahead: Ahead) -> None:
    """However long that takes: no deadline runs meanwhile. Digests wait until the lane has begun."""
    await ahead.serving.begun(2.5 * STALL_MS / 1000)
    assert not ahead.inbound.arrived
    ahead.rig.write(2)
    ahead.serving.go()
    await ahead.serving.begun(30)
    await ahead.arrived()
    await ahead.verified(5)
    assert ahead.inbound.count.bytes == TOTAL


async def test_a_lane_that_looks_begins_at_the_stop_and_not_before(ahead: Ahead) -> None:
    ahead.serving.look()
    ahead.rig.page.page.pause_at = 5
    ahead.rig.page.stand(0, 5)
    await ahead.serving.begun(0.3)
    assert ahead.path.began is None
    ahead.rig.write(2)
    ahead.stand(5)
    await ahead.arrived()
    assert ahead.path.began is not None
    assert not await ahead.path.stood_at(4)
    await ahead.verified(5)
    assert ahead.inbound.count.bytes == TOTAL
    assert ahead.inbound.count.wire_ms > 0


async def test_what_came_at_another_stop_is_brought_again(ahead: Ahead) -> None:
    """At block 4 the world stood for somebody else, and went on: its pause is at 5."""
    ahead.serving.look()
    ahead.stand(4)
    await ahead.arrived()
    ahead.rig.write(2)
    ahead.serving.go()
    await ahead.verified(5)
    assert ahead.inbound.count.bytes == 2 * TOTAL


async def test_a_path_that_ends_while_it_waits_leaves_nothing_behind(ahead: Ahead) -> None:
    ahead.serving.look()
    ahead.path.abort()
    await ahead.inbound.stop()
    await ahead.path.quiet()
    await ahead.serving.end()
    ahead.stand(9)
    await ahead.rig.mine.fill(0)
    for fd in ahead.rig.mine.memory.fds:
        assert not any(os.pread(fd, 1 << 20, 0))


@pytest.mark.parametrize("victim", ["source", "destination"])
async def test_a_lane_that_dies_while_it_waits_ends_the_path(ahead: Ahead, victim: str) -> None:
    lane = ahead.serving.lanes[0] if victim == "source" else ahead.path._lanes[0]
    os.kill(lane.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert isinstance(await ahead.path.lost, WorldMoveError)
    assert not ahead.inbound.arrived


async def test_a_source_that_never_begins_is_noticed_once_its_world_stands(ahead: Ahead) -> None:
    ahead.inbound.start_round(1, final=True)
    async with asyncio.timeout(20):
        assert isinstance(await ahead.path.lost, DeadlineError)
