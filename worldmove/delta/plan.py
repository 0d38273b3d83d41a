"""The plan of one round: what stays, what is copied and in which order, what is asked for and when."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from worldmove.delta.columns import Runs, edges_of, every
from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.delta.matching import Matcher, Matches
from worldmove.delta.moving import GPU_LIMITS, LIMITS, Limits, Schedule, schedule
from worldmove.digest import LeafTable


class DeltaPlan:
    """What brings the destination's memory to the source's table.

    Args:
        geometry: of the leaves.
        matches: what lies where.
        schedule: how what is elsewhere is copied, one stage after another.

    Attributes:
        runs, copied: what is copied, as in `Matches`.
        schedule: as given.
    """

    def __init__(self, geometry: Geometry, matches: Matches, schedule: Schedule) -> None:
        self.runs = matches.runs
        self.copied = matches.copied
        self.schedule = schedule
        first, leaves = edges_of(matches.missing, geometry.begins)
        self._first, self._leaves, self._when = _asked_when(schedule, first, leaves)

    def asks(self, done: int) -> Longs:
        """Leaves to be sent once so many stages are done: until then their old content is needed."""
        some = self._when == done
        return every(self._first[some], self._leaves[some])

    @cached_property
    def missing(self) -> Longs:
        """int64, ascending: leaves that are sent."""
        return every(self._first, self._leaves)

    @cached_property
    def targets(self) -> Longs:
        """int64, ascending: leaves that are copied."""
        return every(self.runs.target, self.runs.leaves)

    @cached_property
    def origins(self) -> Longs:
        """int64: from where, for each of `targets`."""
        return every(self.runs.source, self.runs.leaves)


def make_plan(
    geometry: Geometry, matcher: Matcher, theirs: LeafTable, settled: Flags, limits: Limits | None = None
) -> DeltaPlan:
    """Plans a round; arguments as `Matcher.match` and `schedule`. `limits`: else those of each device."""
    matches = matcher.match(theirs, settled)
    return DeltaPlan(geometry, matches, ordered(geometry, matches.runs, limits))


def ordered(geometry: Geometry, runs: Runs, limits: Limits | None = None) -> Schedule:
    """Orders copies as `schedule` does, by `limits` or by those of each device."""
    if limits is None and len(geometry.kinds) == 1:
        limits = GPU_LIMITS if True in geometry.kinds else LIMITS
    if limits is not None:
        return schedule(geometry, runs, limits)
    on_gpu = geometry.on_gpu[runs.target]
    first = schedule(geometry, runs.of(on_gpu), GPU_LIMITS)
    return first.followed_by(schedule(geometry, runs.of(~on_gpu), LIMITS))


def _asked_when(made: Schedule, first: Longs, leaves: Longs) -> tuple[Longs, Longs, Longs]:
    """Cuts rows of leaves where it changes how many stages have to be done before their old content may go.

    Args:
        made: what reads them.
        first: ascending, where the rows begin.
        leaves: how many each has.

    Returns:
        Where the pieces begin, how many leaves each has, and that number of stages.
    """
    reads, length, after = made.readers
    stop = first + leaves
    touched = np.searchsorted(stop, reads, side="right") < np.searchsorted(first, reads + length, side="left")
    reads, length, after = reads[touched], length[touched], after[touched]
    if not reads.size:
        return first, leaves, np.zeros(first.size, dtype=np.int64)
    edges = np.sort(np.concatenate([first, stop, reads, reads + length]))
    low, high = np.searchsorted(edges, reads), np.searchsorted(edges, reads + length)
    when = np.zeros(edges.size, dtype=np.int64)
    # Ascending, so the last reader counts.
    when[every(low, high - low)] = np.repeat(after, high - low)
    low = np.searchsorted(edges, first)
    pieces = every(low, np.searchsorted(edges, stop) - low)
    size = edges[pieces + 1] - edges[pieces]
    pieces, size = pieces[size > 0], size[size > 0]  # edges may stand there twice
    return edges[pieces], size, when[pieces]
