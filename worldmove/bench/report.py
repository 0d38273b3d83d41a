"""Shows what was measured: a table for people, or one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table


class Line(NamedTuple):
    """One row of the table: what, how much, and what it should be (empty: no bar)."""

    what: str
    value: str
    bar: str = ""


def show(title: str, result: msgspec.Struct, lines: Sequence[Line], *, json: bool) -> None:
    """Writes `result` as JSON to stdout, or `lines` as a table."""
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("bar")
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(title, highlight=False)
    console.print(table)


def at_least(value: float, bar: float) -> str:
    """`≥ 0.65, met`, or that it was not."""
    return f"≥ {bar:g}, {'met' if value >= bar else 'NOT MET'}"


def at_most(value: float, bar: float, unit: str = "") -> str:
    """`≤ 20 µs, met`, or that it was not."""
    return f"≤ {bar:g}{unit and ' '}{unit}, {'met' if value <= bar else 'NOT MET'}"
