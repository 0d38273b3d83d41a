"""What is foreseen of a live move's last round: real lanes of an imagined GPU, and a real page."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from test_ahead import STALL_MS, TOTAL, Ahead
from test_arming import GPU, Rig, regions_of, rig
from transport_kit import lanes

from worldmove.config import Settings
from worldmove.directing import DirectServing, connect
from worldmove.errors import DeadlineError, WorldMoveError
from worldmove.intake import Intake
from worldmove.messages import TablePart
from worldmove.page.looking import open_to_look
from worldmove.transport.lane_messages import Wish

__all__ = ["rig"]


class Live(Ahead):
    """Both ends of a live move that has had its last live round; nearly everything is foreseen."""

    async def round(self, number: int, *, final: bool, table: bool = True) -> None:
        self.inbound.start_round(number, final=final)
        if table:
            theirs = await self.rig.theirs.table()
            await self.rig.theirs.read(theirs, self.rig.theirs.all_spans(), urgent=True)
            self.inbound.plan(TablePart(number=number, first=0, digests=theirs.slice(0, theirs.count)))
        await self.inbound.close_round()

    async def expecting(self) -> None:
        await self.round(1, final=False, table=False)
        self.rig.write(2)
        await self.round(2, final=False)
        assert self.inbound.count.bytes == TOTAL
        await self.serving.hold_lanes()
        await self.inbound.expect()
        assert self.inbound._armed is not None

    async def verified(self, block: int) -> None:
        async with asyncio.timeout(30):
            await self.round(3, final=True)
            await self.inbound.confirm(block)
        assert self.inbound.damaged().size == 0
        assert regions_of(self.rig.mine.memory) == regions_of(self.rig.theirs.memory)
        assert not self.failed


@asynccontextmanager
async def opened(rig: Rig, pool: Any, page: int | None, move: str = "m") -> AsyncIterator[Live]:
    intake = Intake(Settings(name="B", ledger="sqlite:///unused", run_dir=Path("unused")))
    serving = DirectServing({GPU: pool})
    serving.show(page)
    offers = await serving.offer(move, rig.theirs.memory, "127.0.0.1", lambda _future: None)
    hello: Any = SimpleNamespace(manifest=rig.theirs.memory.manifest, move_id=move)
    path = await connect(
        {GPU: pool},
        hello,
        offers,
        rig.mine.memory,
        lambda: intake.fabric.join(move, "A"),
        floor_gbps=0.0,
        timeout_ms=20_000,
        wish=Wish(),
    )
    path.ahead = True
    made = Live(rig, serving, path)
    await made.inbound.open()
    yield made


@pytest_asyncio.fixture
async def live(rig: Rig) -> AsyncIterator[Live]:
    rig.write(1)
    page = open_to_look(rig.page.fd)
    async with lanes(gpu=GPU, slots=2, stall_ms=STALL_MS) as pool, opened(rig, pool, page) as made:
        yield made
        await made.inbound.stop()
        made.path.abort()
        await made.path.quiet()
        await made.serving.end()
    os.close(page)


@pytest.mark.parametrize("shown", [True, False], ids=["seen", "told"])
async def test_what_is_foreseen_is_read_at_the_stop_and_not_before(live: Live, *, shown: bool) -> None:
    await live.expecting()
    live.serving.look()
    live.rig.page.page.pause_at = 5
    live.rig.page.stand(0, 5)
    await asyncio.sleep(2.5 * STALL_MS / 1000)
    assert live.path.began is None
    live.rig.write(3)
    if shown:
        live.stand(5)
        await live.arrived()
    live.serving.go()
    await live.verified(5)
    assert live.inbound.count.bytes == TOTAL
    assert live.inbound.kept_bytes == 0
    assert 0 < live.inbound.count.wire_ms < 60_000


async def test_what_came_at_another_stop_is_brought_again(live: Live) -> None:
    await live.expecting()
    live.serving.look()
    live.stand(4)
    await live.arrived()
    live.rig.write(3)
    live.serving.go()
    await live.verified(5)
    assert live.inbound.count.bytes == 2 * TOTAL


@pytest.mark.parametrize("victim", ["source", "destination"])
async def test_a_lane_that_dies_while_it_waits_ends_the_path(live: Live, victim: str) -> None:
    await live.expecting()
    lane = live.serving.lanes[0] if victim == "source" else live.path._lanes[0]
    os.kill(lane.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert isinstance(await live.path.lost, WorldMoveError)


@pytest.mark.parametrize("ahead", [True, False], ids=["asked", "not-yet-asked"])
async def test_a_source_that_never_begins_is_noticed_once_its_world_stands(
    live: Live, *, ahead: bool
) -> None:
    """Also where the last round begins before the first of what is asked for ahead has reached the lane."""
    await live.expecting()
    if ahead:
        await asyncio.sleep(0.2)
    live.inbound.start_round(3, final=True)
    async with asyncio.timeout(20):
        assert isinstance(await live.path.lost, DeadlineError)


async def test_the_next_move_over_the_same_lanes_knows_nothing_of_the_last_one(rig: Rig) -> None:
    page = open_to_look(rig.page.fd)
    async with lanes(gpu=GPU, slots=2, stall_ms=STALL_MS, spare=2) as pool:
        pids = None
        for move in ("m", "n", "o"):
            rig.write(1)
            rig.page.page.pause_at = 1 << 60
            async with opened(rig, pool, page if move != "n" else None, move) as made:
                now = sorted(lane.pid for lane in (*made.serving.lanes, *made.path._lanes))
                assert pids in (None, now)
                pids = now
                await made.expecting()
                made.serving.look()
                await asyncio.sleep(0.1)
                assert made.path.began is None
                rig.write(3)
                made.stand(5)
                made.serving.go()
                await made.verified(5)
                await made.inbound.stop()
                await asyncio.gather(made.path.release(), made.serving.release())
    os.close(page)
