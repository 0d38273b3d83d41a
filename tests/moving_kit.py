"""Memories whose leaves move about: where they lie, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from inbound_kit import KIB, Bench

from worldmove.executor.devices import Executors
from worldmove.manifest import Region
from worldmove.memory.arena import MemoryBudget

LEAF = 8 * KIB
LEAVES = 48
STRIDE = 8 * KIB
REGIONS = tuple(Region(name, "uint8", (LEAVES * LEAF,), stride_bytes=STRIDE) for name in ("k", "v", "w"))
STATE = 3 * LEAVES * LEAF

Change = Callable[[Bench, np.random.Generator], None]


class Budget(MemoryBudget):
    """Of host memory, and of GPUs."""

    def __init__(self, executors: Executors) -> None:
        super().__init__()
        self._executors = executors

    async def allocate_on(self, device: str, nbytes: int) -> int:
        return await self._executors.of(device).allocate(nbytes)


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
