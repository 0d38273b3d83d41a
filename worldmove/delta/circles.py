"""Copies that go round in circles, or are scattered, ordered leaf by leaf through a bounded scratch.

Each leaf is written once and read from one place, so "goes before" is a function from copy to copy: a copy
goes before the one that writes what it reads. Its chains are ordered by how far they are from their end. Each
circle is cut open by saving one of its leaves in the scratch, from where that one's readers take it; the
scratch is filled for as many circles as it holds, and read out before the next.
"""

from __future__ import annotations

import numpy as np

from worldmove.delta.columns import SCRATCH, Columns, Runs, joined
from worldmove.delta.geometry import Flags, Geometry, Longs


def opened(geometry: Geometry, targets: Longs, sources: Longs, scratch_bytes: int) -> Columns:
    """The moves, in an order that is kept; arguments as `moving.schedule`, targets in any order."""
    count = targets.size
    place = np.full(geometry.count, count, dtype=np.int64)
    place[targets] = np.arange(count)
    follows = np.append(place[sources], count)  # who writes what I read; `count`: nobody
    circle, keeper = _circles(follows)
    follows = np.where(keeper[follows], count, follows)  # a reader of a saved leaf waits for nobody
    level = _distance(follows)[:count]
    keepers = np.flatnonzero(keeper)
    slot = int(geometry.length[targets[keepers]].max(initial=1))
    room = max(1, scratch_bytes // slot)
    rank = np.full(count + 1, -1, dtype=np.int64)
    rank[keepers] = np.arange(keepers.size)
    group = np.where(circle[:count] >= 0, rank[circle[:count]] // room, -1)
    saved = np.full(geometry.count, -1, dtype=np.int64)
    saved[targets[keepers]] = rank[keepers] % room * slot
    moves = joined(_saves(geometry, targets[keepers], saved), _copies(geometry, targets, sources, saved))
    group = np.concatenate([rank[keepers] // room, group])
    level = np.concatenate([np.full(keepers.size, count + 1), level])
    order = np.lexsort((moves.target_offset, moves.target, -level, group))
    return _merged(moves.of(order), group[order], level[order])


def _circles(follows: Longs) -> tuple[Longs, Flags]:
    """For each copy the one that opens the circle its chain runs into (-1: none), and whether it is one.

    By doubling: after k steps everybody has looked 2**k copies ahead.
    """
    nobody = follows.size - 1
    ahead, least = follows, np.minimum(follows, np.arange(nobody + 1))
    for _ in range(max(nobody, 1).bit_length()):
        least = np.minimum(least, least[ahead])
        ahead = ahead[ahead]
    inside = np.zeros(nobody + 1, dtype=np.bool_)
    inside[ahead[ahead != nobody]] = True
    keeper = inside & (least == np.arange(nobody + 1))
    circle: Longs = np.where(ahead != nobody, least[ahead], -1)
    return circle, keeper


def _distance(follows: Longs) -> Longs:
    """How many copies come after each in its chain."""
    nobody = follows.size - 1
    ahead = follows
    distance: Longs = (follows != nobody).astype(np.int64)
    for _ in range(max(nobody, 1).bit_length()):
        distance = distance + distance[ahead]
        ahead = ahead[ahead]
    return distance


def _saves(geometry: Geometry, leaves: Longs, saved: Longs) -> Columns:
    scratch, one = np.full(leaves.size, SCRATCH), np.ones(leaves.size, dtype=np.int64)
    return Columns(
        source=geometry.owner[leaves],
        source_offset=geometry.offset[leaves],
        target=scratch,
        target_offset=saved[leaves],
        length=geometry.length[leaves],
        reads=leaves,
        writes=scratch,
        leaves=one,
    )


def _copies(geometry: Geometry, targets: Longs, sources: Longs, saved: Longs) -> Columns:
    copies = Columns.from_runs(geometry, Runs(targets, sources, np.ones(targets.size, dtype=np.int64)))
    there = saved[sources] >= 0
    return copies._replace(
        source=np.where(there, SCRATCH, copies.source),
        source_offset=np.where(there, saved[sources], copies.source_offset),
        reads=np.where(there, -1, copies.reads),
    )


def _merged(moves: Columns, group: Longs, level: Longs) -> Columns:
    """Joins neighbours of one level, whose copies don't depend on each other."""
    together = (np.diff(group) == 0) & (np.diff(level) == 0)
    together &= (np.diff(moves.source) == 0) & (np.diff(moves.target) == 0)
    together &= np.diff(moves.source_offset) == moves.length[:-1]
    together &= np.diff(moves.target_offset) == moves.length[:-1]
    starts = np.concatenate([[0], np.flatnonzero(~together) + 1])
    firsts = moves.of(starts)
    return firsts._replace(
        length=np.add.reduceat(moves.length, starts), leaves=np.add.reduceat(moves.leaves, starts)
    )
