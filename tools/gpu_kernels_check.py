"""Checks every kernel on a GPU against its reference: fresh random inputs, poisoned outputs, one exit code.

python tools/gpu_kernels_check.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupy as cp
import numpy as np
import xxhash

from worldmove.kernels.device import upload
from worldmove.kernels.leaf_digest_cuda import DigestPlan, LeafDigest
from worldmove.kernels.pieces import PIECE, digest_pieces, leaf_total, make_pieces
from worldmove.kernels.runs import (
    copy_runs,
    gather_runs,
    make_runs,
    packed_bytes,
    read_runs,
    scatter_runs,
)
from worldmove.kernels.runs_cuda import RunKernels
from worldmove.kernels.table_diff import table_diff
from worldmove.kernels.table_diff_cuda import TableDiff

KIB = 1024
POISON = 0xA5


class Mirror:
    """The same bytes in host and device memory."""

    def __init__(self, nbytes: int, seed: int, poison: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.room = np.empty(nbytes + 256, dtype=np.uint8)
        self.host = self.room[-self.room.ctypes.data % 256 :][:nbytes]
        self.host[:] = POISON if poison else random.integers(0, 256, nbytes, dtype=np.uint8)
        self.device = cp.asarray(self.host)
        self.at_host, self.at_device = self.host.ctypes.data, self.device.data.ptr

    def same(self) -> bool:
        """Whether both still hold the same."""
        return bool(np.array_equal(self.host, cp.asnumpy(self.device)))


def must(holds: bool, what: str) -> None:
    """Ends the program unless `holds`."""
    if not holds:
        raise SystemExit(f"WRONG: {what}")


def check_lengths(random: np.random.Generator, digest: LeafDigest) -> None:
    """Every length from 0 to 2048 at even and odd addresses, by the plain kernel."""
    lengths = np.arange(2049)
    none = upload(np.zeros(0, dtype=PIECE), 0)
    for seed in (0, 1, int(random.integers(0, 2**64, dtype=np.uint64))):
        for offset in (0, 1, 3, 8, 15):
            data = Mirror(4096, int(random.integers(2**32)))
            pieces = np.zeros(len(lengths), dtype=PIECE)
            pieces["address"], pieces["length"] = data.at_device + offset, lengths
            pieces["leaf_bytes"] = np.maximum(lengths, 1)
            pieces["first"] = pieces["first_leaf"] = lengths
            table = cp.full((len(lengths), 16), POISON, dtype=cp.uint8)
            digest.digest(DigestPlan(none, upload(pieces, len(lengths))), seed, table.data.ptr)
            found = cp.asnumpy(table)
            for n in lengths:
                wanted = xxhash.xxh3_128_digest(data.host[offset : offset + n].data, seed)
                must(found[n].tobytes() == wanted, f"digest of {n} bytes, seed {seed:#x}, offset {offset}")


def check_sizes(random: np.random.Generator, kernel: LeafDigest) -> None:
    """Every leaf size that the leaf rule can give, and pieces of all kinds in one plan."""
    data, target = Mirror(600 * KIB, int(random.integers(2**32))), Mirror(600 * KIB, 0, poison=True)
    sizes = np.arange(8 * KIB, 256 * KIB + 1, 256)
    starts = random.integers(0, 20 * KIB, len(sizes)) * 16
    count = 4000
    mixed_sizes = random.choice([1, 100, 240, 256, 1000, 1024, 8 * KIB, 9984], count)
    mixed_lengths = random.integers(1, 4, count) * mixed_sizes + random.choice([0, 1, 255, 256, 777], count)
    mixed_starts = random.integers(0, 500 * KIB, count)
    mixed_starts[::2] &= ~15
    for what, at, nbytes, size in (
        ("leaf sizes", starts, sizes, sizes),
        ("4,000 pieces", mixed_starts, mixed_lengths, mixed_sizes),
    ):
        pieces = make_pieces(at + data.at_host, nbytes, size, np.zeros(len(at), dtype=int))
        pieces["first_leaf"] = pieces["first"]
        rows = leaf_total(pieces)
        wanted = np.full((rows, 16), POISON, dtype=np.uint8)
        digest_pieces(pieces, 77, wanted)
        pieces["address"] += np.uint64((data.at_device - data.at_host) % 2**64)
        table = cp.full((rows, 16), POISON, dtype=cp.uint8)
        kernel.digest(kernel.plan(pieces), 77, table.data.ptr)
        must(bool(np.array_equal(cp.asnumpy(table), wanted)), what)
    pieces = make_pieces([data.at_device + 32], [9984 * 60], 9984, [0], [target.at_device + 16])
    table, again = cp.full((60, 16), POISON, dtype=cp.uint8), cp.full((60, 16), 0, dtype=cp.uint8)
    kernel.digest_copy(kernel.plan(pieces), 5, table.data.ptr)
    kernel.digest(kernel.plan(pieces), 5, again.data.ptr)
    target.host[16 : 16 + 9984 * 60] = data.host[32 : 32 + 9984 * 60]
    must(target.same() and bool(cp.array_equal(table, again)), "digesting copy")


def scattered(random: np.random.Generator, count: int, longest: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Places and lengths of runs that don't overlap, of every alignment, and the room that they need."""
    lengths = random.integers(0, longest, count)
    places = np.cumsum(random.integers(0, 40, count)) + np.cumsum(lengths) - lengths
    return places, lengths, int(places[-1] + lengths[-1])


