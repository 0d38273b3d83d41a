"""Caches as world models keep them, in plain bytes: what is in each frame is a function of its number alone.

So what has arrived somewhere is compared with what must be there, and no copy is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from worldmove.worker import Region

Pattern = Literal["shift", "shift+sink", "ring", "rewrite"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)

REGIONS = 60
FRAMES = 21
NEW = 3
SINK = 3
FRAME_STEP = 32 << 10
"""Frames are multiples of this, so that three of them, the stride, are whole leaves."""

Bytes = npt.NDArray[np.uint8]
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


class Cache:
    """The keys and values of 30 layers over 21 frames, of which each block makes 3 anew.

    Args:
        pattern: `shift`: all frames move towards the beginning. `shift+sink`: the first three stay.
            `ring`: new frames take the place of the oldest. `rewrite`: everything is new in every block.
        nbytes: about how large.
    """

    def __init__(self, pattern: Pattern, nbytes: int) -> None:
        self.pattern = pattern
        self._frame = max(1, round(nbytes / REGIONS / FRAMES / FRAME_STEP)) * FRAME_STEP
        names = [f"layer{number // 2:02}.{'kv'[number % 2]}" for number in range(REGIONS)]
        shape, stride = (FRAMES * self._frame // 2,), NEW * self._frame
        self.regions = [
            Region(name=name, dtype="bfloat16", shape=shape, stride_bytes=stride) for name in names
        ]
        self._noise = np.random.default_rng(1).integers(0, 1 << 64, self._frame // 8, dtype=np.uint64)

    def frames(self, block: int) -> list[int]:
        """The number of the frame in each place after a block; -1: the frames that never change."""
        numbers = [NEW * block + place for place in range(FRAMES)]
        if self.pattern == "rewrite":
            return [FRAMES * block + place for place in range(FRAMES)]
        if self.pattern == "ring":
            return [next(each for each in numbers if each % FRAMES == place) for place in range(FRAMES)]
        if self.pattern == "shift+sink":
            return [-1 - place for place in range(SINK)] + numbers[SINK:]
        return numbers

    def fill(self, memory: Sequence[Bytes], block: int) -> None:
        """Writes all of it, as it is after a block."""
        for number, region in enumerate(memory):
            for place, frame in enumerate(self.frames(block)):
                self._write(region, number, place, frame)

    def generate(self, memory: Sequence[Bytes], block: int) -> None:
        """Makes of the cache after the block before what it is after `block`, region by region."""
        before, after = self.frames(block - 1), self.frames(block)
        for number, region in enumerate(memory):
            if self.pattern in ("shift", "shift+sink"):
                first = SINK if self.pattern == "shift+sink" else 0
                moved = region[(first + NEW) * self._frame :]
                region[first * self._frame : -NEW * self._frame] = moved
                places = range(FRAMES - NEW, FRAMES)
            else:
                places = range(FRAMES)
            for place in places:
                if before[place] != after[place]:
                    self._write(region, number, place, after[place])

    def right(self, memory: Sequence[Bytes], block: int) -> bool:
        """Whether every byte is what it must be after a block."""
        wanted = np.empty(self._frame, dtype=np.uint8)
        for number, region in enumerate(memory):
            for place, frame in enumerate(self.frames(block)):
                self._write(wanted, number, 0, frame)
                there = region[place * self._frame : (place + 1) * self._frame]
                if not np.array_equal(wanted, there):
                    return False
        return True

    def _write(self, region: Bytes, number: int, place: int, frame: int) -> None:
        words = region[place * self._frame : (place + 1) * self._frame].view(np.uint64)
        np.bitwise_xor(self._noise, np.uint64(mixed(number << 40 ^ (frame & 0xFFFFFFFF))), out=words)


def mixed(value: int) -> int:
    """SplitMix64: neighbouring numbers have nothing in common."""
    value = (value + 1) * _MIX[0] & _WORD
    value = (value ^ value >> 30) * _MIX[1] & _WORD
    value = (value ^ value >> 27) * _MIX[2] & _WORD
    return value ^ value >> 31
