"""Random scenarios of the simulator, harder than those of its test: which moves that were taken on are late?

    python tools/sweep_late.py [--seed 1] [--scenarios 100] [--rtt-ms 0.05,0.2]

Horizons are just above what a pause takes, digests may be hardly faster than the line, states are mixed. A
scenario with late moves is printed, with how many and the worst; the last line counts. The exit code is 0 if
none is late.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worldmove.quantities import parse_rate, parse_size
from worldmove.simulate.engine import Run
from worldmove.simulate.moving import Ended
from worldmove.simulate.scenario import Scenario, parse

STATES = (
    ["5MB", "40MB"],
    ["20MB"],
    ["1MB"],
    ["2MB", "100MB"],
    ["5MB", "10MB", "40MB"],
    ["300kB", "3MB"],
)
BLOCKS_MS = (20, 50, 100, 200, 500, 1000)
RATES = ("1Gbit", "1Gbit", "200Mbit", "5Gbit")
BESIDE_MS = 26.6
"""Of a pause, beside bytes and round trips: commit, resume, and something for digests."""
LOADS = (0.7, 1.0, 1.5, 3.0, 6.0)
MOST_MOVES = 3000


def _horizon_ms(draw: random.Random, rtt_ms: float, work_ms: float, block_ms: float) -> float:
    kind, least = draw.random(), BESIDE_MS + rtt_ms * 17
    if kind < 0.35:
        return least + work_ms * draw.uniform(1.0, 2.5)
    if kind < 0.7:
        return least + work_ms + block_ms * draw.uniform(0.0, 2.0)
    return draw.uniform(50, 3000)


def _moves(
    draw: random.Random, rate: str, states: list[str], rtt_ms: float, block_ms: float
) -> dict[str, Any]:
    sizes = [parse_size(each) for each in states]
    work_ms = draw.choice([max(sizes), min(sizes)]) / parse_rate(rate) * 1000
    horizon_ms = _horizon_ms(draw, rtt_ms, work_ms, block_ms)
    short = draw.random() < 0.7
    deadline_ms = draw.uniform(1500, 8000) if short else draw.uniform(2000, 20_000)
    return {"state": states, "horizon_ms": horizon_ms, "deadline_ms": deadline_ms, "block_ms": block_ms}


def drawn(draw: random.Random, rtts_ms: list[float]) -> tuple[Scenario, float]:
    """A scenario, and the load that is offered in it."""
    live = draw.random() < 0.5
    states = draw.choice(STATES)
    rtt_ms = draw.choice(rtts_ms)
    block_ms = draw.choice(BLOCKS_MS) * draw.uniform(0.7, 1.3)
    rate = draw.choice(RATES)
    moves = _moves(draw, rate, states, rtt_ms, block_ms)
    document: dict[str, Any] = {
        "name": "sweep",
        "nodes": draw.choice([2, 4, 13]),
        "seed": draw.randrange(10_000),
        "model": draw.choice(["grants", "grants", "rates"]),
        "line": {"rate": rate, "rtt_ms": rtt_ms},
        "costs": {
            "spread": draw.uniform(0, 0.3),
            "open_ms": draw.choice([5.0, 50.0, 150.0]),
            "source_digest": draw.choice(["100Gbit", "10Gbit"]),
            "destination_digest": draw.choice(["100Gbit", "10Gbit"]),
        },
        "gate": {"batch": draw.choice(["4MiB", "1MiB", "512KiB"])},
        "moves": moves
        | {
            "seconds": draw.choice([5, 10]),
            "into": draw.choice(["one", "one", "all"]),
            "live": live,
            "dirty": draw.uniform(0, 1) if live else 0.0,
            "arrivals": draw.choice(["poisson", "burst", "even"]),
        },
    }
    if 2 * parse_size(document["gate"]["batch"]) < 1.5 * parse_rate(rate) * rtt_ms / 1000:
        document["gate"]["batch"] = "16MiB"  # else two grants of one sender would not fill the line
    return parse(document), draw.choice(LOADS)


def _asked(scenario: Scenario, load: float) -> float:
    sizes = scenario.moves.sizes
    mean = sum(sizes) / len(sizes)
    return load * scenario.line.bytes_per_s * scenario.receivers / mean * scenario.moves.seconds


def _beyond_ms(scenario: Scenario, ended: Ended) -> float:
    moves = scenario.moves
    return max(ended.pause_s * 1000 - moves.horizon_ms, ended.total_s * 1000 - moves.deadline_ms)


def main() -> int:
    """Sweeps; 0 if no move that was taken on was late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenarios", type=int, default=100)
    parser.add_argument("--rtt-ms", default="0.05,0.2")
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - a simulation, no secret
    rtts_ms = [float(each) for each in options.rtt_ms.split(",")]
    swept = taken = wrong = 0
    for _ in range(options.scenarios):
        scenario, load = drawn(draw, rtts_ms)
        if _asked(scenario, load) > MOST_MOVES:
            continue  # it would take too long
        run = Run(scenario, load)
        run.run()
        late = [_beyond_ms(scenario, each) for each in run.ended if each.missed]
        swept += 1
        taken += sum(each.admitted for each in run.ended)
        if late:
            wrong += 1
            words = json.dumps({"late": len(late), "worst_ms": round(max(late), 3), "load": load})
            sys.stdout.write(f"{words} {scenario}\n")
    sys.stdout.write(f"{swept} scenarios, {taken} moves taken on, {wrong} scenarios with late moves\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
