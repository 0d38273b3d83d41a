"""Leaves that are copied where they are, on GPUs: first whether every byte is right, then what it brings.

    python tools/gpu_delta.py [--only STEPS] [--mib N] [--repeats N] [--paths PATHS] [--mb N] [--out DIR]

Needs one or two GPUs and CuPy. Steps, in this order: `ordered` has the GPU's executor carry out plans (cache
shifts by frames and by a leaf, with a sink, exchanged regions, leaves in any order, repeated content, random
ones) on N MiB a region, and compares with NumPy, byte for byte; `speed` times the shift of a cache of 6.04 GB
(`--mb`) within a GPU, planning included; `bench` runs `worldmove bench delta --gpu` on each path, where a
worker compares what it is handed. All goes to gpu_delta.json in DIR (default: $OUT, or here). Exit code 0:
all of it is right.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import subprocess
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
import numpy as np

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
BENCH_S = 540
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


def bench_delta(path: str, mb: int, repeats: int) -> dict[str, Any]:
    """The benchmark, by its command."""
    words = ("bench", "delta", "--gpu", "--json", "--path", path, "--mb", str(mb), "--repeats", str(repeats))
    answer = subprocess.run(
        [sys.executable, "-m", "worldmove", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=BENCH_S,
    )
    if answer.returncode:
        return {"failed": answer.returncode, "why": answer.stderr[-4000:]}
    found: dict[str, Any] = json.loads(answer.stdout)
    for row in found["rows"]:
        print(path, {key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
    return found


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    found = await probe()
    report: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python tools/gpu_delta.py {' '.join(sys.argv[1:])}",
        "devices": [device.name for device in found],
    }
    uuid, steps, good = found[0].uuid, given.only.split(","), True
    if "ordered" in steps:
        report["ordered"] = await ordered(uuid, given.mib)
        good = not any(row["wrong_bytes"] for row in report["ordered"])
    if "speed" in steps and good:
        report["speed"] = await speed(uuid, given.mb, given.repeats)
        print("speed", json.dumps(report["speed"]), flush=True)
    for path in given.paths.split(",") if "bench" in steps and good else ():
        one = await asyncio.to_thread(bench_delta, path, given.mb, given.repeats)
        report.setdefault("bench", {})[path] = one
        good = good and "failed" not in one
        (given.out / "gpu_delta.json").write_text(json.dumps(report, indent=1))
    (given.out / "gpu_delta.json").write_text(json.dumps(report, indent=1))
    print("right" if good else "WRONG: see gpu_delta.json", flush=True)
    return 0 if good else 1


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="ordered,speed,bench")
    parser.add_argument("--mib", type=int, default=256, help="of a region in `ordered`")
    parser.add_argument("--mb", type=int, default=6040, help="of the cache, 10**6 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--paths", default="local,direct,staged")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
