"""`worldmove bench path --gpu`: a verified move between GPUs against a bare copy of the same bytes.

Two real nodes, one for each GPU (with one GPU, both on that one), in one run with the copies. The standby's
memory is poisoned before each move, and what has arrived is compared on the GPU, byte for byte, with a copy
that never travelled: see `worldmove.bench.gpu_actor`, which ends a benchmark whose bytes are wrong.
"""

from __future__ import annotations

import msgspec
import uvloop

from worldmove.bench.gpu_raw import raw_copies
from worldmove.bench.moves import Moved, Shuttle, shuttle
from worldmove.bench.nodes import running_nodes
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import median
from worldmove.cuda.driver import DeviceInfo
from worldmove.cuda.probe import usable
from worldmove.errors import MoveAbortedError
from worldmove.views import PathChoice

REGIONS = 60
WORDS = 4
"""A region's last dimension: its bytes are a multiple of 8, as `gpu_actor` wants them."""

ITEM_BYTES = 2
WARM_UP = 2
RATIO_RAW_BAR = 1.08
HANDOVER_MS_BAR = 2.0
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")


class GpuPathResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, medians of `repeats` moves, in milliseconds.

    Attributes:
        path: the way that all moves took. devices: UUIDs of source and destination; names: of the products.
        raw_ms: a bare copy of as many bytes by the copy engines, before and after the moves.
        data_ms: from the source's last rank stopped until both leaf tables were equal.
        ratio_data_raw: the last by the first. handover_ms: commit and resume together.
        gb_per_s: 10⁹ bytes of state a second of `data_ms`.
        runs: the single times, in the order in which they were taken.
    """

    path: str
    devices: tuple[str, str]
    names: tuple[str, str]
    state_bytes: int
    regions: int
    repeats: int
    raw_ms: float
    data_ms: float
    ratio_data_raw: float
    handover_ms: float
    pause_ms: float
    prepare_ms: float
    gb_per_s: float
    runs: dict[str, list[float]]


def run(*, gb: float = 6.04, repeats: int = 10, path: PathChoice = "local", json: bool = False) -> int:
    """Measures and shows.

    Args:
        gb: size of the session in gigabytes (10⁹ bytes); twice as much GPU memory is needed, four times with
            one GPU.
        repeats: moves that are timed.
        path: which way they take.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move ended well, with equal roots and equal bytes.

    Raises:
        ConfigError: there is no GPU, or CuPy is missing; nothing has been started.
        NoMemoryError: a GPU has not the memory.
        WorldMoveError: a move or a process failed.
    """
    result = uvloop.run(_measure(max(int(gb * 1e9) // (REGIONS * WORDS * ITEM_BYTES), 1), repeats, path))
    local = result.path == "local"
    lines = [
        Line("bare copy", f"{result.raw_ms:.2f} ms"),
        Line(f"verified move, path {result.path}: data", f"{result.data_ms:.2f} ms"),
        Line(
            "data by bare copy",
            f"{result.ratio_data_raw:.3f}",
            at_most(result.ratio_data_raw, RATIO_RAW_BAR) if local else "",
        ),
        Line(
            "commit and resume",
            f"{result.handover_ms:.2f} ms",
            at_most(result.handover_ms, HANDOVER_MS_BAR, "ms") if local else "",
        ),
        Line("pause", f"{result.pause_ms:.2f} ms"),
        Line("prepare", f"{result.prepare_ms:.0f} ms"),
    ]
    show(f"{result.state_bytes / 1e9:.2f} GB, {' → '.join(result.names)}", result, lines, json=json)
    return 0


async def _measure(rows: int, repeats: int, path: PathChoice) -> GpuPathResult:
    there, here = await _pair()
    pair = (there.uuid, here.uuid)
    region_bytes = rows * WORDS * ITEM_BYTES
    copies = [await raw_copies(pair, REGIONS, region_bytes)]
    moves = await _moves(pair, rows, repeats, path)
    copies.append(await raw_copies(pair, REGIONS, region_bytes))
    runs = {name: [float(getattr(move.receipt, name) or 0) for move in moves] for name in TIMES}
    runs["raw_ms"] = [each for some in copies for each in some.whole]
    raw_ms, data_ms = median(runs["raw_ms"]), median(runs["data_ms"])
    nbytes = moves[0].receipt.state_bytes
    return GpuPathResult(
        path=str(moves[0].receipt.path),
        devices=pair,
        names=(there.name, here.name),
        state_bytes=nbytes,
        regions=REGIONS,
        repeats=repeats,
        raw_ms=raw_ms,
        data_ms=data_ms,
        ratio_data_raw=data_ms / raw_ms if raw_ms else 0.0,
        handover_ms=median(
            [commit + resume for commit, resume in zip(runs["commit_ms"], runs["resume_ms"], strict=True)]
        ),
        pause_ms=median(runs["pause_ms"]),
        prepare_ms=median([move.prepare_ms for move in moves]),
        gb_per_s=nbytes / data_ms / 1e6,
        runs=runs,
    )


async def _pair() -> tuple[DeviceInfo, DeviceInfo]:
    """The first two GPUs, or the only one twice."""
    found = await usable()
    return found[0], found[1 % len(found)]


async def _moves(pair: tuple[str, str], rows: int, repeats: int, path: PathChoice) -> list[Moved]:
    programs = [("worldmove.bench.gpu_actor", device, str(REGIONS), f"{rows},{WORDS}") for device in pair]
    each = {name: ("--gpus", device) for name, device in zip("AB", pair, strict=True)}
    async with running_nodes(("A", "B"), ("--path", path), each) as nodes, shuttle(nodes, 0, programs) as way:
        return [await _move(way, path) for _ in range(repeats + WARM_UP)][WARM_UP:]


async def _move(way: Shuttle, path: PathChoice) -> Moved:
    moved = await way.move(path)
    if path not in (moved.receipt.path, "auto"):
        raise MoveAbortedError(f"the move took the path {moved.receipt.path}", reason="path")
    return moved
