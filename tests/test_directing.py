"""What a node remembers of direct paths, how much they may have under way, and what their lanes leave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import GPUS, IMAGINED
from test_transport_direct import DeviceArena
from transport_kit import MB, lanes, until_gone

from worldmove.config import Settings
from worldmove.directing import BATCH_BYTES, FAILED_S, WIDTH, DirectPath, DirectRates
from worldmove.intake import Intake
from worldmove.transport.pool import Lane, LaneRegion


def test_a_rate_counts_until_the_path_fails_and_a_failure_for_a_while() -> None:
    rates = DirectRates()
    assert rates.of("a", 0.0) is None
    rates.note("a", 200.0)
    assert (rates.of("a", 1e9), rates.of("b", 0.0)) == (200.0, None)
    rates.failed("a", 10.0)
    assert rates.of("a", 10.0 + FAILED_S / 2) == 0.0
    assert rates.of("a", 10.0 + FAILED_S) is None
    rates.failed("a", 10.0)
    rates.note("a", 100.0)
    assert rates.of("a", 11.0) == 100.0


class StillLane:
    """A lane of which only its place in a path matters."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


async def test_the_first_move_has_all_its_rings_hold_under_way_at_once() -> None:
    """It waits for no window: a line that is found out by trying is that of lanes over TCP alone."""
    intake = Intake(Settings(name="B", ledger="sqlite:///unused", run_dir=Path("unused")))
    lane: Any = StillLane()
    moves = [intake.fabric.join(f"m{number}", "A") for number in range(2)]
    for gate_pass in moves:
        path = DirectPath([lane], {0: lane}, gate_pass, 3000.0)
        assert path.batch_bytes == BATCH_BYTES
        grants = [await gate_pass.acquire(path.batch_bytes) for _ in range(path.width)]
        assert len(grants) == WIDTH
    assert intake.gate.bound_bytes < BATCH_BYTES
    assert not intake.gate.busy


async def test_a_line_whose_rate_is_given_carries_direct_paths_at_that_rate() -> None:
    intake = Intake(
        Settings(name="B", ledger="sqlite:///unused", run_dir=Path("unused"), gate_rate=125_000_000.0)
    )
    assert intake.fabric is intake.gate


async def test_lanes_that_two_moves_at_once_needed_leave_one_ring_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring is a gigabyte of its GPU: a lane that nobody needs any more goes at once, and its ring too."""
    monkeypatch.setenv("PYTHONPATH", IMAGINED)
    lost: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def hear(name: str, facts: dict[str, Any]) -> None:
        if name == "lane-lost":
            lost.put_nowait(facts)

    async with lanes(gpu=GPUS[0], slots=2, on_event=hear) as pool:
        arena = DeviceArena(MB)

        async def lease(move: str) -> Lane:
            return await pool.lease(move, [(arena.fd, MB)], [LaneRegion(0, 0, MB)], writable=True)

        leased = await asyncio.gather(lease("m1"), lease("m2"))
        assert sum(rings(lane.pid) for lane in leased) == 2
        for lane in leased:
            await lane.release()
        await asyncio.sleep(0)  # who is lost is told in the loop's next turn
        assert len(pool.lanes) == 1
        gone = (await lost.get())["pid"]
        await until_gone(gone)
        assert [(pid, rings(pid)) for pid, _, _ in pool.lanes] == [
            (lane.pid, 1) for lane in leased if lane.pid != gone
        ]


def rings(pid: int) -> int:
    """Rings that a lane's process has mapped on its imagined GPU."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    starts = [line for line in maps if "/memfd:imagined-gpu-0" in line]
    return sum(int(stop, 16) - int(start, 16) > 512 * MB - 1
               for start, stop in (line.split()[0].split("-") for line in starts))  # fmt: skip
