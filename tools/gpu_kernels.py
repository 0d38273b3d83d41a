"""Checks every kernel on a GPU against its reference, then times it, in one run.

    python tools/gpu_kernels.py [--variants] [--out DIR]

Needs CuPy, NumPy and xxhash. Times are medians of CUDA events. With two GPUs, copies between them are timed
as well. The last lines are a short table; everything goes to kernels.json in DIR (default: $OUT, or here).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupy as cp
import numpy as np
import xxhash
from gpu_kernels_check import KIB, POISON, check, compare, must

from worldmove.kernels.device import multiprocessors
from worldmove.kernels.leaf_digest_cuda import LeafDigest
from worldmove.kernels.pieces import make_pieces
from worldmove.kernels.runs import make_runs
from worldmove.kernels.runs_cuda import RunKernels
from worldmove.kernels.table_diff_cuda import TableDiff

# A model of 30 layers, K and V of [1, 32760, 12, 128] bf16.
REGIONS, REGION_BYTES = 60, 32760 * 12 * 128 * 2
LEAF_SIZES = [8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 73728, 128 * KIB, 256 * KIB]

NOISE = r"""
extern "C" __global__ void noise(unsigned long long* out, unsigned long long count, unsigned long long seed) {
    const unsigned long long step = gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        unsigned long long z = (i + seed) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        out[i] = z ^ z >> 31;
    }
}
"""


class Bench:
    """The session of the bars, and the clock."""

    def __init__(self) -> None:
        self.nbytes = REGIONS * REGION_BYTES
        self.data = self.buffer(seed=int.from_bytes(os.urandom(6)))
        self.starts = np.arange(REGIONS, dtype=np.uint64) * np.uint64(REGION_BYTES)
        self.table = cp.empty((self.nbytes // (8 * KIB) + REGIONS, 16), dtype=cp.uint8)
        self.kernels = RunKernels()
        self.reading = self.kernels.plan(self.runs(0))
        self.rows: list[dict[str, Any]] = []

    def buffer(self, seed: int) -> Any:
        """As much noise as the session has bytes, on the current device."""
        data = cp.empty(self.nbytes, dtype=cp.uint8)
        noise = cp.RawModule(code=NOISE).get_function("noise")
        noise((4096,), (256,), (data, np.uint64(self.nbytes // 8), np.uint64(seed)))
        return data

    def pieces(self, leaf_bytes: int, target: int | None = None) -> Any:
        """The session's regions in leaves of one size."""
        lengths = np.full(REGIONS, REGION_BYTES)
        rows = np.arange(REGIONS) * -(-REGION_BYTES // leaf_bytes)
        targets = None if target is None else self.starts + np.uint64(target)
        return make_pieces(self.starts + np.uint64(self.data.data.ptr), lengths, leaf_bytes, rows, targets)

    def runs(self, target: int, source: int | None = None) -> Any:
        """The session's regions as runs to `target`."""
        source = self.data.data.ptr if source is None else source
        return make_runs(
            self.starts + np.uint64(source), self.starts + np.uint64(target), np.full(REGIONS, REGION_BYTES)
        )

    def time(self, name: str, work: Callable[[], object], nbytes: int, repeats: int = 25) -> float:
        """Median milliseconds; the device is kept busy meanwhile, so that launches cost no time of it."""
        for _ in range(3):
            work()
        cp.cuda.Device().synchronize()
        for _ in range(2):
            self.kernels.read(self.reading)
        events = [(cp.cuda.Event(), cp.cuda.Event()) for _ in range(repeats)]
        for before, after in events:
            before.record()
            work()
            after.record()
        cp.cuda.Device().synchronize()
        times = [cp.cuda.get_elapsed_time(before, after) for before, after in events]
        median = statistics.median(times)
        self.rows.append(
            {
                "name": name,
                "ms": round(median, 5),
                "best_ms": round(min(times), 5),
                "worst_ms": round(max(times), 5),
                "gb_per_s": round(nbytes / median / 1e6, 1),
            }
        )
        return median


def time_digest(bench: Bench, label: str, digest: LeafDigest, sizes: list[int]) -> None:
    """The whole session, in leaves of several sizes."""
    for size in sizes:
        plan = digest.plan(bench.pieces(size))
        bench.time(
            f"{label} {size}", lambda plan=plan: digest.digest(plan, 9, bench.table.data.ptr), bench.nbytes
        )


def check_samples(bench: Bench, digest: LeafDigest) -> None:
    """Leaves all over the 6 GB, beyond 4 GiB too."""
    for size in (64 * KIB, 73728):
        bench.table.fill(POISON)
        digest.digest(digest.plan(bench.pieces(size)), 9, bench.table.data.ptr)
        each = -(-REGION_BYTES // size)
        for row in [0, REGIONS * each - 1, *np.random.default_rng().integers(0, REGIONS * each, 300)]:
            region, leaf = divmod(int(row), each)
            start = region * REGION_BYTES + leaf * size
            end = min(start + size, (region + 1) * REGION_BYTES)
            wanted = xxhash.xxh3_128_digest(cp.asnumpy(bench.data[start:end]).data, 9)
            must(cp.asnumpy(bench.table[int(row)]).tobytes() == wanted, f"leaf {row} of {size} bytes in 6 GB")


def time_read(bench: Bench) -> float:
    """The yardstick: the best of two shapes of the plain reading kernel."""
    other = RunKernels({"RUN_THREADS": 256}, 256)
    blocks = 4 * multiprocessors()
    return min(
        bench.time("read", lambda: bench.kernels.read(bench.reading), bench.nbytes),
        bench.time("read, 256 threads", lambda: other.read(bench.reading, blocks), bench.nbytes),
    )


def time_parts(bench: Bench, digest: LeafDigest) -> None:
    """Parts of a session, small sessions, many regions, and memory at odd addresses."""
    base = bench.data.data.ptr
    for what, count, nbytes, size, skew in (
        ("1 MB in 100 regions", 100, 10240, 10240, 0),
        ("16 MiB", 1, 2**24, 73728, 0),
        ("64 MiB", 1, 2**26, 73728, 0),
        ("256 MiB", 1, 2**28, 73728, 0),
        ("4 GB in 4,000 regions", 4000, 2**20, 73728, 0),
        ("4 GB in 4,000 odd lengths", 4000, 2**20 - 1, 65536, 0),
        ("256 MiB at an odd address", 1, 2**28, 65536, 1),
        ("4 GB at odd addresses", 40, 2**20 * 100, 65536, 1),
    ):
        at = base + np.arange(count) * (nbytes + 15 & ~15) + skew
        rows = np.arange(count) * -(-nbytes // size)
        plan = digest.plan(make_pieces(at, np.full(count, nbytes), size, rows))
        bench.time(
            f"digest of {what}",
            lambda plan=plan: digest.digest(plan, 9, bench.table.data.ptr),
            count * nbytes,
        )


def time_copies(bench: Bench, target: int, where: str) -> None:
    """The copy engine, the copying kernel and the digesting copy, from the bench's memory to `target`."""
    stream = cp.cuda.get_current_stream().ptr
    source = bench.data.data.ptr

    def engine() -> None:
        for start in bench.starts.tolist():
            cp.cuda.runtime.memcpyAsync(target + start, source + start, REGION_BYTES, 4, stream)

    bench.time(f"{where} copy engine", engine, bench.nbytes)
    plan = bench.kernels.plan(bench.runs(target))
    for blocks in (16, 32, 64, 132, None):
        bench.time(
            f"{where} copy_runs {blocks or 'all'} blocks",
            lambda blocks=blocks: bench.kernels.copy(plan, blocks),
            bench.nbytes,
        )
    digest = LeafDigest()
    copying = digest.plan(bench.pieces(73728, target))
    bench.time(
        f"{where} digesting copy", lambda: digest.digest_copy(copying, 9, bench.table.data.ptr), bench.nbytes
    )


def time_peer(bench: Bench) -> None:
    """Between two GPUs: pushed by the owner of the bytes, and pulled by the other."""
    for one, other in ((0, 1), (1, 0)):
        with cp.cuda.Device(one):
            if not cp.cuda.runtime.deviceCanAccessPeer(one, other):
                print("no peer access between the two GPUs")
                return
            cp.cuda.runtime.deviceEnablePeerAccess(other)
    with cp.cuda.Device(1):
        there = cp.empty(bench.nbytes, dtype=cp.uint8)
        there.fill(POISON)
        cp.cuda.Device(1).synchronize()
    time_copies(bench, there.data.ptr, "push")
    must(bool(cp.array_equal(bench.data[-(2**20) :], cp.asarray(cp.asnumpy(there[-(2**20) :])))), "push")
    bench.data.fill(POISON)
    cp.cuda.Device(0).synchronize()
    pulling = bench.kernels.plan(bench.runs(bench.data.data.ptr, there.data.ptr))
    for blocks in (16, 32, 64, None):
        bench.time(
            f"pull copy_runs {blocks or 'all'} blocks",
            lambda blocks=blocks: bench.kernels.copy(pulling, blocks),
            bench.nbytes,
        )
    must(bool(cp.array_equal(bench.data[-(2**20) :], cp.asarray(cp.asnumpy(there[-(2**20) :])))), "pull")


def time_tables(bench: Bench) -> None:
    """Tables of a session of 6 GB in small leaves."""
    leaves = 100_000
    diff = TableDiff(leaves)
    mine = cp.asarray(np.random.default_rng().integers(0, 256, (leaves, 16), dtype=np.uint8))
    known = cp.ones(leaves, dtype=cp.uint8)
    for share in (0, 0.14, 1):
        theirs = mine.copy()
        theirs[: int(leaves * share), 3] ^= 1
        out = diff.difference()
        arrays = [mine, theirs, known, known]
        bench.time(
            f"table_diff 100,000, {share:.0%} differ",
            lambda arrays=arrays, out=out: compare(diff, arrays, leaves, out),
            leaves * 34,
        )


def time_variants(bench: Bench) -> None:
    """Other shapes of the kernels, for whoever tunes them."""
    for threads, blocks in ((64, 8), (64, 10), (128, 4), (128, 5), (256, 2)):
        defines = {"LEAF_THREADS": threads, "LEAF_BLOCKS": blocks}
        digest = LeafDigest(defines, threads)
        time_digest(bench, f"leaf_digest {threads}x{blocks}", digest, [8 * KIB, 73728, 256 * KIB])
    target = bench.buffer(0)
    for threads, loads, blocks in ((256, 8, 4), (512, 4, 4), (512, 8, 2), (512, 4, 2), (1024, 4, 1)):
        kernels = RunKernels({"RUN_THREADS": threads, "RUN_LOADS": loads}, threads)
        label, grid = f"{threads} threads, {loads} loads, {blocks} blocks", blocks * multiprocessors()
        bench.time(f"read {label}", lambda k=kernels, g=grid: k.read(bench.reading, g), bench.nbytes)
        plan = kernels.plan(bench.runs(target.data.ptr))
        bench.time(f"copy {label}", lambda k=kernels, p=plan, g=grid: k.copy(p, g), bench.nbytes)


def measure(variants: bool) -> list[dict[str, Any]]:
    """Times everything; a row for each figure, its ratio to the plain read where it reads 6 GB."""
    bench = Bench()
    digest = LeafDigest()
    check_samples(bench, digest)
    reading = [time_read(bench)]
    time_digest(bench, "digest", digest, LEAF_SIZES)
    reading.append(time_read(bench))
    time_parts(bench, digest)
    time_tables(bench)
    if variants:
        time_variants(bench)
    target = bench.buffer(0)
    filling = bench.kernels.plan(bench.runs(target.data.ptr))
    time_copies(bench, target.data.ptr, "local")
    must(bool(cp.array_equal(bench.data, target)), "copy of 6 GB")
    bench.time("fill", lambda: bench.kernels.fill(filling, POISON), bench.nbytes)
    del target
    if cp.cuda.runtime.getDeviceCount() > 1:
        time_peer(bench)
    best = min(reading)
    for row in bench.rows:
        if row["name"].startswith(("digest", "leaf_digest", "read")) and " of " not in row["name"]:
            row["of_plain_read"] = round(best / row["ms"], 3)
    return bench.rows


def driver() -> str:
    """The driver's version, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def about() -> dict[str, Any]:
    """What the figures were measured with."""
    runtime = cp.cuda.runtime
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "driver": driver(),
        "devices": [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())],
        "cuda_of_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
        "numpy": np.__version__,
        "xxhash": xxhash.VERSION,
        "python": platform.python_version(),
        "bytes": REGIONS * REGION_BYTES,
        "regions": REGIONS,
    }


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="time other shapes of the kernels as well")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    check()
    rows = measure(options.variants)
    (options.out / "kernels.json").write_text(json.dumps({**about(), "figures": rows}, indent=1) + "\n")
    for row in rows:
        ratio = f"{row['of_plain_read']:7.3f}" if "of_plain_read" in row else ""
        print(f"{row['name']:<48} {row['ms']:9.4f} ms {row['gb_per_s']:9.1f} GB/s {ratio}")


if __name__ == "__main__":
    main()
