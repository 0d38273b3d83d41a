"""What a verified move costs in CPU seconds per gigabyte, by process and thread, beside its lanes alone.

    python tools/path_cpu.py [--gb 1] [--repeats 5] [--also NAME=PYTHON ...] [--json]

On few cores the sum of CPU seconds decides the rate, and it depends less on what else runs than a rate does.
`--also` names the interpreter of another checkout: its nodes move a session of their own in turn with those
of this one, so that two versions of the code are compared in one run. Medians; `ratio_cpu` is the lanes' CPU
by the move's, `ratio` the move's rate by the lanes'. `idle` is the share of all cores that neither took:
it was idle, or others had it. A move is counted from its open path until its commit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import uvloop

from worldmove.bench.lanes import LanePair, lane_pair
from worldmove.bench.moves import PREPARING, Shuttle, shuttle
from worldmove.bench.nodes import running_nodes
from worldmove.bench.path import filled_arena
from worldmove.bench.processes import PROC, descendants
from worldmove.bench.stats import gbps, median

OVER = frozenset({"committed", "adopted", "released"})
TICKS = os.sysconf("SC_CLK_TCK")
LEAST_S = 0.005
"""Seconds per gigabyte below which a thread is not shown."""

Costs = dict[str, float]


class Look(NamedTuple):
    """CPU seconds of each thread so far, with what it belongs to, and the time."""

    threads: dict[tuple[int, int], tuple[str, float]]
    at: float


class Cost(NamedTuple):
    """Of one run: Gb/s, CPU seconds per gigabyte by what they were for, and the share of cores left."""

    rate: float
    by: Costs
    idle: float

    @property
    def cpu(self) -> float:
        """All of it."""
        return sum(self.by.values())


def look(roots: Mapping[int, str]) -> Look:
    """Looks at these processes and at everything below them."""
    threads: dict[tuple[int, int], tuple[str, float]] = {}
    for root, side in roots.items():
        for pid in descendants([root]):
            # A process may end while it is looked at.
            with contextlib.suppress(OSError):
                label = f"{side} {_program(pid)}".strip()
                for task in (PROC / str(pid) / "task").iterdir():
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    kind = "" if task.name == str(pid) else " (thread)"
                    seconds = (int(fields[11]) + int(fields[12])) / TICKS
                    threads[pid, int(task.name)] = label + kind, seconds
    return Look(threads, time.monotonic())


def _program(pid: int) -> str:
    words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else "caller"
    return "node" if module == "worldmove" else module.removeprefix("worldmove.")


def cost(before: Look, after: Look, nbytes: int, rate: float) -> Cost:
    """What was used between two looks."""
    by: defaultdict[str, float] = defaultdict(float)
    for thread, (label, seconds) in after.threads.items():
        by[label] += (seconds - before.threads.get(thread, ("", 0.0))[1]) / nbytes * 1e9
    cores = len(os.sched_getaffinity(0)) * (after.at - before.at)
    return Cost(rate, dict(by), 1 - sum(by.values()) * nbytes / 1e9 / cores)


async def carry(lanes: LanePair, nbytes: int) -> Cost:
    """The lanes alone; this process stands in for their nodes."""
    roots = {os.getpid(): ""}
    before = look(roots)
    seconds = await lanes.run()
    return cost(before, look(roots), nbytes, gbps(nbytes, seconds))


async def move(session: Shuttle) -> Cost:
    """One move."""
    home = session.home
    roots = {session.nodes[home].pid: "source", session.nodes[1 - home].pid: "destination"}
    looks: list[Look] = []

    def on_state(state: str) -> None:
        if state not in PREPARING and (not looks or (state in OVER and len(looks) == 1)):
            looks.append(look(roots))

    receipt = (await session.move("staged", on_state=on_state)).receipt
    rate = gbps(receipt.state_bytes, (receipt.data_ms or 0.0) / 1000)
    return cost(looks[0], looks[-1], receipt.state_bytes, rate)


@contextlib.asynccontextmanager
async def session_of(python: str, nbytes: int) -> AsyncIterator[tuple[Shuttle, int]]:
    """A session that has moved twice between two nodes of that interpreter, and its bytes."""
    options = ("--path", "staged", "--lanes", "1")
    async with running_nodes(("A", "B"), options, python=python) as nodes, shuttle(nodes, nbytes) as session:
        await session.move("staged")
        moved = await session.move("staged")
        await session.turn()
        yield session, moved.receipt.state_bytes


async def measure(gb: float, repeats: int, pythons: Mapping[str, str]) -> dict[str, list[Cost]]:
    """All in turn."""
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        sessions: dict[str, Shuttle] = {}
        nbytes = 0
        for name, python in pythons.items():
            sessions[name], nbytes = await stack.enter_async_context(session_of(python, int(gb * 1e9)))
        source = await stack.enter_async_context(filled_arena(nbytes))
        destination = await stack.enter_async_context(filled_arena(nbytes))
        lanes = await stack.enter_async_context(lane_pair(source, destination, nbytes))
        await lanes.run()
        for _ in range(repeats):
            for session in sessions.values():
                await session.turn()
            costs["lanes"].append(await carry(lanes, nbytes))
            for name, session in sessions.items():
                costs[name].append(await move(session))
    return costs


def summary(costs: Mapping[str, list[Cost]]) -> dict[str, dict[str, object]]:
    """Medians, and what they are beside the lanes'."""
    told: dict[str, dict[str, object]] = {}
    base_rate = median([one.rate for one in costs["lanes"]])
    base_cpu = median([one.cpu for one in costs["lanes"]])
    for name, runs in costs.items():
        labels = {label for one in runs for label in one.by}
        by = {label: median([one.by.get(label, 0.0) for one in runs]) for label in labels}
        rate, cpu = median([one.rate for one in runs]), median([one.cpu for one in runs])
        told[name] = {
            "gbps": round(rate, 2),
            "cpu_s_per_gb": round(cpu, 3),
            "ratio": round(rate / base_rate, 3),
            "ratio_cpu": round(base_cpu / cpu, 3),
            "idle": round(median([one.idle for one in runs]), 2),
            "by": {label: round(value, 3) for label, value in sorted(by.items()) if value >= LEAST_S},
            "runs_gbps": [round(one.rate, 1) for one in runs],
        }
    return told


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="path_cpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # Whatever folder this runs in, an interpreter runs the code that is installed for it.
    os.environ["PYTHONSAFEPATH"] = "1"
    pythons = {"move": sys.executable, **dict(one.split("=", 1) for one in given.also)}
    told = summary(uvloop.run(measure(given.gb, given.repeats, pythons)))
    if given.json:
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    for name, one in told.items():
        by = one.pop("by")
        sys.stdout.write(f"{name}: {', '.join(f'{key} {value}' for key, value in one.items())}\n")
        for label, value in by.items() if isinstance(by, dict) else ():
            sys.stdout.write(f"    {label:<34} {value:.3f}\n")


if __name__ == "__main__":
    main()
