"""`worldmove bench delta`: what a move of a cache sends while it generates, against a full resend in one run.

Two real nodes, one lane, and a gate as slow as a thin network: what counts is what has to be sent. For each
pattern one world generates; it is moved live, and moved again after a pause at once (`live=false`), in turn.
"""

from __future__ import annotations

import msgspec
import uvloop

from worldmove.bench.cache import PATTERNS, Pattern
from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import running_nodes
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import median
from worldmove.errors import MoveAbortedError
from worldmove.memory.arena import free_bytes, no_memory
from worldmove.memory.limits import machine_memory
from worldmove.views import Receipt

SENT_BAR = 0.16
PAUSE_BAR = 0.2
REWRITE_BAR = 1.03
PROGRAM = "worldmove.bench.delta_actor"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One pattern; medians of the live moves, fractions of the state in their last, paused round.

    Attributes:
        pattern: how the cache changes (`worldmove.bench.cache`).
        sent_fraction: crossed the network. copied_fraction: lay elsewhere at the destination. kept_fraction:
            lay where it belongs.
        rounds: the paused one included.
        pause_ms, total_ms: of the receipts.
        pause_ratio_to_full: `pause_ms` by that of the moves that sent everything after they had paused.
        full_pause_ms: that one.
        total_sent_fraction: what all rounds together sent.
        pauses_ms, full_pauses_ms: every single one.
    """

    pattern: Pattern
    sent_fraction: float
    copied_fraction: float
    kept_fraction: float
    rounds: float
    pause_ms: float
    pause_ratio_to_full: float
    total_ms: float
    full_pause_ms: float
    total_sent_fraction: float
    pauses_ms: list[float]
    full_pauses_ms: list[float]


class DeltaResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and under which conditions."""

    rows: list[Row]
    state_bytes: int
    gate_rate: str
    block_ms: float
    repeats: int
    path: str


def run(
    *,
    mb: int = 128,
    repeats: int = 3,
    gate_rate: str = "1Gbit",
    block_ms: float = 500.0,
    path: str = "staged",
    json: bool = False,
) -> int:
    """Measures and shows.

    Args:
        mb: size of the state in megabytes (10⁶ bytes); twice as much memory is needed.
        repeats: live moves and full resends of each pattern.
        gate_rate: what each node lets in, as `--gate-rate` of a node; the path `local` knows no gate.
        block_ms: how long a block of the world takes.
        path: `staged` or `local`.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move ended well and every byte that arrived was right.

    Raises:
        NoMemoryError: the machine does not have the memory.
        WorldMoveError: a move or a process failed.
    """
    available = free_bytes(machine_memory())
    if 2 * mb * 10**6 > available:
        raise no_memory(2 * mb * 10**6, available, "one arena at each node")
    result = uvloop.run(_measure(mb * 10**6, repeats, gate_rate, block_ms, path))
    title = f"{result.state_bytes / 1e6:.0f} MB, {gate_rate}, {block_ms:g} ms a block, median of {repeats}"
    show(title, result, [line for row in result.rows for line in _lines(row)], json=json)
    return 0


def _lines(row: Row) -> list[Line]:
    name = row.pattern
    kinds = f"{row.sent_fraction:.3f} / {row.copied_fraction:.3f} / {row.kept_fraction:.3f}"
    rewrites = row.pattern == "rewrite"
    bar = at_most(row.pause_ratio_to_full, REWRITE_BAR if rewrites else PAUSE_BAR)
    return [
        Line(
            f"{name}: sent / copied / kept", kinds, "" if rewrites else at_most(row.sent_fraction, SENT_BAR)
        ),
        Line(
            f"{name}: pause, full resend",
            f"{row.pause_ms:.0f} ms, {row.full_pause_ms:.0f} ms, {row.rounds:g} rounds",
        ),
        Line(f"{name}: pause by full resend", f"{row.pause_ratio_to_full:.3f}", bar),
    ]


async def _measure(nbytes: int, repeats: int, gate_rate: str, block_ms: float, path: str) -> DeltaResult:
    options = ("--path", path, "--lanes", "1", "--gate-rate", gate_rate)
    rows, state = [], 0
    for pattern in PATTERNS:
        program = (PROGRAM, pattern, str(block_ms))
        async with (
            running_nodes(("A", "B"), options) as nodes,
            shuttle(nodes, nbytes, (program, program)) as session,
        ):
            live, full = await _in_turn(session, repeats, path)
        rows.append(_row(pattern, live, full))
        state = live[0].state_bytes
    return DeltaResult(
        rows=rows, state_bytes=state, gate_rate=gate_rate, block_ms=block_ms, repeats=repeats, path=path
    )


async def _in_turn(session: Shuttle, repeats: int, path: str) -> tuple[list[Receipt], list[Receipt]]:
    live: list[Receipt] = []
    full: list[Receipt] = []
    for _ in range(repeats):
        for receipts in (live, full):
            moved = await session.move(path, live=receipts is live)  # type: ignore[arg-type]
            if moved.receipt.path != path:
                raise MoveAbortedError(f"the move took the path {moved.receipt.path}", reason="path")
            receipts.append(moved.receipt)
    return live, full


def _row(pattern: Pattern, live: list[Receipt], full: list[Receipt]) -> Row:
    pauses = [receipt.pause_ms or 0.0 for receipt in live]
    full_pauses = [receipt.pause_ms or 0.0 for receipt in full]
    return Row(
        pattern=pattern,
        sent_fraction=median([receipt.rounds[-1].bytes / receipt.state_bytes for receipt in live]),
        copied_fraction=median([receipt.copied_bytes / receipt.state_bytes for receipt in live]),
        kept_fraction=median([receipt.kept_bytes / receipt.state_bytes for receipt in live]),
        rounds=median([float(len(receipt.rounds)) for receipt in live]),
        pause_ms=median(pauses),
        pause_ratio_to_full=median(pauses) / median(full_pauses),
        total_ms=median([receipt.total_ms for receipt in live]),
        full_pause_ms=median(full_pauses),
        total_sent_fraction=median([receipt.sent_bytes / receipt.state_bytes for receipt in live]),
        pauses_ms=pauses,
        full_pauses_ms=full_pauses,
    )
