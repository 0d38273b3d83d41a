"""The video world generates while it moves: bits against a twin, and what moving costs its blocks.

    python tools/gpu_world.py [--paths local,direct,staged] [--moves 20] [--seconds N] [--lanes 8] [--out DIR]

For each path a tour of two nodes, one for each GPU; afterwards a twin that never moved generates the same
blocks on the second GPU. Every picture, and the whole state of every arrival, is compared. There are medians
of the twin's block times (no node at all), of those that no move overlapped, and of those that one did; with
`--neighbour` again while another world generates on the second GPU, with `--neighbour only` only so. Writes
gpu_world.json to DIR ($OUT, or here), after every move, and exits with 0 only if every bit was equal.

Each path has an equal share of the SECONDS that are left; no move begins that would leave too few for the
twin. With one GPU both nodes are on it, and there is no neighbour. `--sink N` and `--ring` say how the cache
goes on once it is full (docs/video.md). `--device cpu --shape small` tries the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from gpu_report import Report, Time, about, duration, tried, write
from rich.console import Console

from worldmove.bench.nodes import running_nodes
from worldmove.bench.stats import median, quantile
from worldmove.client import AsyncClient
from worldmove.cuda.probe import probe
from worldmove.demo import programs, report
from worldmove.demo.cast import Actor, Cast
from worldmove.demo.film import Film
from worldmove.demo.screen import Screen
from worldmove.demo.tour import Options, Tour, compare
from worldmove.demo.video.shape import options_for
from worldmove.errors import ConfigError

FULL = 7
"""Blocks that fill the window: the first ones are faster, and don't count."""
END_S = 8.0
"""What ending nodes, worlds and a twin takes."""
LEAST_S = 20.0
NEIGHBOURS = {"none": (False,), "too": (False, True), "only": (True,)}


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


class Case:
    """One path, with a neighbour or without.

    Attributes:
        row: what is known of it so far.
    """

    def __init__(self, options: Options, lanes: int, time: Time, beside: bool) -> None:
        self._options = options
        self._lanes = lanes
        self._time = time
        self._beside = beside
        self._start_s = 0.0
        self._began = 0.0
        self.moves: list[report.Move] = []
        self.row: Report = {"path": options.path, "neighbour": beside, "held": False, "asked": options.moves}

    async def run(self, note: Callable[[], None]) -> None:
        """Moves, comparison, times; `note` is called after each move."""
        quiet = Screen(Console(stderr=True), quiet=True)
        with Film() as film, quiet:
            tour = await self._tour(film, quiet, note)
            if not self.moves:
                return
            twin: Actor = await compare(film, self._options, quiet)
            self._judge(film, tour, twin)

    async def _tour(self, film: Film, quiet: Screen, note: Callable[[], None]) -> Tour:
        options = self._options
        async with AsyncExitStack() as stack:
            common = ("--path", options.path, "--lanes", str(self._lanes))
            nodes = await stack.enter_async_context(running_nodes(programs.NODES, common, options.play.nodes))
            clients = {node.name: await stack.enter_async_context(AsyncClient(node.url)) for node in nodes}
            if self._beside:
                await neighbour(stack, options.play, nodes[1].url)
            tour = Tour(options, film, clients, quiet)
            await stack.enter_async_context(tour.cast)
            began = time.monotonic()
            await tour.begin(nodes)
            self._began = time.monotonic()
            self._start_s = self._began - began
            await tour.ready()
            self._time.anew()
            for number in range(1, options.moves + 1):
                if not self._time.another(self._after()):
                    break
                self.moves.append(await tour.move(number))
                self.row |= {"made": number, "moves": [msgspec.to_builtins(one) for one in self.moves]}
                note()
            if self.moves:
                await tour.ready()
        return tour

    def _after(self) -> float:
        """Seconds that are needed once another move is made: a twin does no more than the tour did."""
        tour_s = time.monotonic() - self._began
        return self._start_s + END_S + tour_s * (len(self.moves) + 2) / (len(self.moves) + 1)

    def _judge(self, film: Film, tour: Tour, twin: Actor) -> None:
        moves = self.moves
        found, faults = report.outcome(film, moves, len(moves))
        blocks = tour.blocks[FULL:]
        self.row |= {
            "held": found.ok,
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
        }


def figures(row: Report) -> str:
    """A few words."""
    held = "held" if row["held"] else "NOT HELD"
    words = [f"{held}, {row.get('made', 0)} of {row['asked']} moves"]
    if "frames_compared" in row:
        words.append(f"{row['frames_equal']}/{row['frames_compared']} pictures")
        words.append(f"{row['states_equal']}/{row['states_compared']} states, pause {row['pause_ms']:.1f} ms")
        times = [row[name]["p50_ms"] for name in ("twin", "between_moves", "during_moves") if row[name]]
        words.append(f"blocks {' / '.join(f'{value:.1f}' for value in times)} ms")
    return ", ".join([*words, *filter(None, [row.get("error")])])


async def run(options: argparse.Namespace) -> int:
    """Every path in turn; one that fails says why. Returns the exit code."""
    cache = options_for(options.shape, sink=options.sink, ring=options.ring)
    left, found = Time(options.seconds), [] if options.device == "cpu" else await probe()
    devices = await programs.stages(gpu=options.device == "gpu")
    play = programs.video(devices, cache, options.block_ms)
    document: Report = {
        **about([device.name for device in found]),
        **cache,
        "block_ms": options.block_ms,
        "rows": [],
        "left_out": [],
        "figures": {},
    }
    cases = [(path, beside) for path in options.paths.split(",") for beside in NEIGHBOURS[options.neighbour]]
    for number, (path, beside) in enumerate(cases):
        name = f"{path}, a neighbour" if beside else path
        share = left.left() / (len(cases) - number)
        alone = beside and len(found) == 1
        if alone or share < LEAST_S:
            document["left_out"].append({name: "needs 2 GPUs, there is 1" if alone else "no time is left"})
            continue
        began = time.monotonic()
        case = Case(Options(options.moves, play, path), options.lanes, Time(share), beside)
        document["rows"].append(case.row)

        def note(name: str = name, case: Case = case) -> None:
            document["figures"][name] = figures(case.row)
            write(options.out / "gpu_world.json", document)

        async def one(case: Case = case, note: Callable[[], None] = note) -> Report:
            await case.run(note)
            return {}

        case.row |= await tried(one())
        case.row["seconds"] = round(time.monotonic() - began, 1)
        note()
        print(name, document["figures"][name], flush=True)
    write(options.out / "gpu_world.json", document)
    return 0 if document["rows"] and all(row["held"] for row in document["rows"]) else 1


def main() -> int:
    """Runs and writes; 0 only if every bit was equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--paths", default="local,direct,staged")
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--shape", default="self-forcing")
    parser.add_argument("--sink", type=int, default=0, help="first latent frames of the cache that stay")
    parser.add_argument("--ring", action="store_true", help="the newest block overwrites the oldest")
    parser.add_argument("--block-ms", type=float, default=1.0)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--neighbour", nargs="?", const="too", default="none", choices=sorted(NEIGHBOURS))
    parser.add_argument("--seconds", type=duration, default=3600.0, help="for all paths together (3600)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    try:
        return asyncio.run(run(parser.parse_args()))
    except ConfigError as error:
        parser.error(error.message)


if __name__ == "__main__":
    sys.exit(main())
