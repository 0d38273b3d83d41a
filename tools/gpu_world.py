"""The video world generates while it moves: bits against a twin, and what moving costs its blocks.

    python tools/gpu_world.py [--paths local,direct,staged] [--moves 20] [--lanes 8] [--out DIR]

For each path a tour of two nodes, one for each GPU; afterwards a twin that never moved generates the same
blocks on the second GPU. Every picture, and the whole state of every arrival, is compared. There are medians
of the twin's block times (no node at all), of those that no move overlapped, and of those that one did; with
`--neighbour` again while another world generates on the second GPU. Writes gpu_world.json to DIR ($OUT, or
here) and exits with 0 only if every bit was equal. `--device cpu --shape small` tries the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from worldmove.bench.nodes import running_nodes
from worldmove.bench.stats import median, quantile
from worldmove.client import AsyncClient
from worldmove.demo import programs, report
from worldmove.demo.cast import Actor, Cast
from worldmove.demo.film import Film
from worldmove.demo.screen import Screen
from worldmove.demo.tour import Options, Tour, compare
from worldmove.errors import WorldMoveError

FULL = 7
"""Blocks that fill the window: the first ones are faster, and don't count."""


def shown(values: list[float]) -> dict[str, float] | None:
    """Median, 99th percentile and number of some times in ms."""
    if not values:
        return None
    return {"p50_ms": median(values), "p99_ms": quantile(values, 0.99), "blocks": len(values)}


def overlapped(tour: Tour, told: float, ms: float) -> bool:
    """Whether a move was under way while a block was generated."""
    return any(told - ms / 1000 < end and told > start for start, end in tour.spans)


async def neighbour(stack: AsyncExitStack, play: programs.Programs, url: str) -> None:
    """Another world on the second node, which generates on and on."""
    cast = await stack.enter_async_context(Cast(stack.enter_context(Film())))
    given = {"role": "world", "url": url, "session": "neighbour", **play.common, **play.actors["B"]}
    await cast.enter("B", play.actor, *programs.words(given))
    await cast.until(lambda: cast.owner is not None and cast.owner.block > 1, "the neighbour's block", 180)


async def tour_of(options: Options, lanes: int, beside: bool) -> tuple[dict[str, Any], list[report.Move]]:
    """One path: moves, comparison, times."""
    quiet = Screen(Console(stderr=True), quiet=True)
    with Film() as film, quiet:
        async with AsyncExitStack() as stack:
            common = ("--path", options.path, "--lanes", str(lanes))
            nodes = await stack.enter_async_context(running_nodes(programs.NODES, common, options.play.nodes))
            clients = {node.name: await stack.enter_async_context(AsyncClient(node.url)) for node in nodes}
            if beside:
                await neighbour(stack, options.play, nodes[1].url)
            tour = Tour(options, film, clients, quiet)
            await stack.enter_async_context(tour.cast)
            await tour.begin(nodes)
            moves = [await tour.move(number) for number in range(1, options.moves + 1)]
            await tour.ready()
        twin: Actor = await compare(film, options, quiet)
        found, faults = report.outcome(film, moves, options.moves)
        blocks = tour.blocks[FULL:]
        return {
            "path": options.path,
            "neighbour": beside,
            "ok": found.ok,
            "faults": faults,
            "frames_equal": found.frames_equal,
            "frames_compared": found.frames_compared,
            "states_equal": film.states_equal,
            "states_compared": len(film.states),
            "twin": shown(twin.block_ms[FULL:]),
            "between_moves": shown([ms for told, ms in blocks if not overlapped(tour, told, ms)]),
            "during_moves": shown([ms for told, ms in blocks if overlapped(tour, told, ms)]),
            "pause_ms": median([move.pause_ms or 0.0 for move in moves]),
            "data_ms": median([move.data_ms or 0.0 for move in moves]),
            "total_ms": median([move.total_ms for move in moves]),
            "sent_fraction": median([move.sent_bytes / max(move.state_bytes, 1) for move in moves]),
            "moves": [json.loads(report.msgspec.json.encode(move)) for move in moves],
        }, moves


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every path in turn; one that fails says why."""
    devices = ("cpu", "cpu") if options.device == "cpu" else await programs.two_gpus()
    play = programs.video(devices, options.shape, options.block_ms)
    rows = []
    for path in options.paths.split(","):
        for beside in (False, True) if options.neighbour else (False,):
            began = time.monotonic()
            try:
                row, _ = await tour_of(Options(options.moves, play, path), options.lanes, beside)
            except WorldMoveError as error:
                row = {"path": path, "neighbour": beside, "ok": False, "faults": [f"{error.code}: {error}"]}
            row["seconds"] = time.monotonic() - began
            rows.append(row)
            sys.stdout.write(json.dumps({key: row[key] for key in row if key != "moves"}) + "\n")
            sys.stdout.flush()
    return rows


def main() -> int:
    """Runs and writes; 0 only if every bit was equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--paths", default="local,direct,staged")
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--shape", default="self-forcing")
    parser.add_argument("--block-ms", type=float, default=1.0)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    document = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "shape": options.shape,
        "rows": rows,
    }
    (options.out / "gpu_world.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
