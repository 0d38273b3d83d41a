"""`worldmove bench delta`: what a move of a cache sends while it generates, against a full resend in one run.

Two real nodes, one lane, and a gate as slow as a thin network: what counts is what has to be sent. For each
pattern one world generates; it is moved live, and moved again after a pause at once (`live=false`), in turn.

On GPUs (`gpu`) between two of them, or on one, by the path that is asked for and without a gate's rate.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import uvloop

from worldmove.bench.cache import PATTERNS, Pattern
from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import running_nodes
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import median
from worldmove.config import check
from worldmove.cuda.probe import usable
from worldmove.errors import MoveAbortedError
from worldmove.memory.arena import free_bytes, no_memory
from worldmove.memory.limits import machine_memory
from worldmove.views import Receipt

SENT_BAR = 0.16
PAUSE_BAR = 0.2
REWRITE_BAR = 1.03
DIRECT_BAR = 0.45
LOCAL_MS_BAR = 6.0
PROGRAM = "worldmove.bench.delta_actor"
GPU_PROGRAM = "worldmove.bench.delta_gpu_actor"
GPU_LANES = 8
GPU_MB = 6040


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
        data_ms: of the receipts: from the stop until both tables are equal.
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
    data_ms: float
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
    gpus: list[str] = []


class Case(msgspec.Struct, frozen=True):
    """What is measured: see `run`. `gpus`: UUIDs of both nodes' GPUs; none: host memory."""

    nbytes: int
    repeats: int
    gate_rate: str
    block_ms: float
    path: str
    gpus: tuple[str, ...] = ()


def run(
    *,
    mb: int | None = None,
    repeats: int = 3,
    gate_rate: str = "",
    block_ms: float = 500.0,
    path: str = "staged",
    gpu: bool = False,
    json: bool = False,
) -> int:
    """Measures and shows.

    Args:
        mb: size of the state in megabytes (10⁶ bytes); twice as much memory is needed. `None`: 128, on GPUs
            6040.
        repeats: live moves and full resends of each pattern.
        gate_rate: what each node lets in, as `--gate-rate` of a node; the path `local` knows no gate. Empty:
            1 Gb/s, on GPUs no limit.
        block_ms: how long a block of the world takes.
        path: `staged` or `local`; on GPUs `direct`, too.
        gpu: on GPUs.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move ended well and every byte that arrived was right.

    Raises:
        ConfigError: a node would refuse `gate_rate`, or with `gpu` there is no GPU, or CuPy is missing;
            nothing has been started.
        NoMemoryError: the machine does not have the memory.
        WorldMoveError: a move or a process failed.
    """
    if gate_rate:
        check({"gate_rate": gate_rate})
    nbytes = (mb or (GPU_MB if gpu else 128)) * 10**6
    available = free_bytes(machine_memory())
    if not gpu and 2 * nbytes > available:
        raise no_memory(2 * nbytes, available, "one arena at each node")
    gpus = uvloop.run(_pair()) if gpu else ()
    case = Case(nbytes, repeats, gate_rate or ("" if gpu else "1Gbit"), block_ms, path, gpus)
    result = uvloop.run(_measure(case))
    rate = result.gate_rate or "no gate's rate"
    title = f"{result.state_bytes / 1e6:.0f} MB, {path}, {rate}, {block_ms:g} ms a block, median of {repeats}"
    show(title, result, [line for row in result.rows for line in _lines(row, case)], json=json)
    return 0


async def _pair() -> tuple[str, str]:
    found = await usable()
    return found[0].uuid, found[1 % len(found)].uuid


def _lines(row: Row, case: Case) -> list[Line]:
    name = row.pattern
    kinds = f"{row.sent_fraction:.3f} / {row.copied_fraction:.3f} / {row.kept_fraction:.3f}"
    rewrites = row.pattern == "rewrite"
    most = DIRECT_BAR if case.path == "direct" else PAUSE_BAR
    bar = at_most(row.pause_ratio_to_full, REWRITE_BAR if rewrites else most)
    on_gpus = case.gpus and case.path == "local"
    return [
        Line(
            f"{name}: sent / copied / kept", kinds, "" if rewrites else at_most(row.sent_fraction, SENT_BAR)
        ),
        Line(
            f"{name}: pause, full resend",
            f"{row.pause_ms:.0f} ms, {row.full_pause_ms:.0f} ms, {row.rounds:g} rounds",
        ),
        Line(
            f"{name}: data",
            f"{row.data_ms:.1f} ms",
            at_most(row.data_ms, LOCAL_MS_BAR, "ms") if on_gpus and not rewrites else "",
        ),
        Line(f"{name}: pause by full resend", f"{row.pause_ratio_to_full:.3f}", "" if on_gpus else bar),
    ]


async def _measure(case: Case) -> DeltaResult:
    found = [await measured(case, pattern) for pattern in PATTERNS]
    return DeltaResult(
        rows=[row for row, _ in found],
        state_bytes=found[-1][1],
        gate_rate=case.gate_rate,
        block_ms=case.block_ms,
        repeats=case.repeats,
        path=case.path,
        gpus=list(case.gpus),
    )


async def measured(
    case: Case, pattern: Pattern, another: Callable[[], bool] = lambda: True
) -> tuple[Row, int]:
    """One pattern, on nodes of its own; its row, and how large the state is.

    Args:
        case: what is measured.
        pattern: how the cache changes.
        another: asked after each live move and its full resend, whether there is time for two more.

    Raises:
        WorldMoveError: a move or a process failed.
    """
    options = ["--path", case.path, "--lanes", str(GPU_LANES if case.gpus else 1)]
    options += ["--gate-rate", case.gate_rate] if case.gate_rate else []
    each = {name: ("--gpus", uuid) for name, uuid in zip("AB", case.gpus, strict=False)}
    words = (pattern, str(case.block_ms))
    programs: list[tuple[str, ...]] = [(GPU_PROGRAM, *words, uuid) for uuid in case.gpus]
    programs = programs or [(PROGRAM, *words)] * 2
    async with (
        running_nodes(("A", "B"), options, each) as nodes,
        shuttle(nodes, case.nbytes, programs) as session,
    ):
        live: list[Receipt] = []
        full: list[Receipt] = []
        while len(live) < case.repeats and (not live or another()):
            for receipts in (live, full):
                moved = await session.move(case.path, live=receipts is live)  # type: ignore[arg-type]
                if moved.receipt.path != case.path:
                    raise MoveAbortedError(f"the move took the path {moved.receipt.path}", reason="path")
                receipts.append(moved.receipt)
    return _row(pattern, live, full), live[0].state_bytes


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
        data_ms=median([receipt.data_ms or 0.0 for receipt in live]),
        full_pause_ms=median(full_pauses),
        total_sent_fraction=median([receipt.sent_bytes / receipt.state_bytes for receipt in live]),
        pauses_ms=pauses,
        full_pauses_ms=full_pauses,
    )
