"""`worldmove bench digest`: how fast the host's executor digests, against stock xxhash on one core."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import uvloop

from worldmove.bench.report import Line, show
from worldmove.bench.stats import gbps, median
from worldmove.digest import LeafTable, new_seed
from worldmove.executor.messages import Piece
from worldmove.executor.pool import ExecutorPool
from worldmove.ipc import map_shared
from worldmove.kernels.leaf_digest import DIGEST_BYTES, digest_leaves, leaf_count
from worldmove.manifest import DEFAULT_LEAF
from worldmove.memory.arena import create_arena


class DigestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; rates in Gb/s (10⁹ bit/s) of bytes digested, medians of `repeats` runs.

    Attributes:
        nbytes: bytes of one run.
        leaf_bytes: size of a leaf.
        executors: processes that shared the work.
        executor_gbps: the pool, from request to the last digest in the table.
        stock_gbps: stock `xxhash.xxh3_128_digest`, leaf by leaf, on one core.
        read_gbps: a plain sum over the same memory, on one core.
        ratio_executor_stock: the first by the second.
        equal: whether every digest equals stock xxhash's.
    """

    nbytes: int
    leaf_bytes: int
    executors: int
    repeats: int
    executor_gbps: float
    stock_gbps: float
    read_gbps: float
    ratio_executor_stock: float
    equal: bool


def run(*, mb: int = 1024, executors: int = 1, repeats: int = 5, json: bool = False) -> int:
    """Measures and shows.

    Args:
        mb: megabytes (10⁶) to digest in a run.
        executors: processes of the pool.
        repeats: runs of each kind, taken in turn.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every digest is right.
    """
    nbytes = max(mb * 10**6 // DEFAULT_LEAF, 1) * DEFAULT_LEAF
    result = uvloop.run(_measure(nbytes, executors, repeats))
    lines = [
        Line("one plain sum over the memory, one core", f"{result.read_gbps:.1f} Gb/s"),
        Line("stock xxhash, one core", f"{result.stock_gbps:.1f} Gb/s"),
        Line(f"the executor, {executors} process(es)", f"{result.executor_gbps:.1f} Gb/s"),
        Line("executor by stock", f"{result.ratio_executor_stock:.2f}"),
        Line("every digest equals stock xxhash's", "yes" if result.equal else "NO"),
    ]
    show(f"digest of {nbytes / 1e9:.2f} GB in leaves of {result.leaf_bytes} bytes", result, lines, json=json)
    return 0 if result.equal else 1


async def _measure(nbytes: int, executors: int, repeats: int) -> DigestResult:
    leaves = leaf_count(nbytes, DEFAULT_LEAF)
    seed = new_seed()
    memory = create_arena(nbytes, "worldmove-bench")
    table = LeafTable(leaves)
    pool = ExecutorPool(executors, nice=0)
    expected = bytearray(leaves * DIGEST_BYTES)
    reads, stocks, pooled = [], [], []
    try:
        with map_shared(memory, nbytes, populate=True) as mapping, memoryview(mapping) as view:
            fill(view)
            await pool.start()
            key = await pool.attach(memory, nbytes, writable=False)
            table_key = await pool.attach(table.fd, table.nbytes, writable=True)
            piece = Piece(key, 0, nbytes, DEFAULT_LEAF, 0)
            for _ in range(repeats):
                reads.append(await asyncio.to_thread(_read, view))
                stocks.append(await asyncio.to_thread(_stock, view, seed, expected))
                start = time.perf_counter()
                await pool.digest(table_key, seed, [piece])
                pooled.append(time.perf_counter() - start)
            equal = table.slice(0, leaves) == bytes(expected)
    finally:
        await asyncio.shield(pool.close())
        table.close()
        os.close(memory)
    return DigestResult(
        nbytes=nbytes,
        leaf_bytes=DEFAULT_LEAF,
        executors=executors,
        repeats=repeats,
        executor_gbps=_rate(nbytes, pooled),
        stock_gbps=_rate(nbytes, stocks),
        read_gbps=_rate(nbytes, reads),
        ratio_executor_stock=median(stocks) / median(pooled),
        equal=equal,
    )


def _rate(nbytes: int, seconds: Sequence[float]) -> float:
    return gbps(nbytes, median(seconds))


def fill(view: memoryview, seed: int = 1) -> None:
    """Fills memory with noise that differs from leaf to leaf and by `seed`; reproducible."""
    generator = np.random.Generator(np.random.PCG64(seed))
    step = 64 * 1024 * 1024
    for start in range(0, len(view), step):
        part = view[start : start + step]
        part[:] = generator.bytes(len(part))


def _read(view: memoryview) -> float:
    words = np.frombuffer(view, dtype=np.uint64)
    start = time.perf_counter()
    words.sum()
    return time.perf_counter() - start


def _stock(view: memoryview, seed: int, out: bytearray) -> float:
    start = time.perf_counter()
    digest_leaves(view, DEFAULT_LEAF, seed, memoryview(out))
    return time.perf_counter() - start
