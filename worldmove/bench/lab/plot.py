"""The laboratory as a picture: what load brings, and what fan-in leaves of the line, gate on and off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from worldmove.bench.lab.fan_in import FanIn
from worldmove.bench.lab.load import Row


def draw(offered: Sequence[Row], crowds: Sequence[FanIn], file: Path) -> None:
    """Writes a PNG.

    Raises:
        OSError: the file can't be written.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    loaded, crowded = figure.subplots(1, 2)
    loads = [row.offered_load for row in offered]
    loaded.plot(loads, [row.goodput_ratio for row in offered], "o-", label="goodput, by one sender's")
    for name in ("admitted", "rejected", "missed"):
        shares = [getattr(row, name) / max(row.asked, 1) for row in offered]
        loaded.plot(loads, shares, "s--", label="taken on" if name == "admitted" else name)
    for gate in ("on", "off"):
        rows = [row for row in crowds if row.gate == gate]
        crowded.plot(
            [row.senders for row in rows],
            [row.goodput_mbit_per_s for row in rows],
            "o-",
            label=f"gate {gate}",
        )
    loaded.set(title="moves offered", xlabel="offered load", ylim=(0, None))
    crowded.set(title="senders at once, Mbit/s", xlabel="senders", ylim=(0, None))
    for axes in (loaded, crowded):
        axes.legend(fontsize="small")
    canvas.print_figure(str(file), format="png")
