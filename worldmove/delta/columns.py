"""Moves of bytes within one memory, as columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worldmove.delta.geometry import Geometry, Longs

SCRATCH = -1
"""In place of a region: the scratch."""


class Move(NamedTuple):
    """`length` bytes from a region's (or the scratch's) offset to another's."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    length: int


class Columns(NamedTuple):
    """Moves, all int64.

    Attributes:
        source, source_offset, target, target_offset, length: as in `Move`.
        reads, writes: the first leaf that is read or written; -1 where it is the scratch.
        leaves: how many.
    """

    source: Longs
    source_offset: Longs
    target: Longs
    target_offset: Longs
    length: Longs
    reads: Longs
    writes: Longs
    leaves: Longs

    @classmethod
    def from_leaves(cls, geometry: Geometry, targets: Longs, sources: Longs, count: Longs) -> Columns:
        """Moves of `count` leaves each, from `sources` on to `targets` on, in one region at each end."""
        owner, offset, last = geometry.owner, geometry.offset, targets + count - 1
        length = offset[last] + geometry.length[last] - offset[targets]
        return cls(
            owner[sources], offset[sources], owner[targets], offset[targets], length, sources, targets, count
        )

    def of(self, some: slice | Longs) -> Columns:
        """Some of them."""
        return Columns(*(column[some] for column in self))

    def moves(self) -> list[Move]:
        """Each as an object."""
        columns = (self.source, self.source_offset, self.target, self.target_offset, self.length)
        return [Move(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def joined(first: Columns, second: Columns) -> Columns:
    """One after the other."""
    return Columns(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def ramp(count: Longs) -> Longs:
    """0 to c - 1 for each c of `count`, one after another."""
    total = int(count.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
