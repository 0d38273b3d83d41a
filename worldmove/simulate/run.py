"""`worldmove simulate`: a scenario from a file, as table, document and picture."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from worldmove import picture
from worldmove.simulate.engine import Run
from worldmove.simulate.outcome import Result, Row, laboratory, summary
from worldmove.simulate.plot import draw
from worldmove.simulate.scenario import Scenario, read


def simulate(scenario: Scenario, compare: Path | None = None) -> Result:
    """Simulates every load of a scenario.

    Args:
        scenario: as `read` gives it.
        compare: a document of `worldmove bench gate --json`, whose rows stand beside those found here.

    Raises:
        ConfigError: `compare` is no such document.
    """
    measured = laboratory(compare, scenario.moves.loads) if compare is not None else ()
    began = time.perf_counter()
    rows: list[Row] = []
    for load in scenario.moves.loads:
        run = Run(scenario, load)
        run.run()
        rows.append(summary(scenario, load, run))
    return Result(
        scenario=scenario,
        model="grants" if scenario.by_grants else "rates",
        moves=sum(row.asked for row in rows),
        seconds=time.perf_counter() - began,
        rows=tuple(rows),
        measured=measured,
    )


def run(*, file: Path, plot: Path | None = None, compare: Path | None = None, json: bool = False) -> int:
    """Simulates and shows.

    Args:
        file: the scenario, TOML.
        plot: a PNG of the same, as `worldmove.picture` writes it.
        compare: a document of `worldmove bench gate --json`.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if no move that was taken on was late.

    Raises:
        ConfigError: the scenario is wrong, `compare` is no such document, or `plot` can't be written.
    """
    if plot is not None:
        picture.check(plot)
    result = simulate(read(file), compare)
    if plot is not None:
        picture.save(draw(result), plot)
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        Console().print(_table(result))
    return 0 if not any(row.missed for row in result.rows) else 1


def _table(result: Result) -> Table:
    title = (
        f"{result.scenario.name}: {result.moves} moves of {result.scenario.nodes} nodes, by {result.model}"
    )
    table = Table(title=f"{title}, in {result.seconds:.1f} s", box=None, pad_edge=False)
    for name in ("load", "asked", "taken on", "rejected", "missed", "goodput", "pause p50", "p99 ms"):
        table.add_column(name, justify="right")
    beside = {row.offered_load: row for row in result.measured}
    if beside:
        table.add_column("laboratory: taken on, missed, goodput, p99 ms")
    for row in result.rows:
        cells = [f"{row.offered_load:g}", *map(str, (row.asked, row.admitted, row.rejected, row.missed))]
        cells += [f"{row.goodput_ratio:.2f}", f"{row.p50_pause_ms:.0f}", f"{row.p99_pause_ms:.0f}"]
        if beside:
            there = beside.get(row.offered_load)
            cells.append(
                ""
                if there is None
                else f"{there.admitted}, {there.missed}, {there.goodput_ratio:.2f}, {there.p99_pause_ms:.0f}"
            )
        table.add_row(*cells)
    return table
