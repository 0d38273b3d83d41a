"""`worldmove bench path --verify`: one receiver; digests beside the wire, or in the receive path.

Lanes as in a move, a pair for each sender, all under one gate. In turn they carry the same bytes without a
gate and without digests, with the gate alone, with digests as a node makes them (executors, behind a bounded
queue), and with digests made by each lane where it receives: what must not be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import msgspec
import uvloop

from worldmove.admission import Demand, Supply
from worldmove.bench.lanes import LanePair, lane_pair
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import gbps, median, quantile
from worldmove.digest import LeafTable, new_seed
from worldmove.executor.messages import Piece
from worldmove.executor.pool import ExecutorPool
from worldmove.gate import Gate
from worldmove.manifest import DEFAULT_LEAF, Span
from worldmove.memory.arena import create_arena
from worldmove.promises import Promises

VERDICT_BAR_MS = 1.0
OVERHEAD_BAR = 0.02
UNREAD = 4
"""Batches that have landed and wait for their digest, for each sender; see `worldmove.inbound`."""
MOVES = 1000

OnLanded = Callable[[Span], Awaitable[None]]


class ReceiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: medians of `repeats` runs, all senders together.

    Attributes:
        nbytes: of each sender.
        open_gbps: without a gate and without digests.
        gated_gbps: under the gate, without digests.
        gate_overhead: what the gate takes of the goodput: 1 - gated/open.
        scheduled_gbps: digests by executors beside the wire.
        inline_gbps: digests by the lanes where they receive; `None` if not asked for.
        batch_ms_p99: by way, from the grant of a batch until it has landed.
        verdict_ms_p50, verdict_ms_p99: one verdict with `moves` promises in the books.
    """

    senders: int
    nbytes: int
    repeats: int
    open_gbps: float
    gated_gbps: float
    gate_overhead: float
    scheduled_gbps: float
    inline_gbps: float | None
    batch_ms_p99: dict[str, float]
    moves: int
    verdict_ms_p50: float
    verdict_ms_p99: float


def run(
    *, gb: float = 0.5, repeats: int = 5, senders: int = 1, inline: bool = False, json: bool = False
) -> int:
    """Measures and shows.

    Args:
        gb: of each sender, in gigabytes (10⁹ bytes); twice as much memory is needed for each.
        repeats: runs of each way, taken in turn.
        senders: that send at once, as far as the gate lets them.
        inline: also with digests in the receive path.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if all bytes came.

    Raises:
        WorldMoveError: memory or a process can't be had.
    """
    verdicts = verdict_ms()
    result = uvloop.run(_measure(int(gb * 1e9), repeats, senders, verdicts, inline=inline))
    lines = [
        Line("no gate, no digests", f"{result.open_gbps:.1f} Gb/s"),
        Line("the gate, no digests", f"{result.gated_gbps:.1f} Gb/s"),
        Line(
            "what the gate takes", f"{result.gate_overhead:.1%}", at_most(result.gate_overhead, OVERHEAD_BAR)
        ),
        Line("digests beside the wire", f"{result.scheduled_gbps:.1f} Gb/s"),
        *(
            [Line("digests in the receive path", f"{result.inline_gbps:.1f} Gb/s")]
            if result.inline_gbps
            else []
        ),
        *(Line(f"a batch, p99, {way}", f"{value:.1f} ms") for way, value in result.batch_ms_p99.items()),
        Line(
            f"a verdict with {result.moves} moves, p99",
            f"{result.verdict_ms_p99:.3f} ms",
            at_most(result.verdict_ms_p99, VERDICT_BAR_MS, "ms"),
        ),
    ]
    show(f"{senders} sender(s) of {result.nbytes / 1e9:.2f} GB over loopback", result, lines, json=json)
    return 0


def verdict_ms(moves: int = MOVES, repeats: int = 200) -> list[float]:
    """Milliseconds of single verdicts with so many promises in the books, of all deadlines."""
    promises, supply = Promises(), Supply(path=1.25e9, line=1.25e9, source_digest=5e9, destination_digest=5e9)
    for number in range(moves):
        promises.owe(f"m{number}", 1e6, 30.0 + number * 0.05, 1e4)
    found = []
    for number in range(repeats):
        demand = Demand(
            state_bytes=10**9, live=True, block_s=0.75, horizon_s=1.0,
            deadline_s=10.0 + number / 2, dirty_rate=1e8,
        )  # fmt: skip
        start = time.perf_counter()
        promises.judge(demand, supply, 0.0)
        found.append((time.perf_counter() - start) * 1000)
    return found


