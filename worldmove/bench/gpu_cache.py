"""The caches of `worldmove bench delta` on a GPU: written, moved on and compared there, frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from msgspec.structs import replace

from worldmove.bench.cache import FRAMES, NEW, SINK, Cache, Pattern, mixed
from worldmove.bench.gpu_actor import BLOCKS, CODE, THREADS


class GpuCache(Cache):
    """As `Cache`; a frame's words are those that the kernels of `gpu_actor` make of its number.

    Args:
        pattern, nbytes: see `Cache`.
        device: UUID of the GPU, which is the current one.
    """

    def __init__(self, pattern: Pattern, nbytes: int, device: str) -> None:
        super().__init__(pattern, nbytes)
        self.regions = [replace(region, device=device) for region in self.regions]
        module = cupy.RawModule(code=CODE)
        self._write_words = module.get_function("write_words")
        self._compare_words = module.get_function("compare_words")
        self._words = np.uint64(self._frame // 8)
        # Before anything is registered: what a process has compiled is part of its fingerprint.
        self._write_words((1,), (1,), (cupy.zeros(1, dtype=cupy.uint64), np.uint64(1), np.uint64(0)))

    def generate(self, memory: Sequence[Any], block: int) -> None:
        """See `Cache.generate`; returns before it is done."""
        before, after = self.frames(block - 1), self.frames(block)
        shifts = self.pattern in ("shift", "shift+sink")
        first = SINK if self.pattern == "shift+sink" else 0
        for number, region in enumerate(memory):
            if shifts:
                region[first * self._frame : -NEW * self._frame] = region[
                    (first + NEW) * self._frame :
                ].copy()
            for place in range(FRAMES - NEW if shifts else 0, FRAMES):
                if before[place] != after[place]:
                    self._write(region, number, place, after[place])

    def right(self, memory: Sequence[Any], block: int) -> bool:
        """See `Cache.right`."""
        wrong = cupy.zeros(1, dtype=cupy.uint64)
        for number, region in enumerate(memory):
            for place, frame in enumerate(self.frames(block)):
                there = region[place * self._frame : (place + 1) * self._frame]
                self._compare_words((BLOCKS,), (THREADS,), (there, self._words, _seed(number, frame), wrong))
        return int(wrong[0]) == 0

    def _write(self, region: Any, number: int, place: int, frame: int) -> None:
        there = region[place * self._frame : (place + 1) * self._frame]
        self._write_words((BLOCKS,), (THREADS,), (there, self._words, _seed(number, frame)))


def _seed(region: int, frame: int) -> np.uint64:
    return np.uint64(mixed(region << 40 ^ (frame & 0xFFFFFFFF)))
