"""Fan-in: worlds of many senders move into one receiver at the same time, with the gate on and off."""

from __future__ import annotations

import asyncio
import time

import msgspec

from worldmove.bench.lab import hosts
from worldmove.bench.lab.hosts import LabHost
from worldmove.bench.lab.stage import RECEIVER, Stage, staged
from worldmove.bench.stats import quantile
from worldmove.views import MigrationRequest, MigrationView

PATIENCE_MS = 60_000.0
"""Horizon and deadline: what counts is how fast the bytes come."""


class FanIn(msgspec.Struct, frozen=True, kw_only=True):
    """So many senders at once. `goodput_ratio`: by one sender's with the same gate."""

    gate: str
    senders: int
    moved: int
    goodput_mbit_per_s: float
    goodput_ratio: float
    p99_pause_ms: float
    dropped_packets: int


async def fan_in(made: list[LabHost], nbytes: int, counts: list[int], gate: str) -> list[FanIn]:
    """Moves one world of each of so many senders at once, for every count.

    Raises:
        WorldMoveError: a node failed.
    """
    rows: list[FanIn] = []
    async with staged(made, nbytes, len(counts) + 1, len(made), ("--gate", gate)) as stage:
        await _together(stage, len(stage.senders), nbytes)  # lanes start, rates get measured
        for count in counts:
            dropped = hosts.packets_dropped()
            rate, moves = await _together(stage, count, nbytes)
            pauses = [move.receipt.pause_ms or 0.0 for move in moves if move.receipt] or [0.0]
            alone = rows[0].goodput_mbit_per_s if rows else rate * 8 / 1e6
            rows.append(
                FanIn(
                    gate=gate,
                    senders=count,
                    moved=sum(move.state == "released" for move in moves),
                    goodput_mbit_per_s=rate * 8 / 1e6,
                    goodput_ratio=rate * 8 / 1e6 / alone,
                    p99_pause_ms=quantile(pauses, 0.99),
                    dropped_packets=hosts.packets_dropped() - dropped,
                )
            )
    return rows


async def _together(stage: Stage, count: int, nbytes: int) -> tuple[float, list[MigrationView]]:
    """Bytes a second from the first pause until the last table was equal, and the moves."""
    await stage.crowds[RECEIVER].wait_for(count)
    spans: list[tuple[float, float]] = []

    async def one(sender: str) -> MigrationView:
        await stage.crowds[sender].wait_for(1)
        request = MigrationRequest(
            session_id=stage.crowds[sender].take() or "",
            destination=RECEIVER,
            live=False,
            horizon_ms=PATIENCE_MS,
            deadline_ms=PATIENCE_MS,
        )
        client, asked = stage.clients[sender], time.monotonic()
        move = await client.wait((await client.migrate(request)).id)
        receipt = move.receipt
        if receipt is not None and receipt.pause_ms is not None and receipt.data_ms is not None:
            began = asked + (receipt.total_ms - receipt.pause_ms) / 1000
            spans.append((began, began + receipt.data_ms / 1000))
        return move

    moves = await asyncio.gather(*(one(sender) for sender in stage.senders[:count]))
    if not spans:
        return 0.0, list(moves)
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    return len(spans) * nbytes / seconds, list(moves)
