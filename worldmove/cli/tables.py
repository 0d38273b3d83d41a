"""Views as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from worldmove.views import DryRun, MigrationView, NodeView, PeerNode, SessionView

_STYLES = {
    "live": "green",
    "paused": "yellow",
    "unattended": "yellow",
    "fenced": "red",
    "lost": "red",
    "ended": "dim",
    "elsewhere": "dim",
    "released": "green",
    "aborted": "red",
    "rejected": "red",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")
WIDE = 120
"""Columns of a screen from which on a list of moves shows everything."""


def size(nbytes: float | None) -> str:
    """Bytes with a unit, powers of 1000."""
    if nbytes is None:
        return "–"
    for unit in _UNITS:
        if abs(nbytes) < 1000 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError


def amount(name: str, value: float) -> str:
    """A number by the unit that its name ends in."""
    if name.endswith("bytes_per_s"):
        return f"{size(value)}/s"
    if name.endswith("_ms"):
        return f"{value:.1f} ms"
    return size(value) if name.endswith("bytes") else f"{value:g}"


def readable(text: str) -> str:
    """What another node or client wrote, without control characters: it must not write to this terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def ms(value: float | None) -> str:
    """Milliseconds."""
    return "–" if value is None else f"{value:.1f}"


def state(name: str) -> Text:
    """A state in its colour; states under way are blue."""
    return Text(name, style=_STYLES.get(name, "cyan"))


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns.split():
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=True)
    return table


def nodes(items: Iterable[PeerNode]) -> Table:
    """Nodes of the fleet."""
    table = _table("Nodes", "name url >incarnation alive boot_id")
    for node in items:
        alive = Text("yes", style="green") if node.alive else Text("no", style="red")
        table.add_row(node.name, node.url, str(node.incarnation), alive, node.boot_id[:8])
    return table


def sessions(items: Iterable[SessionView]) -> Table:
    """Sessions."""
    table = _table("Sessions", "id owner state >epoch >block >bytes >ranks model endpoint")
    for view in items:
        table.add_row(
            Text(view.id),
            view.owner,
            state(view.state),
            str(view.epoch),
            str(view.block),
            # A node that doesn't own the session knows its record, not its memory.
            size(view.bytes if view.ranks else None),
            str(view.ranks or "–"),
            Text(view.model),
            Text(view.endpoint or "–"),
        )
    return table


def moves(items: Iterable[MigrationView], width: int) -> Table:
    """Moves, with the times of their receipts; on a narrow screen only what fits beside their whole ids."""
    columns = "id session from to state path >round >state_bytes >sent >pause_ms >total_ms reason"
    chosen = columns.split()
    if width < WIDE:
        chosen = [name for name in chosen if name not in ("path", ">round", ">state_bytes", ">sent")]
    table = _table("Moves", " ".join(chosen))
    for view in items:
        receipt = view.receipt
        cells: dict[str, str | Text] = {
            "id": view.id,
            "session": Text(view.session_id),
            "from": view.source,
            "to": view.destination,
            "state": state(view.state),
            "path": view.path or "–",
            ">round": str(view.round),
            ">state_bytes": size(view.state_bytes),
            ">sent": size(view.sent_bytes),
            ">pause_ms": ms(receipt.pause_ms if receipt else None),
            ">total_ms": ms(receipt.total_ms if receipt else view.elapsed_ms),
            "reason": Text(view.code or ""),
        }
        table.add_row(*(cells[name] for name in chosen))
    return table


def verdict(view: DryRun) -> Table:
    """Every term of a verdict: what is compared first, and where it does not hold in red."""
    table = _table("Verdict", "term >required >available")
    both = view.required.keys() & view.available.keys()
    either = view.required.keys() ^ view.available.keys()
    for name in [*sorted(both), *sorted(either)]:
        need, there = view.required.get(name), view.available.get(name)
        table.add_row(
            Text(readable(name)),
            "–" if need is None else amount(name, need),
            "–" if there is None else amount(name, there),
            style="red" if need is not None and there is not None and need > there else "",
        )
    return table


def move(view: MigrationView) -> Table:
    """One move with everything that its receipt holds."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name in ("id", "session_id", "source", "destination", "state", "path", "round"):
        value = getattr(view, name)
        table.add_row(name, state(value) if name == "state" else Text("–" if value is None else str(value)))
    table.add_row("state_bytes", size(view.state_bytes))
    table.add_row("sent_bytes", size(view.sent_bytes))
    if view.code or view.reason:
        table.add_row("code", Text(view.code or "–"))
        table.add_row("reason", Text(readable(view.reason or "–")))
    receipt = view.receipt
    if receipt is None:
        table.add_row("elapsed_ms", ms(view.elapsed_ms))
        return table
    for name in ("kept_bytes", "copied_bytes"):
        table.add_row(name, size(getattr(receipt, name)))
    for name in ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms"):
        table.add_row(name, ms(getattr(receipt, name)))
    for name in ("block", "epoch", "source_root", "destination_root", "finished_at"):
        value = getattr(receipt, name)
        table.add_row(name, Text("–" if value is None else str(value)))
    for one in receipt.rounds:
        final = " (paused)" if one.final else ""
        copied = f", {size(one.copied_bytes)} copied" if one.copied_bytes else ""
        again = f" ({size(one.again_bytes)} of it twice)" if one.again_bytes else ""
        took = f"{one.leaves} leaves, {size(one.bytes)}{again}{copied}, {ms(one.ms)} ms"
        table.add_row(f"round {one.number}{final}", took)
    for leaf in receipt.damaged:
        table.add_row("damaged", Text(f"{leaf.region}, leaf {leaf.leaf}, sent {leaf.attempts} times more"))
    return table


def node(view: NodeView) -> Table:
    """One node: memory, gate, processes."""
    table = _table(f"Node {view.name}", "device kind >total >free >granted >waiting >lanes >sessions >moves")
    for device in view.devices:
        table.add_row(
            device.uuid,
            device.kind,
            size(device.total_bytes),
            size(device.free_bytes),
            size(view.gate.granted_bytes),
            str(view.gate.waiting),
            str(len(view.lanes)),
            str(view.sessions),
            str(view.migrations),
        )
    return table