class _Open:
    """Stands in for a `Pass` where there is no gate."""

    on_cut: Callable[[str], None]

    def batch_bytes(self, most: int, _lanes: int = 1) -> int:
        return most

    @contextlib.asynccontextmanager
    async def grant(self, _nbytes: int) -> AsyncIterator[None]:
        yield

    def leave(self) -> None:
        return


class _Way:
    """One way to receive: its lanes, what happens to what has landed, and what was measured."""

    def __init__(self, name: str, pairs: list[LanePair], on_landed: list[OnLanded] | None) -> None:
        self.name = name
        self.gbps: list[float] = []
        self._pairs = pairs
        self._on_landed = on_landed or [_nothing] * len(pairs)

    @property
    def batch_ms(self) -> list[float]:
        return [took for pair in self._pairs for took in pair.batch_ms]

    async def run(self, nbytes: int) -> None:
        start = time.perf_counter()
        both = zip(self._pairs, self._on_landed, strict=True)
        await asyncio.gather(*(pair.run(landed) for pair, landed in both))
        self.gbps.append(gbps(nbytes * len(self._pairs), time.perf_counter() - start))


async def _nothing(_span: Span) -> None:
    return


async def _measure(
    nbytes: int, repeats: int, senders: int, verdicts: list[float], *, inline: bool
) -> ReceiveResult:
    async with contextlib.AsyncExitStack() as stack:
        source, *targets = [_arena(stack, nbytes) for _ in range(senders + 1)]
        pool = ExecutorPool(min(senders, 4), nice=0)
        stack.push_async_callback(pool.close)
        await pool.start()
        names = ["open", "gated", "scheduled", *(["inline"] if inline else [])]
        ways = []
        for name in names:
            gate = Gate(None, 1)
            pairs = []
            for number, target in enumerate(targets):
                one = cast(Any, _Open()) if name == "open" else gate.join(f"m{number}", f"s{number}")
                made = lane_pair(source, target, nbytes, one, inline=name == "inline")
                pairs.append(await stack.enter_async_context(made))
            digests = [await _digester(stack, pool, target, nbytes) for target in targets]
            ways.append(_Way(name, pairs, digests if name == "scheduled" else None))
        for turn in range(repeats + 1):
            for way in ways:
                await way.run(nbytes)
                if not turn:  # the first warms up: mappings, gate and caches
                    way.gbps.clear()
                    way.batch_ms.clear()
    rates = {way.name: median(way.gbps) for way in ways}
    return ReceiveResult(
        senders=senders,
        nbytes=nbytes,
        repeats=repeats,
        open_gbps=rates["open"],
        gated_gbps=rates["gated"],
        gate_overhead=1 - rates["gated"] / rates["open"],
        scheduled_gbps=rates["scheduled"],
        inline_gbps=rates.get("inline"),
        batch_ms_p99={way.name: quantile(way.batch_ms, 0.99) for way in ways},
        moves=MOVES,
        verdict_ms_p50=median(verdicts),
        verdict_ms_p99=quantile(verdicts, 0.99),
    )


def _arena(stack: contextlib.AsyncExitStack, nbytes: int) -> int:
    fd = create_arena(nbytes, "worldmove-bench")
    stack.callback(os.close, fd)
    return fd


async def _digester(
    stack: contextlib.AsyncExitStack, pool: ExecutorPool, target: int, nbytes: int
) -> OnLanded:
    table = LeafTable(-(-nbytes // DEFAULT_LEAF))
    stack.callback(table.close)
    key = await pool.attach(target, nbytes, writable=False)
    table_key = await pool.attach(table.fd, table.nbytes, writable=True)
    seed, unread = new_seed(), asyncio.Semaphore(UNREAD)

    async def digest(span: Span) -> None:
        async with unread:
            piece = Piece(key, span.offset, span.length, DEFAULT_LEAF, span.offset // DEFAULT_LEAF)
            await pool.digest(table_key, seed, [piece])

    return digest
