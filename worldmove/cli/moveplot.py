"""A move as a picture, from its receipt: blocks of the world, rounds of copying, the pause, bytes by kind."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from worldmove import picture
from worldmove.cli.tables import ms, readable, size
from worldmove.errors import ConflictError
from worldmove.views import MigrationView, Receipt, RoundView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 11.0
KINDS = {"sent": "#d55e00", "repaired": "#cc79a7", "copied": "#0072b2", "kept": "#bbbbbb"}
"""What became of bytes, in the colours of its bars."""
SPANS = {"data": "#f7f1a0", "commit": "#e69f00", "resume": "#009e73"}
"""The parts of a pause."""
LONGEST_ID = 48


def draw(view: MigrationView) -> Figure:
    """Draws a move that has ended: time runs to the right in the upper two parts, bytes in the lower one.

    A receipt of a version that wrote no times shows its rounds end to end, without blocks and pause.

    Raises:
        ConflictError: the move has no receipt yet.
        ConfigError: matplotlib is not installed.
    """
    receipt = view.receipt
    if receipt is None:
        raise ConflictError(
            f"move {view.id} is {view.state}: it is drawn from its receipt, once it has ended"
        )
    rows = 0.25 * max(len(receipt.rounds), 2)
    figure = picture.new(WIDTH, 4.2 + 2 * rows)
    blocks, rounds, kinds = figure.subplots(3, 1, height_ratios=[2.0, 0.8 + rows, 0.8 + rows])
    _blocks(blocks, receipt)
    _rounds(rounds, receipt)
    for axes in (blocks, rounds):
        _pause(axes, receipt)
        axes.set_xlim(0, _end(receipt))
    if receipt.stopped_ms is not None:
        rounds.legend(fontsize="small", loc="lower left")
    _bytes(kinds, receipt)
    # What a node has written is text, whatever it holds, and no mathematics to be set.
    figure.suptitle(_title(receipt), parse_math=False)
    return figure


def _title(receipt: Receipt) -> str:
    session = readable(receipt.session_id)
    if len(session) > LONGEST_ID:
        session = f"{session[:LONGEST_ID]}…"
    way = f"{readable(receipt.source)} → {readable(receipt.destination)}"
    ended = receipt.state if receipt.code is None else f"{receipt.state} ({readable(receipt.code)})"
    paused = "" if receipt.pause_ms is None else f", paused {ms(receipt.pause_ms)} ms"
    path = f", {receipt.path}" if receipt.path else ""
    what = f"{session}: {way}{path}, {size(receipt.state_bytes)}"
    return f"{what}\n{ended} after {ms(receipt.total_ms)} ms{paused}"


def _timed(receipt: Receipt) -> bool:
    return all(each.start_ms is not None for each in receipt.rounds)


def _starts(rounds: tuple[RoundView, ...]) -> list[float]:
    known = [each.start_ms for each in rounds if each.start_ms is not None]
    if len(known) == len(rounds):
        return known
    return [0.0, *accumulate(each.ms for each in rounds)][:-1]


def _end(receipt: Receipt) -> float:
    ends = [start + each.ms for start, each in zip(_starts(receipt.rounds), receipt.rounds, strict=True)]
    return max([receipt.total_ms, receipt.resumed_ms or 0.0, *ends, 1.0])


def _blocks(axes: Axes, receipt: Receipt) -> None:
    axes.set(ylabel="block", title="blocks of the world")
    if not receipt.blocks:
        _say(axes, "the receipt tells of no block that ended before the world stood")
        return
    times, numbers = [each.ms for each in receipt.blocks], [each.number for each in receipt.blocks]
    until = receipt.resumed_ms if receipt.resumed_ms is not None else times[-1]
    axes.plot([*times, max(until, times[-1])], [*numbers, numbers[-1]], color="black")
    axes.plot(times, numbers, "o", color="black", markersize=3)
    axes.locator_params(axis="y", integer=True, min_n_ticks=1)


def _pause(axes: Axes, receipt: Receipt) -> None:
    """Shades how long the world stood; by its parts where the move was adopted."""
    start, end = receipt.stopped_ms, receipt.resumed_ms
    if start is None:
        return
    commit, resume = receipt.commit_ms, receipt.resume_ms
    if end is None or receipt.data_ms is None or commit is None or resume is None:
        label = "the world stands" if end is not None else "the world stands; its end is not told"
        axes.axvspan(start, end or _end(receipt), color=SPANS["data"], label=label, zorder=0)
        return
    edges = [start, end - resume - commit, end - resume, end]
    for (name, colour), left, right in zip(SPANS.items(), edges, edges[1:], strict=False):
        label = f"pause: {name} {ms(right - left)} ms"
        axes.axvspan(left, right, color=colour, label=label, zorder=0)


def _rounds(axes: Axes, receipt: Receipt) -> None:
    told = "ms since the request"
    if not _timed(receipt):
        told = "ms of copying, end to end: the receipt does not tell when rounds began"
    axes.set(ylabel="round", title="rounds", xlabel=told)
    _numbered(axes, receipt.rounds)
    for start, each in zip(_starts(receipt.rounds), receipt.rounds, strict=True):
        colour = "black" if each.final else "#56b4e9"
        axes.broken_barh([(start, each.ms)], (each.number - 0.35, 0.7), color=colour)


def _bytes(axes: Axes, receipt: Receipt) -> None:
    axes.set(ylabel="round", title="bytes by kind")
    _numbered(axes, receipt.rounds)
    axes.xaxis.set_major_formatter(lambda value, _position: size(value))
    widest = 1
    for each in receipt.rounds:
        parts = {"sent": each.bytes, "repaired": 0, "copied": each.copied_bytes, "kept": 0}
        if each.final:
            parts |= {"repaired": receipt.repair_bytes, "kept": receipt.kept_bytes}
        left = 0
        for name, nbytes in parts.items():
            axes.barh(each.number, nbytes, 0.7, left=left, color=KINDS[name])
            left += nbytes
        said = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes)
        axes.text(left, each.number, f"  {said or 'nothing'}", va="center", fontsize="small")
        widest = max(widest, left)
    axes.set_xlim(0, widest * 1.6)  # room for what is said beside the longest bar
    for name, colour in KINDS.items():
        axes.bar(0, 0, color=colour, label=name)
    axes.legend(fontsize="small", loc="lower right")


def _numbered(axes: Axes, rounds: tuple[RoundView, ...]) -> None:
    """One row a round, the first one on top."""
    if not rounds:
        _say(axes, "no round of copying")
        return
    shown = [f"{each.number} (paused)" if each.final else str(each.number) for each in rounds]
    axes.set_yticks([each.number for each in rounds], labels=shown)
    axes.set_ylim(len(rounds) + 0.6, 0.4)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="grey")
    axes.set_yticks([])
