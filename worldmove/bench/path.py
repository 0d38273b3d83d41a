"""`worldmove bench path`: a verified move against its own lanes, and against plain TCP, in one run.

Everything is prepared first (processes, mappings, connections); then each of the three carries the same
number of bytes in turn, several times. A first move measures memory and a second one the node's answers,
so that looking does not slow what is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import msgspec
import uvloop

from worldmove.bench.digest import fill
from worldmove.bench.health import answering
from worldmove.bench.lanes import lane_pair
from worldmove.bench.moves import Moved, Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.bench.processes import watch
from worldmove.bench.raw import RawStream
from worldmove.bench.report import Line, at_least, at_most, show
from worldmove.bench.stats import gbps, median, quantile
from worldmove.client import AsyncClient
from worldmove.errors import MoveAbortedError
from worldmove.ipc import map_shared
from worldmove.memory.arena import create_arena, free_bytes, no_memory
from worldmove.memory.limits import machine_memory
from worldmove.views import Receipt

RATIO_RAW_BAR = 0.65
RATIO_LANES_BAR = 0.7
EXTRA_BYTES_BAR = 64 * 1024 * 1024
HEALTHZ_MS_BAR = 50.0


class PathResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; rates in Gb/s (10⁹ bit/s), medians of `repeats` runs.

    Attributes:
        state_bytes: bytes of one run.
        raw_tcp_gbps: one plain TCP stream over whole memory (`worldmove.bench.raw`).
        lanes_gbps: a pair of lanes without digests (`worldmove.bench.lanes`).
        verified_gbps: state by `data_ms` of the receipt: from the source's last rank stopped until both leaf
            tables were equal, digests at both ends included.
        prepare_ms: from the request until the path was open.
        extra_bytes_peak: growth of one node's processes during a move, beyond the arenas (`Growth`).
        healthz_ms_p99: answers of both nodes to `GET /v1/healthz` during a move.
        runs: the single rates, in the order in which they were taken.
    """

    state_bytes: int
    repeats: int
    raw_tcp_gbps: float
    lanes_gbps: float
    verified_gbps: float
    ratio_verified_raw: float
    ratio_verified_lanes: float
    prepare_ms: float
    extra_bytes_peak: int
    healthz_ms_p99: float
    runs: dict[str, list[float]]


def run(*, gb: float = 2.0, repeats: int = 5, json: bool = False) -> int:
    """Measures and shows.

    Args:
        gb: size of the session in gigabytes (10⁹ bytes); four times as much memory is needed.
        repeats: runs of each kind, taken in turn.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move ended well, with equal roots.

    Raises:
        NoMemoryError: the machine does not have the memory.
        WorldMoveError: a move or a process failed.
    """
    result = uvloop.run(_measure(int(gb * 1e9), repeats))
    lines = [
        Line("plain TCP over whole memory, one stream", f"{result.raw_tcp_gbps:.1f} Gb/s"),
        Line("one lane, no digests", f"{result.lanes_gbps:.1f} Gb/s"),
        Line("verified move, live=false", f"{result.verified_gbps:.1f} Gb/s"),
        Line("verified by plain TCP", *_ratio(result.ratio_verified_raw, RATIO_RAW_BAR)),
        Line("verified by the lane alone", *_ratio(result.ratio_verified_lanes, RATIO_LANES_BAR)),
        Line("prepare", f"{result.prepare_ms:.0f} ms"),
        Line(
            "growth of a node beyond the arenas",
            f"{result.extra_bytes_peak / 2**20:.1f} MiB",
            at_most(result.extra_bytes_peak / 2**20, EXTRA_BYTES_BAR / 2**20, "MiB"),
        ),
        Line(
            "GET /v1/healthz during a move, p99",
            f"{result.healthz_ms_p99:.1f} ms",
            at_most(result.healthz_ms_p99, HEALTHZ_MS_BAR, "ms"),
        ),
    ]
    show(f"{result.state_bytes / 1e9:.2f} GB over loopback, median of {repeats}", result, lines, json=json)
    return 0


def _ratio(value: float, bar: float) -> tuple[str, str]:
    return f"{value:.2f}", at_least(value, bar)


async def _measure(nbytes: int, repeats: int) -> PathResult:
    _check_memory(4 * nbytes)
    async with (
        running_nodes(("A", "B"), ("--path", "staged", "--lanes", "1")) as nodes,
        shuttle(nodes, nbytes) as session,
    ):
        extra = await _memory(nodes, session)
        await session.turn()
        async with answering([node.url for node in nodes]) as answers:
            moved = await session.move("staged")
        runs, moves = await _take_turns(session, moved.receipt.state_bytes, repeats)
    rates = {name: median(values) for name, values in runs.items()}
    return PathResult(
        state_bytes=moved.receipt.state_bytes,
        repeats=repeats,
        raw_tcp_gbps=rates["raw_tcp"],
        lanes_gbps=rates["lanes"],
        verified_gbps=rates["verified"],
        ratio_verified_raw=rates["verified"] / rates["raw_tcp"],
        ratio_verified_lanes=rates["verified"] / rates["lanes"],
        prepare_ms=median([move.prepare_ms for move in moves]),
        extra_bytes_peak=extra,
        healthz_ms_p99=quantile(answers.took_ms, 0.99),
        runs=runs,
    )


async def _memory(nodes: list[RunningNode], session: Shuttle) -> int:
    roots = {}
    for node in nodes:
        async with AsyncClient(node.url) as client:
            roots[node.name] = (node.pid, (await client.node()).keeper)
    async with watch(roots) as growth:
        await session.move("staged")
    return growth.peak_bytes


async def _take_turns(
    session: Shuttle, nbytes: int, repeats: int
) -> tuple[dict[str, list[float]], list[Moved]]:
    runs: dict[str, list[float]] = {"raw_tcp": [], "lanes": [], "verified": []}
    moves = []
    async with (
        filled_arena(nbytes) as source,
        filled_arena(nbytes, filled=False) as destination,
        RawStream(source, destination, nbytes) as raw,
        lane_pair(source, destination, nbytes) as lanes,
    ):
        await raw.run()
        await lanes.run()
        for _ in range(repeats):
            await session.turn()
            runs["raw_tcp"].append(gbps(nbytes, await raw.run()))
            runs["lanes"].append(gbps(nbytes, await lanes.run()))
            moved = await session.move("staged")
            runs["verified"].append(gbps(nbytes, _data_ms(moved.receipt) / 1000))
            moves.append(moved)
    return runs, moves


def _data_ms(receipt: Receipt) -> float:
    if receipt.data_ms is None or receipt.path != "staged":
        raise MoveAbortedError(f"the move took the path {receipt.path}", reason="path")
    return receipt.data_ms


@contextlib.asynccontextmanager
async def filled_arena(nbytes: int, *, filled: bool = True) -> AsyncIterator[int]:
    """The descriptor of a memory file, populated; noise is in it unless it is not to be `filled`."""
    fd = await asyncio.to_thread(create_arena, nbytes, "worldmove-bench")
    try:
        if filled:
            with map_shared(fd, nbytes) as mapping, memoryview(mapping) as view:
                await asyncio.to_thread(fill, view)
        yield fd
    finally:
        os.close(fd)


def _check_memory(needed: int) -> None:
    available = free_bytes(machine_memory())
    if needed > available:
        raise no_memory(needed, available, "two for the move, two for what it is compared with")
