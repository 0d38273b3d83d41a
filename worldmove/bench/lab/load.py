"""Offered load: moves asked for at a given rate, and what became of every one of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from worldmove.bench.lab.stage import RECEIVER, Stage
from worldmove.bench.stats import quantile
from worldmove.errors import RejectedError
from worldmove.views import MigrationRequest, MigrationView

DRAIN_S = 30.0
"""How long moves that were taken on may go on after the last was asked for."""


class Terms(NamedTuple):
    """What every move of a run asks for; milliseconds."""

    horizon_ms: float
    deadline_ms: float


class Outcome(NamedTuple):
    """One move that was asked for. Times in seconds since the run began; data landed from `data_began` on."""

    asked: float
    ended: float
    code: str | None
    """Why it was not taken on, or aborted; `None` if the world moved."""
    admitted: bool
    missed: bool
    nbytes: int = 0
    pause_ms: float = 0.0
    data_began: float = 0.0
    data_ended: float = 0.0

    def bytes_within(self, start: float, end: float) -> float:
        """Its bytes that landed in an interval, as if they had landed evenly."""
        span = self.data_ended - self.data_began
        inside = min(self.data_ended, end) - max(self.data_began, start)
        return self.nbytes * max(0.0, min(1.0, inside / span)) if span > 0 else 0.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One offered load. `goodput_ratio`: bytes of moved worlds a second, by what one sender alone brings."""

    offered_load: float
    asked: int
    admitted: int
    rejected: int
    missed: int
    goodput_ratio: float
    goodput_mbit_per_s: float
    p50_pause_ms: float
    p99_pause_ms: float
    max_total_ms: float
    rejected_by_code: dict[str, int]
    aborted_by_reason: dict[str, int]
    dropped_packets: int


async def offer(stage: Stage, every_s: float, seconds: float, terms: Terms, seed: int) -> list[Outcome]:
    """Asks for a move every `every_s` seconds, more or less by half, from sender after sender.

    Raises:
        WorldMoveError: a node failed; a rejection is an outcome.
    """
    draw = random.Random(seed)  # noqa: S311 - arrival times, no secret
    began = time.monotonic()
    senders = itertools.cycle(stage.senders)
    work: list[asyncio.Task[Outcome]] = []
    due = 0.0
    while due < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        found = _ready(stage, [next(senders) for _ in stage.senders])
        due += every_s * draw.uniform(0.5, 1.5)
        if found is not None:
            work.append(asyncio.create_task(_move(stage, *found, terms, began)))
    done, late = await asyncio.wait(work, timeout=DRAIN_S) if work else (set(), set())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    lost = [Outcome(0.0, DRAIN_S, "never ended", admitted=True, missed=True) for _ in late]
    return [task.result() for task in done] + lost


def _ready(stage: Stage, senders: Sequence[str]) -> tuple[str, str] | None:
    for sender in senders:
        world = stage.crowds[sender].take()
        if world is not None:
            return sender, world
    return None


async def _move(stage: Stage, sender: str, world: str, terms: Terms, began: float) -> Outcome:
    client = stage.clients[sender]
    asked = time.monotonic() - began
    request = MigrationRequest(
        session_id=world,
        destination=RECEIVER,
        live=False,
        horizon_ms=terms.horizon_ms,
        deadline_ms=terms.deadline_ms,
    )
    try:
        move = await client.migrate(request)
        move = await client.wait(move.id)
    except RejectedError as error:
        stage.crowds[sender].put_back(world)
        return Outcome(asked, time.monotonic() - began, error.code, admitted=False, missed=False)
    ended = time.monotonic() - began
    if move.state != "released":
        stage.crowds[sender].put_back(world)
        turned_away = move.state == "rejected"
        why = move.code if turned_away else f"{move.code}: {move.reason}"
        return Outcome(asked, ended, why, admitted=not turned_away, missed=not turned_away)
    return _moved(move, terms, asked, ended)


def _moved(move: MigrationView, terms: Terms, asked: float, ended: float) -> Outcome:
    receipt = move.receipt
    if receipt is None or receipt.pause_ms is None or receipt.data_ms is None:
        return Outcome(asked, ended, "no receipt", admitted=True, missed=True)
    late = receipt.pause_ms > terms.horizon_ms or receipt.total_ms > terms.deadline_ms
    data_began = asked + (receipt.total_ms - receipt.pause_ms) / 1000
    return Outcome(
        asked,
        ended,
        None,
        admitted=True,
        missed=late or receipt.missed,
        nbytes=receipt.sent_bytes,
        pause_ms=receipt.pause_ms,
        data_began=data_began,
        data_ended=data_began + receipt.data_ms / 1000,
    )


def summary(
    outcomes: Sequence[Outcome], load: float, window: tuple[float, float], alone: float, dropped: int
) -> Row:
    """What a load gave.

    Args:
        outcomes: of every move that was asked for.
        load: bytes offered a second, by those of the line.
        window: seconds between which goodput counts, while load was offered.
        alone: goodput of one sender alone, bytes a second.
        dropped: packets that the port dropped meanwhile.
    """
    start, end = window
    goodput = sum(each.bytes_within(start, end) for each in outcomes) / (end - start)
    pauses = [each.pause_ms for each in outcomes if each.nbytes] or [0.0]
    taken = [each for each in outcomes if each.admitted]
    codes = Counter(each.code or "" for each in outcomes if not each.admitted)
    return Row(
        offered_load=load,
        asked=len(outcomes),
        admitted=len(taken),
        rejected=len(outcomes) - len(taken),
        missed=sum(each.missed for each in taken),
        goodput_ratio=goodput / alone if alone else 0.0,
        goodput_mbit_per_s=goodput * 8 / 1e6,
        p50_pause_ms=quantile(pauses, 0.5),
        p99_pause_ms=quantile(pauses, 0.99),
        max_total_ms=max(((each.ended - each.asked) * 1000 for each in taken), default=0.0),
        rejected_by_code=dict(codes),
        aborted_by_reason=dict(Counter(each.code for each in taken if each.code is not None)),
        dropped_packets=dropped,
    )
