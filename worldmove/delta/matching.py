"""Finds the leaves of the source's table in the destination's: where they are, or at another place.

A digest names content: where the source's leaf i has the digest of the destination's leaf j, the bytes of i
are at j. Two different leaves with one 128-bit digest under a session's random seed are outside the guarantee
(docs/delta.md); leaves of another length or device are never taken for each other.

The known stride is tried first: a comparison of shifted columns. What it leaves is looked up in tables of
slots addressed by bits of the digest. A slot has room for one leaf, so a crowded one can hide a match; a few
turns with other bits make that rare, and a match that is missed only costs its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.digest import LeafTable

Rows = npt.NDArray[np.uint64]

SEND = -1
"""In place of a leaf: its content lies nowhere at the destination."""

STRIDES = (1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4)
"""So many strides a cache may have moved between two tables, towards its beginning or its end."""

PROBES = 128
LEAST_HITS = 16
"""One probe in so many must fit before a stride is tried on all leaves."""

SLOTS_PER_LEAF = 4
TURNS = (0, 20, 40)
"""From which bit on each turn takes a digest's first word; a turn sees a fifth of what the last one saw."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Matches(NamedTuple):
    """Where the source's leaves lie at the destination.

    Attributes:
        targets: int64, ascending: leaves that are elsewhere. origins: where, one for one.
        missing: int64, ascending: leaves that are nowhere.
    """

    targets: Longs
    origins: Longs
    missing: Longs


class Matcher:
    """What lies at the destination, ready to be searched; as it was known when this was made.

    Args:
        geometry: of the leaves.
        own: the destination's table.
    """

    def __init__(self, geometry: Geometry, own: LeafTable) -> None:
        self._geometry = geometry
        self._own = own
        self._usable = own.known & (geometry.group >= 0)
        self._bits = max(10, (SLOTS_PER_LEAF * geometry.count).bit_length())
        self._slots: dict[tuple[int, bool], npt.NDArray[np.int32]] = {}

    def prepare(self) -> Matcher:
        """Makes what the first search would have to make; returns itself."""
        for turn in range(len(TURNS)):
            self._slot_table(turn, near=False)
        return self

    def match(self, theirs: LeafTable, settled: Flags) -> Matches:
        """Looks for every leaf that is known to `theirs` and not here already.

        Args:
            theirs: the source's table.
            settled: bool[count], leaves that are neither looked for nor taken from: something else is
                being written there.
        """
        wanted = self._own.unequal(theirs) & theirs.known & ~settled
        usable = self._usable & ~settled
        origins = self._by_stride(wanted, theirs.rows, usable)
        left = np.flatnonzero(wanted & (origins < 0))
        origins[left] = found = self._search(left, theirs.rows, usable)
        targets = np.flatnonzero(origins >= 0)
        return Matches(targets, origins[targets], left[found < 0])

    def finds(self, leaves: Longs, theirs: LeafTable, settled: Flags) -> bool:
        """Whether any of these leaves of the source lies at another place here."""
        return bool((self._search(leaves, theirs.rows, self._usable & ~settled) >= 0).any())

    def _by_stride(self, wanted: Flags, rows: Rows, usable: Flags) -> Longs:
        """For every leaf the one that lies so many strides further on where a shift by strides fits."""
        geometry = self._geometry
        origins = np.full(geometry.count, SEND, dtype=np.int64)
        left = wanted & geometry.strided
        probes = _spread(left)
        for strides in STRIDES:
            if not probes.size:
                break
            there, inside = geometry.shifted(probes, strides)
            if (inside & self._same(probes, there, rows, usable)).sum() * LEAST_HITS < probes.size:
                continue
            fits = self._fitting(strides, rows, usable) & left
            for first, stop, step in geometry.stretches:
                further = np.arange(first, stop) + strides * step
                np.copyto(origins[first:stop], further, where=fits[first:stop])
            left &= ~fits
            probes = _spread(left)
        return origins

    def _fitting(self, strides: int, rows: Rows, usable: Flags) -> Flags:
        """For every leaf whether its content lies so many strides further on; whole columns, no gathering."""
        geometry, mine = self._geometry, self._own.rows
        fits = np.zeros(geometry.count, dtype=np.bool_)
        alike = geometry.alike(strides)
        for first, stop, step in geometry.stretches:
            distance = strides * step
            if not 0 < abs(distance) < stop - first:
                continue
            here = slice(first + max(-distance, 0), stop - max(distance, 0))
            there = slice(here.start + distance, here.stop + distance)
            some = mine[there, 0] == rows[here, 0]
            some &= mine[there, 1] == rows[here, 1]
            some &= usable[there]
            some &= alike[here]
            fits[here] = some
        return fits

    def _same(self, leaves: Longs, there: Longs, rows: Rows, usable: Flags) -> Flags:
        """Whether the destination's leaves `there` have the content of the source's `leaves`."""
        mine, group = self._own.rows, self._geometry.group
        same: Flags = mine[there, 0] == rows[leaves, 0]
        same &= mine[there, 1] == rows[leaves, 1]
        same &= usable[there] & (group[there] == group[leaves])
        return same

    def _search(self, leaves: Longs, rows: Rows, usable: Flags) -> Longs:
        found = self._look_up(leaves, rows, usable, near=False)
        owner = self._geometry.owner
        away = np.flatnonzero((found >= 0) & (owner[found] != owner[leaves]))
        if away.size:  # there may be a copy nearby: then less depends on other regions
            nearby = self._look_up(leaves[away], rows, usable, near=True)
            found[away] = np.where(nearby >= 0, nearby, found[away])
        return found

    def _look_up(self, leaves: Longs, rows: Rows, usable: Flags, *, near: bool) -> Longs:
        found = np.full(leaves.size, SEND, dtype=np.int64)
        left = np.flatnonzero(self._geometry.group[leaves] >= 0)
        for turn in range(len(TURNS)):
            if not left.size:
                break
            some = leaves[left]
            there = self._slot_table(turn, near=near)[self._keys(some, rows, turn, near=near)].astype(
                np.int64
            )
            taken = there >= 0  # an empty slot is an answer
            left, some, there = left[taken], some[taken], there[taken]
            same = self._same(some, there, rows, usable)
            found[left[same]] = there[same]
            left = left[~same]
        return found

    def _slot_table(self, turn: int, *, near: bool) -> npt.NDArray[np.int32]:
        slots = self._slots.get((turn, near))
        if slots is None:
            slots = np.full(1 << self._bits, -1, dtype=np.int32)
            usable = np.flatnonzero(self._usable)
            slots[self._keys(usable, self._own.rows, turn, near=near)] = usable
            self._slots[turn, near] = slots
        return slots

    def _keys(self, leaves: Longs, rows: Rows, turn: int, *, near: bool) -> Longs:
        geometry = self._geometry
        kind = geometry.owner[leaves] if near else geometry.group[leaves]
        word = rows[leaves, 0] ^ (kind.astype(np.uint64) * _SPREAD)
        keys = (word >> np.uint64(TURNS[turn])) & np.uint64((1 << self._bits) - 1)
        places: Longs = keys.astype(np.int64)
        return places


def _spread(leaves: Flags) -> Longs:
    """Some of these leaves, evenly over all of them."""
    places = np.flatnonzero(leaves)
    return places[:: max(1, places.size // PROBES)]
