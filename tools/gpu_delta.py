"""Leaves that are copied where they are, on GPUs: first whether every byte is right, then what it brings.

    python tools/gpu_delta.py [--only STEPS] [--paths PATHS] [--repeats N] [--seconds N] [--mb N] [--mib N]
                              [--out DIR]

Needs one or two GPUs and CuPy. Steps, in this order: `ordered` has the GPU's executor carry out plans (cache
shifts by frames and by a leaf, with a sink, exchanged regions, leaves in any order, repeated content, random
ones) on N MiB a region, and compares with NumPy, byte for byte; `speed` times the shift of a cache of 6.04 GB
(`--mb`) within a GPU, planning included; `bench` is `worldmove bench delta --gpu` on each path, where a
worker compares what it is handed. All goes to gpu_delta.json in DIR (default: $OUT, or here), after each step
and each pattern; no step, pattern or move begins after SECONDS. Exit code 0: all that was made is right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import cupy
import msgspec
import numpy as np
from gpu_report import Report, Time, about, duration, tried, write

from worldmove.bench.cache import PATTERNS, Pattern
from worldmove.bench.delta import Case, measured
from worldmove.cuda.memory import Device
from worldmove.cuda.probe import probe
from worldmove.delta.columns import SCRATCH, merged
from worldmove.delta.geometry import Geometry, Longs
from worldmove.delta.moving import GPU_LIMITS, schedule
from worldmove.executor import kinds
from worldmove.executor.messages import CopyPiece, Room
from worldmove.executor.pool import ExecutorPool
from worldmove.manifest import DEFAULT_LEAF, LeafMap, Region
from worldmove.scratches import BOUNCE_BYTES

LEAF = DEFAULT_LEAF
REGIONS = 3
FRAMES, NEW = 21, 3
CACHE_REGIONS = 60
BLOCK_MS = 500.0
LEAST_S = 15.0
STEPS = ("ordered", "speed", "bench")
Plan = tuple[Longs, Longs]


class Bench:
    """Regions one after the other in one block of a GPU's memory, and a scratch; mapped here, too."""

    def __init__(self, uuid: str, pool: ExecutorPool, regions: int, region_bytes: int) -> None:
        self.device = Device(uuid)
        self.pool = pool
        self.size = region_bytes
        self.nbytes = regions * region_bytes
        manifest = [Region(f"r{number:02}", "uint8", (region_bytes,)) for number in range(regions)]
        self.leaves = LeafMap(manifest)
        self.geometry = Geometry(self.leaves, [0] * regions, [uuid] * regions)
        self._fds: list[int] = []
        self._keys: list[int] = []

    async def __aenter__(self) -> Bench:
        for nbytes in (self.nbytes, GPU_LIMITS.scratch_bytes + BOUNCE_BYTES):
            self._fds.append(await self.pool.allocate(nbytes))
            self._keys.append(await self.pool.attach(self._fds[-1], nbytes, writable=True, device=True))
        self.window = self.device.map(self._fds[0], self.nbytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.window.close()
        for key, fd in zip(self._keys, self._fds, strict=True):
            await self.pool.detach(key)
            os.close(fd)

    def write(self, data: np.ndarray) -> None:
        """Gives the memory its contents."""
        with cupy.cuda.Device(self.device.info.ordinal):
            cupy.cuda.runtime.memcpy(self.window.address, data.ctypes.data, data.nbytes, 4)
        self.device.synchronize()

    def read(self) -> np.ndarray:
        """What lies there now."""
        out = np.empty(self.nbytes, dtype=np.uint8)
        with cupy.cuda.Device(self.device.info.ordinal):
            cupy.cuda.runtime.memcpy(out.ctypes.data, self.window.address, self.nbytes, 4)
        return out

    async def carry_out(self, plan: Plan) -> tuple[int, int]:
        """Has the executor do it, as a node would; stages and moves."""
        made, moves = schedule(self.geometry, merged(self.geometry, *plan), GPU_LIMITS), 0
        for stage in range(made.count):
            pieces = [
                CopyPiece(
                    *self._spot(m.source, m.source_offset), *self._spot(m.target, m.target_offset), m.length
                )
                for m in made.moves(stage)
            ]
            moves += len(pieces)
            room = Room(self._keys[1], GPU_LIMITS.scratch_bytes, BOUNCE_BYTES)
            await self.pool.copy(pieces, urgent=True, order=room)
        return made.count, moves

    def _spot(self, region: int, offset: int) -> tuple[int, int]:
        return (self._keys[1], offset) if region == SCRATCH else (self._keys[0], region * self.size + offset)


def plans(bench: Bench) -> Iterator[tuple[str, Plan]]:
    """Which leaf gets the content of which, by name."""
    each = bench.size // LEAF
    every = np.arange(REGIONS * each, dtype=np.int64)
    place = every % each
    rng = np.random.default_rng(11)

    def moved(by: int, sink: int = 0) -> Plan:
        targets = every[(place >= sink) & (place + by >= 0) & (place + by < each)]
        return targets, targets + by

    def only(sources: np.ndarray) -> Plan:
        some = every[sources != every]
        return some, sources[some].astype(np.int64)

    frame = max(each // FRAMES, 1)
    yield "shift", moved(NEW * frame)
    yield "shift+sink", moved(NEW * frame, NEW * frame)
    yield "backwards", moved(-NEW * frame)
    yield "by one leaf", moved(1)
    yield (
        "exchange",
        only(np.where(every < each, every + each, np.where(every < 2 * each, every - each, every))),
    )
    yield "permuted", only(rng.permutation(every))
    yield "repeated", only(np.zeros(every.size))
    for number in range(4):
        yield f"random {number}", only(rng.integers(0, every.size, every.size))


async def with_pool(uuid: str, work: Callable[[ExecutorPool], Any]) -> Any:
    """Does something with an executor of a GPU."""
    pool = ExecutorPool(1, nice=0, kind=kinds.gpu(uuid))
    await pool.start()
    try:
        return await work(pool)
    finally:
        await pool.close()


async def ordered(uuid: str, mib: int) -> list[dict[str, Any]]:
    """Every plan, compared with NumPy."""

    async def all_of_them(pool: ExecutorPool) -> list[dict[str, Any]]:
        rows = []
        async with Bench(uuid, pool, REGIONS, mib << 20) as bench:
            for name, (targets, sources) in plans(bench):
                data = np.random.default_rng(5).integers(0, 256, bench.nbytes, dtype=np.uint8)
                bench.write(data)
                stages, moves = await bench.carry_out((targets, sources))
                wanted = data.reshape(-1, LEAF).copy()
                wanted[targets] = data.reshape(-1, LEAF)[sources]
                wrong = int(np.count_nonzero(wanted.reshape(-1) != bench.read()))
                rows.append({"plan": name, "stages": stages, "moves": moves, "wrong_bytes": wrong})
                print(json.dumps(rows[-1]), flush=True)
        return rows

    found: list[dict[str, Any]] = await with_pool(uuid, all_of_them)
    return found


async def speed(uuid: str, mb: int, repeats: int) -> dict[str, Any]:
    """The shift of a cache within a GPU, from the request to its answer."""

    async def timed(pool: ExecutorPool) -> dict[str, Any]:
        frame = max(mb * 10**6 // CACHE_REGIONS // FRAMES // LEAF, 1) * LEAF
        async with Bench(uuid, pool, CACHE_REGIONS, FRAMES * frame) as bench:
            each = bench.size // LEAF
            every = np.arange(CACHE_REGIONS * each, dtype=np.int64)
            targets = every[every % each + NEW * (frame // LEAF) < each]
            took = []
            for _ in range(repeats + 2):
                began = time.perf_counter()
                await bench.carry_out((targets, targets + NEW * (frame // LEAF)))
                took.append((time.perf_counter() - began) * 1000)
            median = statistics.median(took[2:])
            copied = int(targets.size) * LEAF
            return {"bytes": copied, "ms": took[2:], "median_ms": median, "gb_per_s": copied / median / 1e6}

    found: dict[str, Any] = await with_pool(uuid, timed)
    return found


class Steps:
    """What is asked for, one after another; `report` grows, and is written, with each."""

    def __init__(self, given: argparse.Namespace, devices: list[str], report: Report) -> None:
        self._given = given
        self._devices = devices
        self._time = Time(given.seconds)
        self.report = report

    async def ordered(self) -> None:
        """Plans, compared with NumPy."""

        async def found() -> Report:
            rows = await ordered(self._devices[0], self._given.mib)
            return {"held": not any(row["wrong_bytes"] for row in rows), "rows": rows}

        result = await tried(found())
        self._note("ordered", result, f"{len(result.get('rows', []))} plans", result.pop("rows", result))

    async def speed(self) -> None:
        """The shift of a cache."""
        result = {"held": True, **await tried(speed(self._devices[0], self._given.mb, self._given.repeats))}
        self._note("speed", result, f"{result.get('median_ms', 0.0):.2f} ms", result)

    async def bench(self) -> None:
        """The benchmark, path by path and pattern by pattern, each with an equal share of the time."""
        given = self._given
        cases = [(path, pattern) for path in given.paths.split(",") for pattern in PATTERNS]
        shortest = 0.0
        for number, (path, pattern) in enumerate(cases):
            name, share = f"{path}, {pattern}", Time(self._time.left() / (len(cases) - number))
            if self._late(name, shortest):
                continue
            began = time.monotonic()
            rows = self.report.setdefault("bench", {}).setdefault(path, {"rows": []})["rows"]
            case = Case(given.mb * 10**6, given.repeats, "", BLOCK_MS, path, tuple(self._devices))
            row = {
                "pattern": pattern,
                "asked": given.repeats,
                **await tried(one_pattern(case, pattern, share)),
            }
            rows.append(row)
            shortest = min(shortest or math.inf, time.monotonic() - began)
            times = {key: row[key] for key in ("pause_ms", "data_ms", "pause_ratio_to_full") if key in row}
            words = [f"{len(row.get('pauses_ms', []))} of {given.repeats}"]
            self._note(
                name, row, ", ".join([*words, *(f"{key} {value:.3f}" for key, value in times.items())])
            )

    async def run(self) -> bool:
        """All; whether it is right. What is wrong is not timed."""
        for name in self._given.only.split(","):
            if not self._late(name) and all(self.held):
                await getattr(self, name)()
        write(self._given.out / "gpu_delta.json", self.report)
        return bool(self.held) and all(self.held)

    @property
    def held(self) -> list[bool]:
        """Of each that was made."""
        return [words.startswith("held") for words in self.report["figures"].values()]

    def _late(self, name: str, least: float = 0.0) -> bool:
        late = self._time.left() < max(least, LEAST_S)
        if late:
            self.report["not_begun"].append(name)
        return late

    def _note(self, name: str, result: Report, words: str, document: Any = None) -> None:
        if document is not None:
            self.report[name] = document
        held = f"held, {words}" if result["held"] else f"NOT HELD: {result.get('error', words)}"
        self.report["figures"][name] = held
        write(self._given.out / "gpu_delta.json", self.report)
        print(name, held, flush=True)


async def one_pattern(case: Case, pattern: Pattern, time: Time) -> Report:
    """As `worldmove bench delta` measures it, for as long as there is time."""
    row, nbytes = await measured(case, pattern, time.another)
    return {"held": True, "state_bytes": nbytes, **msgspec.to_builtins(row)}


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    found = await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    report: Report = {**about([device.name for device in found]), "not_begun": [], "figures": {}}
    right = await Steps(given, devices, report).run()
    print("right" if right else "WRONG: see gpu_delta.json", flush=True)
    return 0 if right else 1


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="ordered,speed,bench")
    parser.add_argument("--mib", type=int, default=256, help="of a region in `ordered`")
    parser.add_argument("--mb", type=int, default=6040, help="of the cache, 10**6 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--paths", default="local,direct,staged")
    parser.add_argument(
        "--seconds", type=duration, default=3600.0, help="nothing begins after so long (3600)"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    if unknown := [name for name in given.only.split(",") if name not in STEPS]:
        parser.error(f"no step {unknown[0]!r}; allowed: {', '.join(STEPS)}")
    return asyncio.run(run(given))


if __name__ == "__main__":
    sys.exit(main())
