"""How long a plan takes: 100,800 leaves in 240 regions, after a cache has moved or been rewritten.

    python tools/plan_times.py [--repeats 25]

A block brings three of 21 frames. Medians in milliseconds; what a destination makes ready before its
pause (`Matcher.prepare`) is not in them. The figures stand in docs/benchmarks.md under `bench delta`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import numpy.typing as npt

from worldmove.delta.geometry import Geometry, steps_of
from worldmove.delta.matching import Matcher
from worldmove.delta.plan import make_plan
from worldmove.digest import LeafTable
from worldmove.manifest import LeafMap, Region

REGIONS, FRAMES, LEAVES, LEAF = 240, 21, 20, 256 << 10
FRESH = 3

Rows = npt.NDArray[np.uint64]


def patterns(old: Rows, rng: np.random.Generator) -> dict[str, Rows]:
    """The source's digests after a block, by what its caches do: [regions, frames, leaves, 2]."""
    new = rng.integers(0, 1 << 63, old.shape, dtype=np.uint64)
    shift, sink, ring = new.copy(), new.copy(), old.copy()
    shift[:, :-FRESH] = old[:, FRESH:]
    sink[:, :FRESH] = old[:, :FRESH]
    sink[:, FRESH:-FRESH] = old[:, 2 * FRESH :]
    ring[:, :FRESH] = new[:, :FRESH]
    return {"shift": shift, "shift+sink": sink, "ring": ring, "rewrite": new}


def table(rows: Rows) -> LeafTable:
    """All leaves known."""
    made = LeafTable(rows.size // 2)
    made.rows[:] = rows.reshape(-1, 2)
    made.learn(0, made.count)
    return made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="plan_times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats
    regions = tuple(
        Region(f"k{number}", "uint8", (FRAMES * LEAVES * LEAF,), stride_bytes=LEAVES * LEAF)
        for number in range(REGIONS)
    )
    geometry = Geometry(LeafMap(regions), steps_of(regions), ["host"] * REGIONS)
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 63, (REGIONS, FRAMES, LEAVES, 2), dtype=np.uint64)
    own, settled = table(old), np.zeros(geometry.count, dtype=np.bool_)
    for name, rows in patterns(old, rng).items():
        theirs, times = table(rows), []
        for _ in range(repeats):
            matcher = Matcher(geometry, own).prepare()
            began = time.perf_counter()
            plan = make_plan(geometry, matcher, theirs, settled)
            times.append((time.perf_counter() - began) * 1000)
        print(
            f"{name:10} {statistics.median(times):.2f} ms: {plan.targets.size} leaves copied, "
            f"{plan.missing.size} sent"
        )


if __name__ == "__main__":
    main()
