"""Ordered copies as launches: whatever the order within one, the bytes are those of `memmove` in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.kernels import shifts
from worldmove.kernels.runs import Runs
from worldmove.kernels.shifts import Scratch, launches

ROOM, SCRATCH = 2000, 400


def in_order(memory: np.ndarray, copies: list[tuple[int, int, int]]) -> np.ndarray:
    out = memory.copy()
    for source, target, length in copies:
        out[target : target + length] = out[source : source + length].copy()
    return out


def disjoint(runs: Runs) -> bool:
    """No target overlaps another one, or any source, its own included."""
    written = np.zeros(ROOM + SCRATCH, dtype=np.int64)
    for _, target, length, _ in runs.tolist():
        written[target : target + length] += 1
    return written.max(initial=0) <= 1 and not any(
        written[source : source + length].any() for source, _, length, _ in runs.tolist()
    )


def launched(memory: np.ndarray, made: list[Runs]) -> np.ndarray:
    out = np.concatenate([memory, np.zeros(SCRATCH, dtype=memory.dtype)])
    for runs in made:
        assert disjoint(runs)
        for source, target, length, _ in reversed(runs.tolist()):
            out[target : target + length] = out[source : source + length]
    return out[:ROOM]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces as small as the memory of these tests."""
    monkeypatch.setattr(shifts, "LEAST_PIECE", 64)


@given(
    st.lists(
        st.tuples(st.integers(0, ROOM - 1), st.integers(0, ROOM - 1), st.integers(0, 300)).map(
            lambda one: (one[0], one[1], min(one[2], ROOM - one[0], ROOM - one[1]))
        ),
        max_size=20,
    )
)
def test_any_copies_in_any_order_within_a_launch_are_as_one_after_the_other(
    copies: list[tuple[int, int, int]],
) -> None:
    memory = np.random.default_rng(1).integers(0, 1 << 60, ROOM)
    assert np.array_equal(launched(memory, list(launches(copies))), in_order(memory, copies))


def test_a_rolling_cache_takes_as_many_launches_as_its_way_fits_into_it() -> None:
    """All regions at once: 18 of 21 frames move by three."""
    frame = 10
    copies = [(base + 3 * frame, base, 18 * frame) for base in range(0, ROOM - 21 * frame, 21 * frame)]
    made = list(launches(copies))
    assert len(made) == 6
    assert all(runs.size == len(copies) for runs in made)


@pytest.mark.parametrize("way", [-8192, 8192])
def test_a_short_way_goes_through_the_scratch_where_that_is_sooner(way: int) -> None:
    length, scratch = 1 << 20, 256 << 10
    memory = np.random.default_rng(2).integers(0, 256, (2 << 20) + scratch, dtype=np.uint8)
    copies = [(65536, 65536 + way, length), ((1 << 20) + 131072, (1 << 20) + 131072 + way, length // 2)]
    made = list(launches(copies, Scratch(2 << 20, scratch)))
    assert len(made) == 16 < length // 8192
    assert len(list(launches(copies))) == length // 8192
    out = memory.copy()
    for runs in made:
        for source, target, size, _ in reversed(runs.tolist()):
            out[target : target + size] = out[source : source + size]
    assert np.array_equal(out[: 2 << 20], in_order(memory, copies)[: 2 << 20])


def test_two_regions_change_places_through_a_third() -> None:
    copies = [(0, 600, 300), (300, 0, 300), (600, 300, 300)]
    memory = np.arange(ROOM)
    made = list(launches(copies))
    assert len(made) == 3
    assert np.array_equal(launched(memory, made)[:600], np.r_[300:600, 0:300])


def test_nothing_is_launched_for_nothing() -> None:
    assert list(launches([])) == list(launches([(5, 5, 10), (1, 2, 0)])) == []
