"""Finds the leaves of the source's table in the destination's: where they are, or at another place.

A digest names content: where the source's leaf i has the digest of the destination's leaf j, the bytes of i
are at j. Two different leaves with one 128-bit digest under a session's random seed are outside the guarantee
(docs/delta.md); leaves of another length or device are never taken for each other.

The known stride is tried first: a comparison of shifted columns. What it leaves is looked up (`finding`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worldmove.delta.columns import Runs, edges_of, in_one, merged
from worldmove.delta.finding import Index
from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.digest import LeafTable, Rows, equal_rows

STRIDES = np.array([1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4], dtype=np.int64)
"""So many strides a cache may have moved between two tables, towards its beginning or its end."""

PROBES = 64
LEAST_HITS = 16
"""One probe in so many must fit before a stride is tried on all leaves."""
LEAST_LEFT = 4
"""Where less than one in so many is left by the strides that fit, no others are looked for."""


class Matches(NamedTuple):
    """Where the source's leaves lie at the destination.

    Attributes:
        runs: those that are elsewhere, and where. copied: bool[count], the same leaves.
        missing: bool[count], leaves that are nowhere.
    """

    runs: Runs
    copied: Flags
    missing: Flags


class Matcher:
    """What lies at the destination, ready to be searched; as it was known when this was made.

    Args:
        geometry: of the leaves.
        own: the destination's table.
    """

    def __init__(self, geometry: Geometry, own: LeafTable) -> None:
        self._geometry = geometry
        self._own = own
        self._usable = own.known & geometry.copyable
        self._index = Index(own, self._usable, geometry.group if geometry.groups > 1 else None)
        self._nearby: Index | None = None

    def prepare(self) -> Matcher:
        """Makes what the first search would have to make; returns itself."""
        self._index.prepare()
        return self

    def match(self, theirs: LeafTable, settled: Flags) -> Matches:
        """Looks for every leaf that is known to `theirs` and not here already.

        Args:
            theirs: the source's table.
            settled: bool[count], leaves that are neither looked for nor taken from: something else is
                being written there.
        """
        free = ~settled
        first, stop = _span(free)
        missing = free & theirs.known
        missing[first:stop] &= self._own.unequal(theirs, first, stop - first)
        usable = self._usable & free
        before = missing.copy()
        runs = self._by_stride(missing, theirs.rows, usable)
        wanted = missing & self._geometry.copyable
        if wanted.any():
            leaves, there = self._search(wanted, theirs.rows, usable)
            runs.append(merged(self._geometry, leaves, there))
            missing[leaves] = False
        return Matches(in_one(runs), before > missing, missing)

    def finds(self, leaves: Longs, theirs: LeafTable, settled: Flags) -> bool:
        """Whether any of these leaves of the source lies at another place here."""
        wanted = np.zeros(self._geometry.count, dtype=np.bool_)
        wanted[leaves] = True
        wanted &= self._geometry.copyable
        found, _ = self._index.find(wanted, theirs.rows, self._usable & ~settled)
        return bool(found.size)

    def _by_stride(self, missing: Flags, rows: Rows, usable: Flags) -> list[Runs]:
        """Runs of the leaves that lie some strides further on, where that fits; they are missing no more."""
        geometry = self._geometry
        runs: list[Runs] = []
        strides, many = STRIDES, np.count_nonzero(missing)
        while LEAST_LEFT * np.count_nonzero(missing) >= many and (probes := self._probes(missing)).size:
            enough = self._hits(probes, strides, rows) * LEAST_HITS >= probes.size
            if not enough.any():
                break
            first = int(enough.argmax())
            some, strides = int(strides[first]), strides[first + 1 :]
            fits = self._fitting(some, rows, usable, _span(missing))
            fits &= missing
            missing &= ~fits
            target, leaves = edges_of(fits, geometry.begins)
            runs.append(Runs(target, target + some * geometry.step[target], leaves))
        return runs

    def _probes(self, leaves: Flags) -> Longs:
        """Some of these leaves that have strides, from all over them."""
        sample = self._geometry.sample
        places = sample[leaves[sample]]
        if places.size < PROBES:
            places = np.flatnonzero(leaves & self._geometry.strided)
        return places[:: max(1, places.size // PROBES)]

    def _hits(self, probes: Longs, strides: Longs, rows: Rows) -> Longs:
        """For each number of strides about how many of the leaves lie so much further on."""
        there = 2 * (probes + strides[:, np.newaxis] * self._geometry.step[probes])
        first_words = self._own.rows.reshape(-1).take(there, mode="clip")
        hits: Longs = (first_words == rows[:, 0][probes]).sum(axis=1)
        return hits

    def _fitting(self, strides: int, rows: Rows, usable: Flags, span: tuple[int, int]) -> Flags:
        """For every leaf in a span whether its content lies so many strides further on; no gathering."""
        geometry, mine = self._geometry, self._own.rows
        fits = np.zeros(geometry.count, dtype=np.bool_)
        for first, stop, step in geometry.stretches:
            distance = strides * step
            here = slice(max(first, first - distance, span[0]), min(stop, stop - distance, span[1]))
            if not distance or here.start >= here.stop:
                continue
            there = slice(here.start + distance, here.stop + distance)
            fits[here] = equal_rows(mine[there], rows[here])
            fits[here] &= usable[there]
        fits &= geometry.alike(strides)
        return fits

    def _search(self, wanted: Flags, rows: Rows, usable: Flags) -> tuple[Longs, Longs]:
        leaves, there = self._index.find(wanted, rows, usable)
        owner, group = self._geometry.owner, self._geometry.group
        away = leaves[owner[there] != owner[leaves]]
        if away.size:  # there may be a copy nearby: then less depends on other regions
            if self._nearby is None:
                kind = owner << 40 | group  # devices and lengths are far below that
                self._nearby = Index(self._own, self._usable, kind)
            wanted = np.zeros(self._geometry.count, dtype=np.bool_)
            wanted[away] = True
            some, nearby = self._nearby.find(wanted, rows, usable)
            there[np.searchsorted(leaves, some)] = nearby
        return leaves, there


def _span(leaves: Flags) -> tuple[int, int]:
    """From the first one that is set to behind the last; (0, 0) if none is."""
    first = int(leaves.argmax()) if leaves.size else 0
    if not leaves.size or not leaves[first]:
        return 0, 0
    return first, leaves.size - int(leaves[::-1].argmax())
