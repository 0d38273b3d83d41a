"""`worldmove bench boundary`: what `World.boundary()` costs a serving stack while nobody wants the state."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from worldmove.bench.nodes import running_nodes
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import quantile
from worldmove.errors import ProcessLostError
from worldmove.manifest import Region
from worldmove.worker import Worker

IDLE_US_BAR = 20.0
WARM_UP = 1000
HOST_STATE = bytes(4096)


class BoundaryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: microseconds of single calls, with 4 KiB of host state, no move."""

    calls: int
    idle_us_p50: float
    idle_us_p99: float


def run(*, calls: int = 20_000, json: bool = False) -> int:
    """Measures and shows.

    Args:
        calls: how many boundaries are timed.
        json: one JSON document instead of a table.

    Returns:
        The exit code, 0.

    Raises:
        WorldMoveError: the node or the worker failed.
    """
    result = uvloop.run(_measure(calls))
    lines = [
        Line("p50", f"{result.idle_us_p50:.1f} µs", at_most(result.idle_us_p50, IDLE_US_BAR, "µs")),
        Line("p99", f"{result.idle_us_p99:.1f} µs"),
    ]
    show(f"boundary with no move, {calls} calls", result, lines, json=json)
    return 0


async def _measure(calls: int) -> BoundaryResult:
    async with running_nodes(("A",)) as nodes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worldmove.bench.boundary", nodes[0].url, str(calls)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
    if process.returncode != 0:
        raise ProcessLostError("the worker of the benchmark failed")
    return msgspec.json.decode(output, type=BoundaryResult)


def worker(url: str, calls: int) -> BoundaryResult:
    """Runs in a process of its own, as a serving stack does: registers a world and times its boundaries."""
    regions = [Region(name="k", dtype="float32", shape=(1024,))]
    world = Worker(url).register(
        "bench-boundary", model="worldmove-bench", regions=regions, block_ms=750, horizon_ms=250
    )
    took = []
    for number in range(WARM_UP + calls):
        with world.block():
            world.tensor("k")[0] = number
        start = time.perf_counter_ns()
        world.boundary(HOST_STATE)
        took.append(time.perf_counter_ns() - start)
    world.close()
    microseconds = [value / 1000 for value in took[WARM_UP:]]
    return BoundaryResult(
        calls=calls, idle_us_p50=quantile(microseconds, 0.5), idle_us_p99=quantile(microseconds, 0.99)
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(worker(sys.argv[1], int(sys.argv[2]))).decode())
