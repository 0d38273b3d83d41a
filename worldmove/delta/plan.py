"""The plan of one round: what stays, what is copied and in which order, what is asked for and when."""

from __future__ import annotations

import numpy as np

from worldmove.delta.geometry import Flags, Geometry, Longs
from worldmove.delta.matching import Matcher
from worldmove.delta.moving import GPU_LIMITS, LIMITS, Limits, Schedule, schedule
from worldmove.digest import LeafTable


class DeltaPlan:
    """What brings the destination's memory to the source's table.

    Args:
        targets: int64, ascending: leaves that are copied. origins: from where, one for one.
        schedule: how, one stage after another.
        missing: int64, ascending: leaves that are sent. when: for each, the stages that come before it.

    Attributes:
        targets, origins, schedule, missing: as given.
    """

    def __init__(
        self, targets: Longs, origins: Longs, schedule: Schedule, missing: Longs, when: Longs
    ) -> None:
        self.targets = targets
        self.origins = origins
        self.schedule = schedule
        self.missing = missing
        self._order = np.argsort(when, kind="stable")
        self._edges = np.searchsorted(when[self._order], np.arange(schedule.count + 2)).tolist()

    def asks(self, done: int) -> Longs:
        """Leaves to be sent once so many stages are done: until then their old content is needed."""
        return self.missing[self._order[self._edges[done] : self._edges[done + 1]]]


def make_plan(
    geometry: Geometry, matcher: Matcher, theirs: LeafTable, settled: Flags, limits: Limits | None = None
) -> DeltaPlan:
    """Plans a round; arguments as `Matcher.match` and `schedule`. `limits`: else those of each device."""
    targets, origins, missing = matcher.match(theirs, settled)
    made = ordered(geometry, targets, origins, limits)
    return DeltaPlan(targets, origins, made, missing, made.needed(geometry.count)[missing])


def ordered(geometry: Geometry, targets: Longs, origins: Longs, limits: Limits | None = None) -> Schedule:
    """Orders copies as `schedule` does, by `limits` or by those of each device."""
    if limits is None and len(geometry.kinds) == 1:
        limits = GPU_LIMITS if True in geometry.kinds else LIMITS
    if limits is not None:
        return schedule(geometry, targets, origins, limits)
    on_gpu = geometry.on_gpu[targets]
    first = schedule(geometry, targets[on_gpu], origins[on_gpu], GPU_LIMITS)
    return first.followed_by(schedule(geometry, targets[~on_gpu], origins[~on_gpu], LIMITS))
