"""A simulation as a picture: goodput, what became of the moves, and pauses, against offered load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldmove import picture
from worldmove.simulate.outcome import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Result) -> Figure:
    """Draws it, 12 by 3.6 inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = picture.new(12, 3.6)
    carried, moves, pauses = figure.subplots(1, 3)
    loads = [row.offered_load for row in result.rows]
    carried.plot(loads, [row.goodput_ratio for row in result.rows], "o-", label="simulated")
    carried.plot(loads, [min(load, 1.0) for load in loads], ":", color="grey", label="what is there")
    pauses.plot(loads, [row.p50_pause_ms for row in result.rows], "o-", label="median")
    pauses.plot(loads, [row.p99_pause_ms for row in result.rows], "s-", label="99th percentile")
    pauses.axhline(result.scenario.moves.horizon_ms, ls=":", color="grey", label="horizon")
    if result.measured:
        there = [row.offered_load for row in result.measured]
        carried.plot(there, [row.goodput_ratio for row in result.measured], "x", label="laboratory")
        pauses.plot(there, [row.p99_pause_ms for row in result.measured], "x", label="laboratory, 99th")
    for name in ("admitted", "rejected", "missed"):
        share = [getattr(row, name) / max(row.asked, 1) for row in result.rows]
        moves.plot(loads, share, "o-", label="taken on" if name == "admitted" else name)
    for axes, title in (
        (carried, "goodput, by the lines"),
        (moves, "share of the moves"),
        (pauses, "pause, ms"),
    ):
        axes.set(title=title, xlabel="offered load", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.suptitle(
        f"{result.scenario.name}: {result.scenario.nodes} nodes, {result.moves} moves", parse_math=False
    )
    return figure
