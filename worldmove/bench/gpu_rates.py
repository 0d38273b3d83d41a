"""What `worldmove bench digest --gpu` measures: the digest kernel on one GPU beside a kernel that only reads.

Memory of one session, in as many regions as a model of 30 layers has, for each leaf size. Launches are queued
while the device is busy, so that they cost it no time; times are those of CUDA events. Samples of every table
are compared with stock xxhash, in tables that were poisoned before.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cupy
import msgspec
import numpy as np
import xxhash

from worldmove.bench.stats import median
from worldmove.cuda.driver import devices
from worldmove.digest import new_seed
from worldmove.kernels.leaf_digest import DIGEST_BYTES
from worldmove.kernels.leaf_digest_cuda import LeafDigest
from worldmove.kernels.pieces import make_pieces
from worldmove.kernels.runs import make_runs
from worldmove.kernels.runs_cuda import RunKernels

REGIONS = 60
UNIT = 512
LEAVES = (8192, 16384, 32768, 65536, 73728, 131072, 262144)
BARS = {65536: 0.9, 73728: 0.9}
BAR = 0.75
SAMPLES = 200
WARM_UP = 3
NOISE_BYTES = 32 << 20
_ANY_DIRECTION = 4


class LeafRate(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf size.

    Attributes:
        ms: median of the kernel's times over all memory. gb_per_s: 10⁹ bytes a second.
        ratio_read: the plain read's time by the kernel's. bar: what that should be at least.
        equal: whether all sampled digests are stock xxhash's.
    """

    leaf_bytes: int
    ms: float
    gb_per_s: float
    ratio_read: float
    bar: float
    equal: bool


class GpuDigestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: `read_ms` is the plain reading kernel's median; `leaves` one entry a leaf size."""

    device: str
    name: str
    nbytes: int
    regions: int
    repeats: int
    read_ms: float
    read_gb_per_s: float
    leaves: tuple[LeafRate, ...]


class _Memory:
    """The regions, their tables, and the kernels."""

    def __init__(self, region_bytes: int) -> None:
        self.region_bytes = region_bytes
        self.nbytes = REGIONS * region_bytes
        self.data = cupy.empty(self.nbytes, dtype=cupy.uint8)
        self.table = cupy.empty((REGIONS * -(-region_bytes // min(LEAVES)), DIGEST_BYTES), dtype=cupy.uint8)
        self.starts = np.arange(REGIONS, dtype=np.uint64) * np.uint64(region_bytes)
        self.starts += np.uint64(self.data.data.ptr)
        self.lengths = np.full(REGIONS, region_bytes)
        noise = np.random.default_rng(1).integers(0, 256, min(NOISE_BYTES, self.nbytes), dtype=np.uint8)
        for start in range(0, self.nbytes, noise.nbytes):
            part = min(noise.nbytes, self.nbytes - start)
            _copy(self.data.data.ptr + start, noise.ctypes.data, part)
        self.digests = LeafDigest()
        self.runs = RunKernels()
        self.reading = self.runs.plan(make_runs(self.starts, self.starts, self.lengths))

    def read(self) -> None:
        """Begins to read everything."""
        self.runs.read(self.reading)

    def digesting(self, leaf_bytes: int, seed: int) -> Callable[[], None]:
        """What begins to digest everything."""
        rows = np.arange(REGIONS) * self.rows(leaf_bytes)
        plan = self.digests.plan(make_pieces(self.starts, self.lengths, leaf_bytes, rows))
        return lambda: self.digests.digest(plan, seed, self.table.data.ptr)

    def rows(self, leaf_bytes: int) -> int:
        """Leaves of a region."""
        return -(-self.region_bytes // leaf_bytes)

    def poison(self) -> None:
        """Fills the table with what no digest is."""
        cupy.cuda.runtime.memset(self.table.data.ptr, 0xA5, self.table.nbytes)

    def equal(self, leaf_bytes: int, seed: int) -> bool:
        """Whether sampled rows of the table are stock xxhash's digests of what the memory holds."""
        rows = self.rows(leaf_bytes)
        drawn = np.random.default_rng().integers(0, REGIONS * rows, SAMPLES)
        for row in (0, REGIONS * rows - 1, *drawn.tolist()):
            region, leaf = divmod(row, rows)
            start = leaf * leaf_bytes
            there = _host(int(self.starts[region]) + start, min(leaf_bytes, self.region_bytes - start))
            digest = _host(self.table.data.ptr + row * DIGEST_BYTES, DIGEST_BYTES)
            if digest != xxhash.xxh3_128_digest(there, seed):
                return False
        return True


def measure(region_bytes: int, repeats: int) -> GpuDigestResult:
    """Measures.

    Args:
        region_bytes: of each region, a multiple of 512.
        repeats: runs of each kind, taken in turn.

    Raises:
        DeviceError: there is no GPU.
    """
    device = devices()[0]
    cupy.cuda.Device(device.ordinal).use()
    memory, seed = _Memory(region_bytes), new_seed()
    rates, reads = [], []
    for leaf_bytes in LEAVES:
        digest = memory.digesting(leaf_bytes, seed)
        memory.poison()
        read, digested = _in_turn(memory, digest, repeats)
        reads += read
        ms = median(digested)
        rates.append(
            LeafRate(
                leaf_bytes=leaf_bytes,
                ms=ms,
                gb_per_s=memory.nbytes / ms / 1e6,
                ratio_read=median(read) / ms,
                bar=BARS.get(leaf_bytes, BAR),
                equal=memory.equal(leaf_bytes, seed),
            )
        )
    return GpuDigestResult(
        device=device.uuid,
        name=device.name,
        nbytes=memory.nbytes,
        regions=REGIONS,
        repeats=repeats,
        read_ms=median(reads),
        read_gb_per_s=memory.nbytes / median(reads) / 1e6,
        leaves=tuple(rates),
    )


def _in_turn(memory: _Memory, digest: Callable[[], None], repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each plain read and of each digest, one after the other."""
    for _ in range(WARM_UP):
        memory.read()
        digest()
    marks: list[Any] = []
    for _ in range(repeats):
        marks.append(_mark())
        memory.read()
        marks.append(_mark())
        digest()
    marks.append(_mark())
    marks[-1].synchronize()
    times = [cupy.cuda.get_elapsed_time(one, other) for one, other in pairwise(marks)]
    return times[::2], times[1::2]


def _mark() -> Any:
    event = cupy.cuda.Event()
    event.record()
    return event


def _host(address: int, nbytes: int) -> bytes:
    out = np.empty(nbytes, dtype=np.uint8)
    _copy(out.ctypes.data, address, nbytes)
    return out.tobytes()


def _copy(target: int, source: int, nbytes: int) -> None:
    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memcpyAsync(target, source, nbytes, _ANY_DIRECTION, stream.ptr)
    stream.synchronize()
