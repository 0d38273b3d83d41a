"""Copies within one memory, in an order in which nothing is overwritten before it was read.

Two ways. *Runs*: copies of neighbouring leaves over one distance are one run, safe in itself (`memmove`); a
run goes before another that writes what it reads, in waves. So a rolling cache is one directional pass over
each region. *Leaves* (`circles`): what goes round in circles, or is too scattered for runs.

Everything is a column; nothing here loops over leaves, and moves become objects only when they are made.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from worldmove.delta.circles import opened
from worldmove.delta.columns import Columns, Move, joined, ramp
from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.manifest import HOST

MAX_WAVES = 512


class Limits(NamedTuple):
    """How copies are cut.

    Attributes:
        scratch_bytes: of the scratch, at least one leaf's.
        stage_bytes: about what one stage moves. A run that overlaps itself is cut from four times as much on,
            so that an executor can answer meanwhile.
        stage_moves: moves of one stage at most; small enough for one request.
        max_runs: with more runs, leaves are ordered one by one.
    """

    scratch_bytes: int = 16 << 20
    stage_bytes: int = 16 << 20
    stage_moves: int = 1024
    max_runs: int = 4096


LIMITS = Limits()
GPU_LIMITS = Limits(scratch_bytes=64 << 20, stage_bytes=1 << 50)
"""A GPU's executor finds out itself what may go at once, and answers meanwhile: stages cost round trips."""


def limits_of(device: str) -> Limits:
    """How copies on a device are cut."""
    return LIMITS if device == HOST else GPU_LIMITS


class Schedule:
    """Moves in stages, one stage after another.

    Args:
        columns: in the order in which they are made.
        stage: int64, ascending, the stage of each.
        ordered: of each stage, whether its moves are made in their order; otherwise in any and at once.

    Attributes:
        count: stages.
    """

    def __init__(self, columns: Columns, stage: Longs, ordered: list[bool]) -> None:
        self.count = len(ordered)
        self._columns = columns
        self._stage = stage
        self._ordered = ordered
        self._edges = np.searchsorted(stage, np.arange(self.count + 1)).tolist()

    def followed_by(self, other: Schedule) -> Schedule:
        """This one, and then another one, which touches nothing of it."""
        if not other.count or not self.count:
            return self if self.count else other
        stage = np.concatenate([self._stage, other._stage + self.count])
        return Schedule(joined(self._columns, other._columns), stage, self._ordered + other._ordered)

    def moves(self, stage: int) -> list[Move]:
        """What a stage moves; one move may overlap itself."""
        return self._part(stage).moves()

    def ordered(self, stage: int) -> bool:
        """Whether a stage's moves depend on their order."""
        return self._ordered[stage]

    def writes(self, stage: int) -> Longs:
        """Leaves that have their new content once a stage is done."""
        part = self._part(stage)
        leaves: Longs = np.repeat(part.writes, part.leaves) + ramp(part.leaves)
        return leaves[np.repeat(part.writes >= 0, part.leaves)]

    def needed(self, count: int) -> Longs:
        """int64[count], for each leaf how many stages have to be done before its old content may go."""
        real = self._columns.reads >= 0
        first, leaves = self._columns.reads[real], self._columns.leaves[real]
        after = np.zeros(count, dtype=np.int64)
        # Ascending, so the last reader counts.
        after[np.repeat(first, leaves) + ramp(leaves)] = np.repeat(self._stage[real] + 1, leaves)
        return after

    def _part(self, stage: int) -> Columns:
        return self._columns.of(slice(self._edges[stage], self._edges[stage + 1]))


class Runs(NamedTuple):
    """int64 columns: so many `leaves` from `source` on go to those from `target` on."""

    target: Longs
    source: Longs
    leaves: Longs

    def of(self, some: Longs | Flags) -> Runs:
        """Some of them."""
        return Runs(self.target[some], self.source[some], self.leaves[some])


def schedule(geometry: Geometry, targets: Longs, sources: Longs, limits: Limits = LIMITS) -> Schedule:
    """Orders copies of whole leaves.

    Args:
        geometry: of the leaves.
        targets: int64, ascending, each once.
        sources: the leaf whose old content each of them gets: another one, of the same length.
        limits: how they are cut.
    """
    runs = merged(geometry, targets, sources)
    waves, tangled = in_waves(runs, limits.max_runs)
    columns, block, free = _in_blocks(geometry, runs, waves, limits.stage_bytes)
    if tangled.size:
        some = runs.of(tangled)
        inside = ramp(some.leaves)
        leaves = np.repeat(some.target, some.leaves) + inside
        more = opened(geometry, leaves, np.repeat(some.source, some.leaves) + inside, limits.scratch_bytes)
        block = np.concatenate([block, np.full(more.length.size, len(free))])
        columns, free = joined(columns, more), [*free, False]
    return _in_stages(columns, block, free, limits)


