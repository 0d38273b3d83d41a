"""What is planned in a round, and when: with the whole of the source's table, or as its parts arrive.

Only with the whole table is it certain whose old content nobody needs. But to wait for it costs a standing
world time, and what the last round found tells what this one will find:

* nothing to copy: what differs is asked for at once, until a part shows a leaf that lies elsewhere here;
* copies within each region: every region is planned for itself, as soon as its part of the table is there.

A wrong guess costs bytes, and never anything else: a leaf that was asked for, or planned without others, is
taken from no more.
"""

from __future__ import annotations

import numpy as np

from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.delta.matching import Matcher
from worldmove.delta.plan import DeltaPlan, make_plan
from worldmove.digest import LeafTable


class Chooser:
    """Decides over the rounds of one move.

    Args:
        geometry: of the leaves.
        own: the destination's table; within a round only leaves that are settled may change in it.
        theirs: the source's table, as it arrives.

    Attributes:
        hasty: whether leaves are asked for before anything is planned.
    """

    def __init__(self, geometry: Geometry, own: LeafTable, theirs: LeafTable) -> None:
        self.geometry = geometry
        self.hasty = False
        self._own = own
        self._theirs = theirs
        self._matcher: Matcher | None = None
        self._found_nothing = False
        self._apart = False
        self._crossed = False

    def begin(self, *, in_place: bool = False) -> None:
        """A round begins; `in_place`: what may lie elsewhere was moved to where it is expected."""
        self.hasty = in_place or self._found_nothing or self.geometry.nowhere
        self._crossed = False

    def prepare(self) -> None:
        """Makes ready, while nobody waits, what the next round's search takes."""
        if not self.geometry.nowhere:
            self._matcher = Matcher(self.geometry, self._own).prepare()

    def see(self, first: int, count: int, settled: Flags) -> Longs:
        """Leaves of a part of the table that are asked for at once.

        Args:
            first: the part's first leaf.
            count: how many it has.
            settled: bool, by leaf, what was asked for before.
        """
        if not self.hasty:
            return np.zeros(0, dtype=np.int64)
        unequal = self._own.differing(self._theirs, first, count)
        unequal = unequal[~settled[unequal]]
        if not unequal.size or self.geometry.nowhere:
            return unequal
        if self._search().finds(unequal, self._theirs, settled):
            self.hasty = False
            return unequal[:0]
        return unequal

    def ready(self, first: int, count: int) -> Flags:
        """Leaves that can be planned since a part of the table has come; arguments as `see`."""
        known = self._theirs.known
        if not self._apart:
            return np.full(self.geometry.count, bool(known.all()))
        ready = np.zeros(self.geometry.count, dtype=np.bool_)
        ready[self.geometry.whole_regions(known, first, first + count)] = True
        return ready

    def plan(self, settled: Flags) -> DeltaPlan:
        """The plan of all leaves that are not settled, and from those alone."""
        made = make_plan(self.geometry, self._search(), self._theirs, settled)
        owner = self.geometry.owner
        self._crossed |= bool((owner[made.runs.target] != owner[made.runs.source]).any())
        return made

    def end(self, *, copied: int, sent: int) -> None:
        """A round with a table has ended; so many leaves were copied and sent in it."""
        if copied or sent:
            self._found_nothing = copied == 0
            self._apart = copied > 0 and not self._crossed
        self._matcher = None  # memory is no longer what it knew

    def _search(self) -> Matcher:
        if self._matcher is None:
            self._matcher = Matcher(self.geometry, self._own)
        return self._matcher
