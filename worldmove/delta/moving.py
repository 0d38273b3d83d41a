"""Copies within one memory, in an order in which nothing is overwritten before it was read.

Two ways. *Runs*: copies of neighbouring leaves over one distance are one run, safe in itself (`memmove`); a
run goes before another that writes what it reads, in waves. So a rolling cache is one directional pass over
each region. *Leaves* (`circles`): what goes round in circles, or is too scattered for runs.

Everything is a column; nothing here loops over leaves, and moves become objects only when they are made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worldmove.delta.circles import opened
from worldmove.delta.columns import Columns, Move, Runs, every, joined, ramp
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
        real = part.writes >= 0
        return every(part.writes[real], part.leaves[real])

    @property
    def readers(self) -> tuple[Longs, Longs, Longs]:
        """What is read: first leaf, number of leaves, and the stages until that is done, which ascend."""
        real = self._columns.reads >= 0
        return self._columns.reads[real], self._columns.leaves[real], self._stage[real] + 1

    def _part(self, stage: int) -> Columns:
        return self._columns.of(slice(self._edges[stage], self._edges[stage + 1]))


def schedule(geometry: Geometry, runs: Runs, limits: Limits = LIMITS) -> Schedule:
    """Orders copies of whole leaves.

    Args:
        geometry: of the leaves.
        runs: every leaf is the target of one at most, and its source is another one, of the same length.
        limits: how they are cut.
    """
    if not runs.target.size:
        return Schedule(Columns.from_runs(geometry, runs), runs.target, [])
    waves, tangled = in_waves(runs, limits.max_runs)
    columns, block, free = _in_blocks(geometry, runs, waves, limits.stage_bytes)
    if tangled.size:
        some = runs.of(tangled)
        leaves, sources = every(some.target, some.leaves), every(some.source, some.leaves)
        more = opened(geometry, leaves, sources, limits.scratch_bytes)
        block = np.concatenate([block, np.full(more.length.size, free.size)])
        columns, free = joined(columns, more), np.append(free, False)
    return _in_stages(columns, block, free, limits)


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
    if not others.any():
        return [everything], everything[:0]
    before = np.bincount(written[others], minlength=runs.target.size)
    waves: list[Longs] = []
    wave = np.flatnonzero(before == 0)
    waiting = np.ones(runs.target.size, dtype=np.bool_)
    while wave.size and len(waves) < MAX_WAVES:
        waves.append(wave)
        waiting[wave] = False
        edges = np.repeat(start[wave], width[wave]) + ramp(width[wave])
        before -= np.bincount(written[edges[others[edges]]], minlength=before.size)
        wave = np.flatnonzero((before == 0) & waiting)
    return waves, np.flatnonzero(waiting)


def _in_blocks(
    geometry: Geometry, runs: Runs, waves: list[Longs], stage_bytes: int
) -> tuple[Columns, Longs, Flags]:
    """Runs as moves, in blocks: a large wave is one, its moves are free; small ones share an ordered one.

    Returns:
        The moves, the block of each, and for each block whether its moves are free.
    """
    if not waves:
        nothing = Runs(*(runs.target[:0],) * 3)
        return Columns.from_runs(geometry, nothing), runs.target[:0], np.zeros(0, dtype=np.bool_)
    some = runs.of(np.concatenate(waves))
    nbytes, count = some.nbytes(geometry), np.array([wave.size for wave in waves])
    large = 4 * np.add.reduceat(nbytes, np.cumsum(count) - count) >= stage_bytes
    number = np.concatenate([[0], np.cumsum(large[1:] | large[:-1])])
    block = np.repeat(number, count)
    free = np.zeros(int(number[-1]) + 1, dtype=np.bool_)
    free[number] = large
    long = (nbytes > 4 * stage_bytes) & (np.abs(some.target - some.source) < some.leaves)
    free[block[long]] = False
    columns = Columns.from_runs(geometry, some)
    if not long.any():
        return columns, block, free
    columns, piece_of = _cut(geometry, columns, long, stage_bytes)
    return columns, block[piece_of], free


def _cut(geometry: Geometry, runs: Columns, long: Flags, stage_bytes: int) -> tuple[Columns, Longs]:
    """Cuts long runs that overlap themselves; their pieces go in the direction in which nothing is lost.

    Returns:
        The pieces, and which run each is of.
    """
    size = geometry.length[runs.writes]  # of every leaf but the last one
    each = np.where(long, np.maximum(stage_bytes // size, 1), runs.leaves)
    pieces = -(-runs.leaves // each)
    of = np.repeat(np.arange(pieces.size), pieces)
    number = ramp(pieces)
    number = np.where((runs.reads > runs.writes)[of], number, pieces[of] - 1 - number)
    each, size = each[of], size[of]
    first, whole = number * each, runs.of(of)
    done = first * size
    return Columns(
        source=whole.source,
        source_offset=whole.source_offset + done,
        target=whole.target,
        target_offset=whole.target_offset + done,
        length=np.minimum(each * size, whole.length - done),
        reads=whole.reads + first,
        writes=whole.writes + first,
        leaves=np.minimum(each, whole.leaves - first),
    ), of


def _in_stages(columns: Columns, block: Longs, free: Flags, limits: Limits) -> Schedule:
    change = block[1:] != block[:-1]
    begin = np.concatenate([[0], np.flatnonzero(change) + 1])[block]  # where each one's block begins
    done = np.cumsum(columns.length) - columns.length
    lot = (done - done[begin]) // limits.stage_bytes
    moves = (np.arange(block.size) - begin) // limits.stage_moves
    change |= lot[1:] != lot[:-1]
    change |= moves[1:] != moves[:-1]
    firsts = np.concatenate([[0], np.flatnonzero(change) + 1])
    stage = np.repeat(np.arange(firsts.size), np.diff(np.append(firsts, block.size)))
    return Schedule(columns, stage, (~free[block[firsts]]).tolist())