def merged(geometry: Geometry, targets: Longs, sources: Longs) -> Runs:
    """Neighbours that go the same way, within one region at each end, as runs."""
    if not targets.size:
        return Runs(targets, sources, targets)
    breaks = targets[1:] - targets[:-1] != 1
    breaks |= sources[1:] - sources[:-1] != 1
    # Within a run both go up by one, so that only the edges between regions are missing.
    edges = np.zeros(geometry.count + 1, dtype=np.bool_)
    edges[geometry.first] = True
    breaks |= edges[targets[1:]]
    breaks |= edges[sources[1:]]
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return Runs(targets[starts], sources[starts], np.diff(np.append(starts, targets.size)))


def in_waves(runs: Runs, max_runs: int) -> tuple[list[Longs], Longs]:
    """Runs (by number) in waves that may follow each other, and those that are in or behind a circle.

    Runs of one wave don't touch what another one of it writes.
    """
    everything = np.arange(runs.target.size, dtype=np.int64)
    if runs.target.size > max_runs:
        return [], everything
    # Targets are disjoint and ascending, so what a run reads is written by neighbours of a row.
    low = np.searchsorted(runs.target + runs.leaves, runs.source, side="right")
    high = np.searchsorted(runs.target, runs.source + runs.leaves, side="left")
    width = np.maximum(high - low, 0)
    start = np.cumsum(width) - width
    written = np.repeat(low, width) + ramp(width)
    others = written != np.repeat(everything, width)
    before = np.bincount(written[others], minlength=runs.target.size)
    waves: list[Longs] = []
    wave = np.flatnonzero(before == 0)
    waiting = np.ones(runs.target.size, dtype=np.bool_)
    while wave.size and len(waves) < MAX_WAVES:
        waves.append(wave)
        waiting[wave] = False
        edges = np.repeat(start[wave], width[wave]) + ramp(width[wave])
        freed = written[edges[others[edges]]]
        np.subtract.at(before, freed, 1)
        freed = np.unique(freed)
        wave = freed[(before[freed] == 0) & waiting[freed]]
    return waves, np.flatnonzero(waiting)


def _in_blocks(
    geometry: Geometry, runs: Runs, waves: list[Longs], stage_bytes: int
) -> tuple[Columns, Longs, list[bool]]:
    """Runs as moves, in blocks: a large wave is one, its moves are free; small ones share an ordered one."""
    if not waves:
        return Columns.from_leaves(geometry, *(np.zeros(0, dtype=np.int64),) * 3), runs.target[:0], []
    order = np.concatenate(waves)
    nbytes = _bytes(geometry, runs)
    sizes = [int(nbytes[wave].sum()) for wave in waves]
    large = [4 * size >= stage_bytes for size in sizes]
    number = np.cumsum([1] + [now or before for before, now in itertools.pairwise(large)]) - 1
    block = np.repeat(number, [wave.size for wave in waves])
    free = [False] * (int(number[-1]) + 1)
    for each, is_large in zip(number.tolist(), large, strict=True):
        free[each] = is_large
    some = runs.of(order)
    long = (nbytes[order] > 4 * stage_bytes) & (np.abs(some.target - some.source) < some.leaves)
    for each in np.unique(block[long]).tolist():
        free[each] = False
    some, piece_of = _cut(geometry, some, long, stage_bytes)
    return Columns.from_leaves(geometry, *some), block[piece_of], free


def _bytes(geometry: Geometry, runs: Runs) -> Longs:
    last = runs.target + runs.leaves - 1
    nbytes: Longs = geometry.offset[last] + geometry.length[last] - geometry.offset[runs.target]
    return nbytes


def _cut(geometry: Geometry, runs: Runs, long: Flags, stage_bytes: int) -> tuple[Runs, Longs]:
    """Cuts long runs that overlap themselves; their pieces go in the direction in which nothing is lost.

    Returns:
        The pieces, and which run each is of.
    """
    each = np.where(long, np.maximum(stage_bytes // geometry.length[runs.target], 1), runs.leaves)
    pieces = -(-runs.leaves // each)
    of = np.repeat(np.arange(runs.leaves.size), pieces)
    number = ramp(pieces)
    number = np.where(runs.source[of] > runs.target[of], number, pieces[of] - 1 - number)
    first = number * each[of]
    return Runs(
        runs.target[of] + first, runs.source[of] + first, np.minimum(each[of], runs.leaves[of] - first)
    ), of


def _in_stages(columns: Columns, block: Longs, free: list[bool], limits: Limits) -> Schedule:
    if not columns.length.size:
        return Schedule(columns, block, [])
    done = np.cumsum(columns.length) - columns.length
    position = np.arange(block.size)
    begin = np.searchsorted(block, block)  # where each one's block begins
    lot = (done - done[begin]) // limits.stage_bytes
    moves = (position - begin) // limits.stage_moves
    breaks = (np.diff(block) != 0) | (np.diff(lot) != 0) | (np.diff(moves) != 0)
    stage = np.concatenate([[0], np.cumsum(breaks)])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return Schedule(columns, stage, [not free[number] for number in block[firsts].tolist()])
