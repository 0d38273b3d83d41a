"""The caches of `worldmove bench delta`: each block makes of the one before what must be there after it."""

from __future__ import annotations

import numpy as np
import pytest

from worldmove.bench.cache import FRAME_STEP, FRAMES, NEW, PATTERNS, REGIONS, Cache, Pattern


def memory(cache: Cache) -> list[np.ndarray]:
    return [np.zeros(region.nbytes, dtype=np.uint8) for region in cache.regions]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_lead_to_what_is_expected_and_to_nothing_else(pattern: Pattern) -> None:
    cache = Cache(pattern, REGIONS * FRAMES * FRAME_STEP)
    cache.regions = cache.regions[:2]
    there = memory(cache)
    cache.fill(there, 0)
    for block in range(1, 9):
        cache.generate(there, block)
        assert cache.right(there, block)
        assert not cache.right(there, block - 1)
    there[1][-1] ^= 1
    assert not cache.right(there, 8)


def test_frames_of_each_pattern() -> None:
    assert Cache("shift", 1).frames(2) == list(range(6, 27))
    assert Cache("shift+sink", 1).frames(2) == [-1, -2, -3, *range(9, 27)]
    ring = Cache("ring", 1)
    assert ring.frames(2) == [21, 22, 23, 24, 25, 26, *range(6, 21)]
    assert sum(a != b for a, b in zip(ring.frames(2), ring.frames(3), strict=True)) == NEW
    assert not {*Cache("rewrite", 1).frames(1)} & {*Cache("rewrite", 1).frames(2)}


def test_the_stride_is_whole_leaves() -> None:
    for nbytes in (1, 128 * 10**6, 10**9):
        for region in Cache("shift", nbytes).regions:
            assert region.stride_bytes is not None
            assert region.stride_bytes % region.leaf_bytes == 0