def check_runs(random: np.random.Generator, kernels: RunKernels) -> None:
    """Copies, gathers, scatters, fills and reads."""
    for count, longest in ((3000, 60), (50, 300_000)):
        places, lengths, room = scattered(random, count, longest)
        skew = np.where(np.arange(count) % 3 == 0, 0, np.arange(count) % 16)
        source, target = Mirror(room + 64, int(random.integers(2**32))), Mirror(room, 0, poison=True)
        for blocks in (1, 32, None):
            kernels.copy(
                kernels.plan(make_runs(source.at_device + places + skew, target.at_device + places, lengths)),
                blocks,
            )
            copy_runs(make_runs(source.at_host + places + skew, target.at_host + places, lengths))
            must(target.same(), f"copy of {count} runs by {blocks} blocks")
            target.device[:] = POISON
            target.host[:] = POISON
        packed = cp.full(packed_bytes(source.at_device + places, lengths), POISON, dtype=cp.uint8)
        gathered = gather_runs(source.at_device + places, lengths, packed.data.ptr)
        kernels.copy(kernels.plan(gathered))
        kernels.copy(kernels.plan(scatter_runs(target.at_device + places, lengths, packed.data.ptr)))
        copy_runs(make_runs(source.at_host + places, target.at_host + places, lengths))
        must(target.same(), "gather and scatter")
        kernels.fill(kernels.plan(make_runs(lengths * 0, target.at_device + places, lengths)), 0x3C)
        for place, length in zip(places, lengths, strict=True):
            target.host[place : place + length] = 0x3C
        must(target.same(), "fill")
    data = Mirror(512 * KIB, int(random.integers(2**32)))
    starts, lengths = np.array([0, 70 * KIB, 400 * KIB]), np.array([65 * KIB, 300 * KIB + 16, 16])
    sums = kernels.read(kernels.plan(make_runs(starts + data.at_device, starts, lengths)))
    wanted = read_runs(make_runs(starts + data.at_host, starts, lengths))
    must(int(np.bitwise_xor.reduce(cp.asnumpy(sums))) == wanted, "read")


def check_tables(random: np.random.Generator) -> None:
    """Differences of tables of many sizes."""
    diff = TableDiff(100_000)
    diff.warm_up()
    for leaves in (0, 1, 1023, 1024, 1025, 100_000):
        mine = random.integers(0, 256, (leaves, 16), dtype=np.uint8)
        theirs = mine.copy()
        changed = np.flatnonzero(random.random(leaves) < 0.1)
        theirs[changed, random.integers(0, 16, len(changed))] ^= 1
        known = [(random.random(leaves) > 0.05).astype(np.uint8) for _ in range(2)]
        out = diff.difference()
        out.leaves.fill(-1)
        arrays = [cp.asarray(array) for array in (mine, theirs, *known)]
        compare(diff, arrays, leaves, out)
        wanted = table_diff(mine, theirs, *known)
        found = cp.asnumpy(out.leaves)
        must(int(out.count[0]) == len(wanted), f"count of {leaves} leaves")
        must(bool(np.array_equal(found[: len(wanted)], wanted)), f"difference of {leaves} leaves")
        must(bool(np.all(found[len(wanted) :] == -1)), f"writes beside the list of {leaves} leaves")


def compare(diff: TableDiff, arrays: list[Any], leaves: int, out: Any) -> None:
    """Compares two tables with their masks."""
    mine, theirs, known_mine, known_theirs = (array.data.ptr for array in arrays)
    diff.compare(
        mine=mine, theirs=theirs, known_mine=known_mine, known_theirs=known_theirs, leaves=leaves, out=out
    )


def check() -> None:
    """All kernels, on inputs that no run has had before."""
    random = np.random.default_rng()
    digest, runs = LeafDigest(), RunKernels()
    digest.warm_up()
    runs.warm_up()
    check_lengths(random, digest)
    check_sizes(random, digest)
    check_runs(random, runs)
    check_tables(random)
    print("every kernel equals its reference")


if __name__ == "__main__":
    check()
