"""Memories whose leaves move about: where they lie, and what becomes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from gpu_kit import GPUS, imagine
from inbound_kit import KIB, Bench, bench
from msgspec.structs import replace

from worldmove.executor import kinds
from worldmove.executor.devices import Executors
from worldmove.executor.pool import ExecutorPool
from worldmove.manifest import HOST, Region
from worldmove.memory.arena import MemoryBudget

LEAF = 8 * KIB
LEAVES = 48
STRIDE = 8 * KIB
REGIONS = tuple(Region(name, "uint8", (LEAVES * LEAF,), stride_bytes=STRIDE) for name in ("k", "v", "w"))
STATE = 3 * LEAVES * LEAF

PLACES = {"host": (HOST,) * 3, "gpu": (GPUS[0],) * 3, "mixed": (GPUS[0], HOST, GPUS[1])}
"""Where the regions lie."""

Change = Callable[[Bench, np.random.Generator], None]


class Budget(MemoryBudget):
    """Of host memory, and of GPUs."""

    def __init__(self, executors: Executors) -> None:
        super().__init__()
        self._executors = executors

    async def allocate_on(self, device: str, nbytes: int) -> int:
        return await self._executors.of(device).allocate(nbytes)


@asynccontextmanager
async def pools(devices: tuple[str, ...]) -> AsyncIterator[Executors]:
    """Executors of the host and of all GPUs among `devices`, which are imagined."""
    gpus = {uuid: ExecutorPool(1, nice=0, kind=kinds.gpu(uuid)) for uuid in sorted({*devices} - {HOST})}
    made = Executors(ExecutorPool(2, nice=0), gpus)
    with pytest.MonkeyPatch.context() as patch:
        imagine(patch)
        await made.start()
        yield made
        await made.close()


@asynccontextmanager
async def moved_once(executors: Executors, devices: tuple[str, ...]) -> AsyncIterator[Bench]:
    """Both ends with the regions on `devices`, after a live round that brought everything."""
    regions = tuple(replace(region, device=on) for region, on in zip(REGIONS, devices, strict=True))
    async with bench(executors, regions, batch_bytes=4 * LEAF, arenas=Budget(executors)) as made:
        await made.round(1, final=False, table=False)
        made.path.pulled()
        yield made


def fresh(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def shift(both: Bench, rng: np.random.Generator, sink: int = 0, by: int = 4) -> None:
    for region in both.source.regions:
        region[sink * LEAF : -by * LEAF] = region[(sink + by) * LEAF :].copy()
        region[-by * LEAF :] = fresh(rng, by * LEAF)


def shift_with_sink(both: Bench, rng: np.random.Generator) -> None:
    shift(both, rng, sink=6)


def ring(both: Bench, rng: np.random.Generator) -> None:
    for region in both.source.regions:
        region[8 * LEAF : 12 * LEAF] = fresh(rng, 4 * LEAF)


def zeros(both: Bench, _rng: np.random.Generator) -> None:
    both.source.regions[0][: 2 * LEAF] = 0
    both.source.regions[1][:] = 0


def exchange(both: Bench, _rng: np.random.Generator) -> None:
    first, second = both.source.regions[0], both.source.regions[2]
    first[:], second[:] = second.copy(), first.copy()


def permute(both: Bench, rng: np.random.Generator) -> None:
    everything = np.concatenate(both.source.regions).reshape(-1, LEAF)[rng.permutation(3 * LEAVES)]
    for region, part in zip(both.source.regions, everything.reshape(3, -1), strict=True):
        region[:] = part


def rewrite(both: Bench, rng: np.random.Generator) -> None:
    for region in both.source.regions:
        region[:] = fresh(rng, region.size)
