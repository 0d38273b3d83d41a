"""The bytes that a resized region keeps, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.sdk import corner as module
from worldmove.sdk.corner import corner
from worldmove.sdk.memory import copy_common

SIZES = st.integers(0, 4)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    old = tuple(draw(st.lists(SIZES, max_size=4)))
    if draw(st.booleans()):
        return old, tuple(size if draw(st.booleans()) else draw(SIZES) for size in old)
    return old, tuple(draw(st.lists(SIZES, max_size=4)))


def kept(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What the rows bring into zeros, and what NumPy does."""
    before = np.arange(1, math.prod(old) + 1, dtype=np.uint16).reshape(old)
    expected = np.zeros(new, dtype=np.uint16)
    copy_common(before, expected)
    source, target = before.tobytes(), bytearray(expected.nbytes)
    for rows in corner(old, new, 2):
        for row in range(rows.height):
            at, to = rows.source + row * rows.source_pitch, rows.target + row * rows.target_pitch
            target[to : to + rows.width] = source[at : at + rows.width]
    return bytes(target), expected.tobytes()


@given(shapes())
def test_rows_are_numpys_corner(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    found, expected = kept(*pair)
    assert found == expected


def test_where_rows_would_be_too_far_apart_they_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(corner((3, 5, 2), (3, 6, 2), 2))) == 1
    monkeypatch.setattr(module, "MAX_PITCH", 20)
    assert len(list(corner((3, 5, 2), (3, 6, 2), 2))) == 3
    found, expected = kept((3, 5, 2), (3, 6, 2))
    assert found == expected


def test_a_longer_cache_is_one_copy() -> None:
    (rows,) = corner((1, 300, 12, 128), (1, 400, 12, 128), 2, (1 << 20, 1 << 21))
    assert (rows.source, rows.target, rows.width, rows.height) == (1 << 20, 1 << 21, 300 * 12 * 128 * 2, 1)
