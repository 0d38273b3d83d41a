"""What a simulation found, load by load; beside it, where there is one, what the laboratory measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from worldmove.bench.stats import quantile
from worldmove.errors import ConfigError
from worldmove.simulate.engine import Run
from worldmove.simulate.moving import Ended
from worldmove.simulate.scenario import Scenario


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One offered load. `goodput_ratio`: bytes of moved worlds a second, by what all receivers carry."""

    offered_load: float
    asked: int
    admitted: int
    rejected: int
    missed: int
    goodput_ratio: float
    p50_pause_ms: float
    p99_pause_ms: float
    max_pause_ms: float
    p99_total_ms: float
    rejected_by_code: dict[str, int]
    collapses: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the laboratory, as `worldmove bench gate --json` has it; more keys are left alone."""

    offered_load: float
    admitted: int
    rejected: int
    missed: int
    goodput_ratio: float
    p99_pause_ms: float


class _Laboratory(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[Measured, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation. `measured`: rows of the laboratory for the same loads, to stand beside `rows`."""

    scenario: Scenario
    model: str
    moves: int
    seconds: float
    rows: tuple[Row, ...]
    measured: tuple[Measured, ...] = ()


def summary(scenario: Scenario, load: float, run: Run) -> Row:
    """One run in a row; goodput counts while load was offered, once the first moves could be over."""
    sizes, line = scenario.moves.sizes, scenario.line
    alone = line.bytes_per_s * line.share(1)
    end = scenario.moves.seconds
    settled = 2 * run.every_s * scenario.receivers + max(sizes) / alone + scenario.costs.open_ms / 1000
    start = min(settled, end / 2)
    carried = sum(_within(each, start, end) for each in run.ended if not each.missed)
    taken = [each for each in run.ended if each.admitted]
    pauses = [1000 * each.pause_s for each in taken] or [0.0]
    totals = [1000 * each.total_s for each in taken] or [0.0]
    return Row(
        offered_load=load,
        asked=len(run.ended),
        admitted=len(taken),
        rejected=len(run.ended) - len(taken),
        missed=sum(each.missed for each in taken),
        goodput_ratio=carried / ((end - start) * alone * scenario.receivers),
        p50_pause_ms=quantile(pauses, 0.5),
        p99_pause_ms=quantile(pauses, 0.99),
        max_pause_ms=max(pauses),
        p99_total_ms=quantile(totals, 0.99),
        rejected_by_code=dict(Counter(each.code for each in run.ended if each.code is not None)),
        collapses=run.collapses,
    )


def laboratory(file: Path, loads: Sequence[float]) -> tuple[Measured, ...]:
    """What the laboratory measured for these loads.

    Raises:
        ConfigError: the file is no document of `worldmove bench gate --json`.
    """
    try:
        rows = msgspec.json.decode(file.read_bytes(), type=_Laboratory).rows
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{file} is no result of worldmove bench gate: {error}", option="compare"
        ) from error
    return tuple(row for row in rows if row.offered_load in loads)


def _within(ended: Ended, start: float, end: float) -> float:
    found = 0.0
    for nbytes, began, over in ended.spans:
        inside = min(over, end) - max(began, start)
        if inside > 0:
            found += nbytes * min(1.0, inside / (over - began)) if over > began else nbytes
    return found
