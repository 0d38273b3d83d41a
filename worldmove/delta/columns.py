"""Leaves that go the same way as runs, and moves of bytes within one memory, as columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worldmove.delta.geometry import Flags, Geometry, Longs

SCRATCH = -1
"""In place of a region: the scratch."""


class Runs(NamedTuple):
    """int64 columns: so many `leaves` from `source` on go to those from `target` on, ascending by target."""

    target: Longs
    source: Longs
    leaves: Longs

    def of(self, some: Longs | Flags) -> Runs:
        """Some of them."""
        return Runs(self.target[some], self.source[some], self.leaves[some])

    def nbytes(self, geometry: Geometry) -> Longs:
        """Bytes of each."""
        last = self.target + self.leaves - 1
        nbytes: Longs = geometry.offset[last] + geometry.length[last] - geometry.offset[self.target]
        return nbytes


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
    def from_runs(cls, geometry: Geometry, runs: Runs) -> Columns:
        """A move for each, which lies in one region at each end."""
        target, source, leaves = runs
        return cls(
            source=geometry.owner[source],
            source_offset=geometry.offset[source],
            target=geometry.owner[target],
            target_offset=geometry.offset[target],
            length=runs.nbytes(geometry),
            reads=source,
            writes=target,
            leaves=leaves,
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


def merged(geometry: Geometry, targets: Longs, sources: Longs) -> Runs:
    """Neighbours that go the same way, within one region at each end, as runs; targets ascend, each once."""
    if not targets.size:
        return Runs(targets, sources, targets)
    breaks = targets[1:] - targets[:-1] != 1
    breaks |= sources[1:] - sources[:-1] != 1
    # Within a run both go up by one, so that only the edges between regions are missing.
    breaks |= geometry.begins[targets[1:]]
    breaks |= geometry.begins[sources[1:]]
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return Runs(targets[starts], sources[starts], np.diff(np.append(starts, targets.size)))


def in_one(some: list[Runs]) -> Runs:
    """Runs with different targets, all together."""
    some = [runs for runs in some if runs.target.size]
    if not some:
        return Runs(*(np.zeros(0, dtype=np.int64),) * 3)
    if len(some) == 1:
        return some[0]
    joint = Runs(*(np.concatenate(column) for column in zip(*some, strict=True)))
    return joint.of(np.argsort(joint.target))


def edges_of(leaves: Flags, begins: Flags) -> tuple[Longs, Longs]:
    """Where rows of neighbours that are set begin, and how many each has; a new row where `begins` is set."""
    change = begins.copy()
    change[:1] = True
    change[1:] |= leaves[1:] != leaves[:-1]
    edges = np.flatnonzero(change)
    count = np.diff(np.append(edges, leaves.size))
    inside = leaves[edges]
    return edges[inside], count[inside]


def every(first: Longs, leaves: Longs) -> Longs:
    """`leaves` numbers from `first` on, for each of them, one after another."""
    done = np.cumsum(leaves)
    total = int(done[-1]) if done.size else 0
    return np.repeat(first - (done - leaves), leaves) + np.arange(total, dtype=np.int64)


def ramp(count: Longs) -> Longs:
    """0 to c - 1 for each c of `count`, one after another."""
    total = int(count.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
