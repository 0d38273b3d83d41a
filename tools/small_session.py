"""Where the pause of a small session goes: 1 MB in 100 regions, moved to and fro on one host, step by step.

    python tools/small_session.py [--moves 50] [--rounds 3] [--against CHECKOUT] [--json FILE]

Host memory, two real nodes, the path `local`, `live=false`. Each node logs when it took a step of a move, by
the host's monotonic clock. Shown are medians of all moves but the first two: milliseconds since the world
stood, and what the node's loop worked since its last step, which says the same on a busy machine. With
`--against` another checkout of the repository is measured in turn with this one, so that both meet the same
machine. `nice -n -15` keeps other work of the machine out, where that is allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import uvloop

from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import running_nodes
from worldmove.views import Receipt

ROOT = Path(__file__).resolve().parent.parent
REGIONS, NBYTES = 100, 1 << 20
WARM_UP = 2
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")
BARS = {"pause_ms": 3.0, "commit + resume": 2.0}

Steps = list[tuple[str, float, float]]
Move = dict[str, Steps]
"""The steps of one move by role: each with the host's clock, and what its node's loop has worked, in ms."""


async def measure(moves: int, regions: int, nbytes: int) -> dict[str, Any]:
    """Receipts and steps of `moves` moves, after two to warm up."""
    programs = [("worldmove.bench.actor", str(regions))] * 2
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        options = ("--path", "local", "--log-level", "info")
        async with (
            running_nodes(("A", "B"), options, logs=logs) as nodes,
            shuttle(nodes, nbytes, programs) as way,
        ):
            receipts = [(await way.move("local")).receipt for _ in range(moves + WARM_UP)]
        steps = read_steps(logs)
    timed = receipts[WARM_UP:]
    return {
        "times": [{name: getattr(one, name) for name in TIMES} for one in timed],
        "steps": [since_stop(steps[one.migration_id], one) for one in timed if one.migration_id in steps],
    }


def read_steps(logs: Path) -> dict[str, Move]:
    """What the nodes' logs say of each move."""
    found: defaultdict[str, Move] = defaultdict(dict)
    for log in logs.glob("*.log"):
        for line in log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "steps":
                found[entry["move"]][entry["role"]] = [tuple(step) for step in entry["steps"]]
    return dict(found)


def since_stop(move: Move, receipt: Receipt) -> dict[str, tuple[float, float]]:
    """Milliseconds from the stop to each step, and what its node worked since the step before.

    Of a step that came more than once the last one counts.
    """
    adopted = next(at for step, at, _ in move["source"] if step == "Adopted")
    stopped = adopted - (receipt.pause_ms or 0.0)
    after: dict[str, tuple[float, float]] = {}
    for role, steps in move.items():
        worked = next((work for _, at, work in reversed(steps) if at < stopped), steps[0][2])
        for step, at, work in steps:
            if at >= stopped:
                after[f"{role} {step}"] = at - stopped, work - worked
                worked = work
    return after


def medians(rows: list[dict[str, tuple[float, float]]]) -> list[tuple[str, float, float]]:
    """Steps in the order of their times; those which most moves had."""
    values: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    most = [
        (name, *(statistics.median(column) for column in zip(*some, strict=True)))
        for name, some in values.items()
        if 2 * len(some) > len(rows)
    ]
    return sorted(most, key=lambda step: step[1])


def run_of(checkout: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One round, by the tool of a checkout, with its own code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "round.json"
        command = [sys.executable, str(checkout / "tools" / "small_session.py"), "--round", str(out)]
        command += ["--moves", str(given.moves), "--regions", str(given.regions)]
        command += ["--nbytes", str(given.nbytes)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(checkout)}, cwd=checkout)
        return dict(json.loads(out.read_text()))


def show(name: str, rounds: list[dict[str, Any]]) -> None:
    """Medians of all moves, and of each round, for people."""
    for one in (one for each in rounds for one in each["times"]):
        one["commit + resume"] = one["commit_ms"] + one["resume_ms"]
    print(f"\n{name}: {len(rounds)} rounds, ms")
    for column in (*TIMES, "commit + resume"):
        each = [[one[column] for one in some["times"]] for some in rounds]
        every = [value for some in each for value in some]
        middles = " ".join(f"{statistics.median(some):.2f}" for some in each)
        bar = f"   bar {BARS[column]:g}" if column in BARS else ""
        print(
            f"  {column:<16} {statistics.median(every):6.2f}   best {min(every):6.2f}   rounds {middles}{bar}"
        )
    print("  since the stop, and what the node's loop worked since its last step:")
    worked: defaultdict[str, float] = defaultdict(float)
    for step, at, work in medians([one for some in rounds for one in some["steps"]]):
        role = step.partition(" ")[0]
        worked[role] += work
        print(f"  {at:8.3f}  {work:6.3f}  {step}")
        if step == "source Adopted":
            print("  worked until here:", ", ".join(f"{role} {sum_:.3f}" for role, sum_ in worked.items()))


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(prog="small_session", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moves", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--regions", type=int, default=REGIONS)
    parser.add_argument("--nbytes", type=int, default=NBYTES)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--json", type=Path, help="where everything is left")
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.round is not None:
        given.round.write_text(json.dumps(uvloop.run(measure(given.moves, given.regions, given.nbytes))))
        return 0
    checkouts = {"this": ROOT} | ({"against": given.against.resolve()} if given.against else {})
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(given.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(run_of(checkout, given))
    for name, some in rounds.items():
        show(name, some)
    if given.json is not None:
        given.json.write_text(json.dumps(rounds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
