"""Where a content lies among the leaves of a table, by its digest.

Most of what is looked for is nowhere, so that is found out first, and cheaply: by filters of one bit for each
slot, addressed by either word of the digest, of which a tenth is set; they are small enough for a core's own
cache. What passes them is looked up in slots with room for one leaf each. What finds another leaf there is
searched for in sorted order: so nothing is missed that lies somewhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worldmove.delta.geometry import Flags, Longs
from worldmove.digest import LeafTable, Rows

SLOTS_PER_LEAF = 4
BITS_PER_SLOT = 2
"""Of a filter: with more bits fewer leaves pass it."""
WORDS = 2
"""Of a digest: each has a filter and a table of slots. The second table shows most that the first hides."""
FEW = 1024
"""So few leaves are searched for in sorted order at once."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Index:
    """The leaves of a table that may be taken, ready to be searched; made as far as a search needs it.

    Args:
        table: its rows are not kept, so that nothing of it stays mapped once it is closed.
        usable: bool[count], leaves to be found.
        kind: int64[count], a leaf is only found for one of its own kind; `None`: there is one kind.
    """

    def __init__(self, table: LeafTable, usable: Flags, kind: Longs | None) -> None:
        self._table = table
        self._usable = usable
        self._kind = kind
        self._spread = None if kind is None else kind.astype(np.uint64) * _SPREAD
        self._slot_count = 1 << max(10, (SLOTS_PER_LEAF * usable.size).bit_length())
        self._filters: dict[int, npt.NDArray[np.uint8]] = {}
        self._slots: dict[int, npt.NDArray[np.int32]] = {}
        self._order: tuple[Rows, Longs] | None = None

    @property
    def _rows(self) -> Rows:
        return self._table.rows

    def prepare(self) -> None:
        """Makes everything that a search takes."""
        for word in range(WORDS):
            self._filter(word)
            self._slot_table(word)
        self._sorted()

    def find(self, wanted: Flags, rows: Rows, usable: Flags) -> tuple[Longs, Longs]:
        """Those of another table's leaves whose content lies here, ascending, and where.

        Args:
            wanted: bool[count], leaves of the other table.
            rows: its rows.
            usable: bool[count], what may be found by now, of what this was made for.
        """
        left = self._passing(wanted, rows)
        places = []
        for word in range(WORDS):
            if left.size <= FEW:
                break
            there = self._slot_table(word)[self._keys(word, left, rows, self._slot_count)].astype(np.int64)
            same = self._same(left, there, rows, usable)
            places.append((left[same], there[same]))
            left = left[~same]
        places += self._search(left, rows, usable)
        leaves, there = (np.concatenate(column) for column in zip(*places, strict=True))
        order = np.argsort(leaves)
        return leaves[order], there[order]

    def _passing(self, wanted: Flags, rows: Rows) -> Longs:
        """Those that pass all filters."""
        if 2 * np.count_nonzero(wanted) > wanted.size:  # a whole column is faster than a choice of it
            left = np.flatnonzero(self._may(0, slice(None), rows) & wanted)
        else:
            left = np.flatnonzero(wanted)
            left = left[self._may(0, left, rows)]
        return left[self._may(1, left, rows)]

    def _may(self, word: int, leaves: Longs | slice, rows: Rows) -> Flags:
        """Whether the filter of a word has each leaf's slot."""
        keys = self._keys(word, leaves, rows, BITS_PER_SLOT * self._slot_count)
        bits = self._filter(word)[keys >> 3]
        bits >>= keys.astype(np.uint8) & 7
        bits &= 1
        flags: Flags = bits.view(np.bool_)
        return flags

    def _search(self, leaves: Longs, rows: Rows, usable: Flags) -> list[tuple[Longs, Longs]]:
        """Those that lie here, and where, in sorted order; in two parts."""
        words, order = self._sorted()
        hit, there, same = self._first_of(words, order, leaves, rows, usable)
        found, hidden = (hit[same], there[same]), hit[~same]
        if not hidden.size:
            return [found]
        free = usable[order]  # another one with this content may be usable
        hit, there, same = self._first_of(words[free], order[free], hidden, rows, usable)
        return [found, (hit[same], there[same])]

    def _first_of(
        self, words: Rows, order: Longs, leaves: Longs, rows: Rows, usable: Flags
    ) -> tuple[Longs, Longs, Flags]:
        """Those whose first word is here, the first place of it, and whether that may be taken for them."""
        word = self._first_words(leaves, rows)
        place = np.searchsorted(words, word)
        hit = np.flatnonzero(words.take(place, mode="clip") == word) if words.size else place[:0]
        leaves, there = leaves[hit], order[place[hit]]
        return leaves, there, self._same(leaves, there, rows, usable)

    def _same(self, leaves: Longs, there: Longs, rows: Rows, usable: Flags) -> Flags:
        """Whether the leaves `there` may be taken for these, and have the same digest, both words of it."""
        same: Flags = self._rows[:, 0][there] == rows[:, 0][leaves]
        same &= self._rows[:, 1][there] == rows[:, 1][leaves]
        same &= usable[there]
        if self._kind is not None:
            same &= self._kind[there] == self._kind[leaves]
        return same

    def _filter(self, word: int) -> npt.NDArray[np.uint8]:
        packed = self._filters.get(word)
        if packed is None:
            flags = np.zeros(BITS_PER_SLOT * self._slot_count, dtype=np.bool_)
            flags[self._keys(word, np.flatnonzero(self._usable), self._rows, flags.size)] = True
            packed = self._filters[word] = np.packbits(flags, bitorder="little")
        return packed

    def _slot_table(self, word: int) -> npt.NDArray[np.int32]:
        slots = self._slots.get(word)
        if slots is None:
            slots = self._slots[word] = np.zeros(self._slot_count, dtype=np.int32)
            usable = np.flatnonzero(self._usable)
            slots[self._keys(word, usable, self._rows, slots.size)] = usable
        return slots

    def _sorted(self) -> tuple[Rows, Longs]:
        if self._order is None:
            usable = np.flatnonzero(self._usable)
            words = self._first_words(usable, self._rows)
            order = np.argsort(words)
            self._order = words[order], usable[order]
        return self._order

    def _keys(self, word: int, leaves: Longs | slice, rows: Rows, count: int) -> Longs:
        """Which of so many places (a power of two) each leaf has: the upper bits of a word."""
        words = self._first_words(leaves, rows) if word == 0 else rows[:, word][leaves]
        return (words >> np.uint64(65 - count.bit_length())).view(np.int64)

    def _first_words(self, leaves: Longs | slice, rows: Rows) -> Rows:
        words: Rows = rows[:, 0][leaves]
        return words if self._spread is None else words ^ self._spread[leaves]
