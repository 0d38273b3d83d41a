"""How long a plan takes: 100,800 leaves in 240 regions, after a cache has moved or been rewritten.

    python tools/plan_times.py [--repeats 25]

A block brings three of 21 frames. Medians in milliseconds, until the first leaves can be asked for; what a
destination makes ready before its pause (`Matcher.prepare`) is not in them. The last line is of the first
pattern where the table comes in parts, and each region is planned once its own is there: all plans together.
The figures stand in docs/benchmarks.md under `bench delta`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import numpy.typing as npt

from worldmove.delta.choosing import Chooser
from worldmove.delta.geometry import Geometry, steps_of
from worldmove.delta.matching import Matcher
from worldmove.delta.plan import make_plan
from worldmove.digest import LeafTable
from worldmove.manifest import LeafMap, Region

REGIONS, FRAMES, LEAVES, LEAF = 240, 21, 20, 256 << 10
FRESH = 3
PART = 32 << 20
"""Of so many bytes a part of a table is, where executors digest host memory."""

Rows = npt.NDArray[np.uint64]


def patterns(old: Rows, rng: np.random.Generator) -> dict[str, Rows]:
    """The source's digests after a block, by what its caches do: [regions, frames, leaves, 2]."""
    new = rng.integers(0, 1 << 64, old.shape, dtype=np.uint64)
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


def in_parts(geometry: Geometry, own: LeafTable, theirs: LeafTable) -> float:
    """Milliseconds of a round whose table comes in parts, after one that has copied within regions."""
    chooser = Chooser(geometry, own, theirs)
    planned = np.zeros(geometry.count, dtype=np.bool_)
    chooser.plan(planned)
    chooser.end(copied=1, sent=0)
    chooser.prepare()
    chooser.begin()
    theirs.forget()
    began = time.perf_counter()
    for first in range(0, geometry.count, PART // LEAF):
        count = min(PART // LEAF, geometry.count - first)
        theirs.learn(first, count)
        ready = chooser.ready(first, count) & ~planned
        if ready.any():
            planned |= ready
            chooser.plan(~ready).asks(0)
    return (time.perf_counter() - began) * 1000


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
    old = rng.integers(0, 1 << 64, (REGIONS, FRAMES, LEAVES, 2), dtype=np.uint64)
    own, settled = table(old), np.zeros(geometry.count, dtype=np.bool_)
    for name, rows in patterns(old, rng).items():
        theirs, times = table(rows), []
        for _ in range(repeats):
            matcher = Matcher(geometry, own).prepare()
            began = time.perf_counter()
            plan = make_plan(geometry, matcher, theirs, settled)
            plan.asks(0)
            times.append((time.perf_counter() - began) * 1000)
        print(
            f"{name:10} {statistics.median(times):.2f} ms: {plan.targets.size} leaves copied, "
            f"{plan.missing.size} sent"
        )
    theirs = table(patterns(old, rng)["shift"])
    times = [in_parts(geometry, own, theirs) for _ in range(max(repeats // 5, 1))]
    print(f"in parts   {statistics.median(times):.0f} ms: {-(-geometry.count * LEAF // PART)} parts")


if __name__ == "__main__":
    main()
