"""Copies within one memory that depend on their order, as launches of `copy_runs` that depend on none.

A launch works on its runs in any order and at once. So copies are cut: where one reads what an earlier one
writes, or writes what it reads, a new launch begins; and a copy that overlaps itself goes in steps of the
distance over which it moves, or through a scratch where those would be too many. Pure; addresses are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.kernels.runs import Runs, make_runs

Longs = npt.NDArray[np.int64]

MOST_STEPS = 32
"""Steps of one copy before it is looked at whether a scratch would take fewer."""
LEAST_PIECE = 64 << 10
"""Of a scratch, for each copy that goes through it at the same time."""


class Scratch(NamedTuple):
    """Memory that nobody else uses meanwhile."""

    address: int
    nbytes: int


class _Copies(NamedTuple):
    source: Longs
    target: Longs
    length: Longs

    def of(self, some: slice | Longs | npt.NDArray[np.bool_]) -> _Copies:
        return _Copies(self.source[some], self.target[some], self.length[some])


def launches(copies: Sequence[tuple[int, int, int]], scratch: Scratch | None = None) -> Iterator[Runs]:
    """Runs of one launch after another that do what the copies do one after another.

    Args:
        copies: (source, target, bytes); each may overlap itself, as in `memmove`.
        scratch: may be used, where it saves launches.
    """
    columns = np.array(copies, dtype=np.int64).reshape(-1, 3)
    columns = columns[(columns[:, 2] > 0) & (columns[:, 0] != columns[:, 1])]
    everything = _Copies(columns[:, 0], columns[:, 1], columns[:, 2])
    for wave in _waves(everything):
        yield from _steps(everything.of(wave), scratch)


def _waves(copies: _Copies) -> Iterator[slice]:
    """Stretches of copies of which none touches what another one writes, each as long as can be."""
    start, count = 0, copies.length.size
    while start < count:
        stop = count
        if _clash(copies.of(slice(start, stop))):
            good, bad = start + 1, count  # one alone never clashes, and what clashes does so with more, too
            while bad - good > 1:
                middle = (good + bad) // 2
                if _clash(copies.of(slice(start, middle))):
                    bad = middle
                else:
                    good = middle
            stop = good
        yield slice(start, stop)
        start = stop


def _clash(copies: _Copies) -> bool:
    """Whether one copy writes what another one reads or writes."""
    order = np.argsort(copies.target)
    begin, end = copies.target[order], (copies.target + copies.length)[order]
    if (end[:-1] > begin[1:]).any():
        return True
    first = np.searchsorted(end, copies.source, side="right")
    last = np.searchsorted(begin, copies.source + copies.length, side="left")
    return bool((np.maximum(last - first, 0) > _overlaps(copies)).any())


def _overlaps(copies: _Copies) -> npt.NDArray[np.bool_]:
    own: npt.NDArray[np.bool_] = np.abs(copies.source - copies.target) < copies.length
    return own


def _steps(copies: _Copies, scratch: Scratch | None) -> Iterator[Runs]:
    """Launches for copies that don't touch what others write."""
    own = _overlaps(copies)
    distance = np.where(own, np.abs(copies.source - copies.target), copies.length)
    through = np.zeros(own.size, dtype=np.bool_)
    if scratch is not None:
        many = np.flatnonzero(-(-copies.length // distance) > MOST_STEPS)
        for group in _groups(many, scratch):
            piece = scratch.nbytes // group.size // 4096 * 4096
            through[
                group[-(-copies.length[group] // distance[group]) > 2 * -(-copies.length[group] // piece)]
            ] = True
    yield from _by_distance(copies.of(~through), distance[~through])
    if scratch is not None:
        for group in _groups(np.flatnonzero(through), scratch):
            yield from _by_scratch(copies.of(group), scratch)


def _groups(some: Longs, scratch: Scratch) -> Iterator[Longs]:
    """As many at a time as the scratch has room for."""
    each = max(1, scratch.nbytes // LEAST_PIECE)
    for first in range(0, some.size, each):
        yield some[first : first + each]


def _by_distance(copies: _Copies, distance: Longs) -> Iterator[Runs]:
    """In steps no longer than the way of each copy, in the direction in which nothing is lost."""
    for step in range(int((-(-copies.length // distance)).max(initial=0))):
        done, size = _piece(copies, distance, step)
        yield make_runs(copies.source + done, copies.target + done, size)


def _by_scratch(copies: _Copies, scratch: Scratch) -> Iterator[Runs]:
    """Piece by piece into the scratch, and from there to its place."""
    piece = max(scratch.nbytes // copies.length.size // 4096 * 4096, 4096)
    slots = scratch.address + piece * np.arange(copies.length.size)
    each = np.full(copies.length.size, piece, dtype=np.int64)
    for step in range(int((-(-copies.length // piece)).max())):
        done, size = _piece(copies, each, step)
        yield make_runs(copies.source + done, slots, size)
        yield make_runs(slots, copies.target + done, size)


def _piece(copies: _Copies, each: Longs, step: int) -> tuple[Longs, Longs]:
    """Where the next piece of each copy begins, and its length: 0 where none is left."""
    left = np.maximum(copies.length - step * each, 0)
    size = np.minimum(each, left)
    upwards = copies.source > copies.target
    return np.where(upwards, step * each, left - size), size
