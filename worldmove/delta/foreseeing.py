"""What a cache will have moved by its next table: one stride more, if it has moved by strides before.

The next table is of a later block, as another round is begun, and a world paused, only after one. So the
leaves that the guess writes over are those that the next block drops; where it is wrong they are sent.
"""

from __future__ import annotations

import numpy as np

from worldmove.delta.columns import Runs
from worldmove.delta.geometry import Flags, Geometry, Longs


class Foresight:
    """Watches the rounds of one move.

    Args:
        geometry: of the leaves.

    Attributes:
        ahead: whether memory was moved on as foreseen, since the last round.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._first: Longs | None = None
        self._starts = np.full(geometry.first.size, geometry.count, dtype=np.int64)
        self._moved = self._others = 0
        self._sent = np.zeros(geometry.count, dtype=np.bool_)
        self.ahead = False

    def begin(self) -> None:
        """A round begins."""
        self._starts[:] = self._geometry.count
        self._moved = self._others = 0

    def note(self, runs: Runs) -> None:
        """Copies of this round."""
        step, way = self._geometry.step[runs.target], runs.source - runs.target
        owner = self._geometry.owner[runs.target]
        rolls = (step > 0) & (way > 0) & (way % np.maximum(step, 1) == 0)
        rolls &= owner == self._geometry.owner[runs.source]
        np.minimum.at(self._starts, owner[rolls], runs.target[rolls])
        self._moved += int(runs.leaves[rolls].sum())
        self._others += int(runs.leaves[~rolls].sum())

    def end(self, sent: Flags) -> None:
        """The round has ended; `sent`: bool, by leaf, what was sent in it."""
        if self._moved > self._others:
            self._first = self._starts.copy()
        elif self._others or not self.ahead or 2 * int(sent.sum()) > sent.size:
            self._first = None
        self._sent = sent.copy()
        self.ahead = False

    def expected(self, known: Flags) -> Flags:
        """bool, by leaf: what the next table is expected to need, by what the last one did.

        Where memory was moved ahead new bytes come to the same places again; where nothing moves at all, to
        those a stride further on, and from a region's end to its beginning; or nearly everything is new.
        """
        sent, geometry = self._sent & known, self._geometry
        many = 2 * int(sent.sum()) > sent.size
        if many or self.ahead or not self._others == self._moved == 0:
            return sent if many or self.ahead else np.zeros_like(sent)
        leaves = np.flatnonzero(sent & geometry.strided)
        first = geometry.first[geometry.owner[leaves]]
        size = geometry.first[geometry.owner[leaves] + 1] - first
        expected = np.zeros_like(sent)
        expected[first + (leaves - first + geometry.step[leaves]) % size] = True
        return expected & known

    def targets(self, known: Flags) -> Longs:
        """Leaves that will be where the leaf a stride further on is now, as far as that one is known."""
        geometry = self._geometry
        if self._first is None:
            return np.zeros(0, dtype=np.int64)
        every = np.arange(geometry.count, dtype=np.int64)
        there, inside = geometry.shifted(every, 1)
        rolls = inside & (every >= self._first[geometry.owner]) & known[there]
        rolls &= (geometry.group >= 0) & (geometry.group[there] == geometry.group)
        return np.flatnonzero(rolls)
