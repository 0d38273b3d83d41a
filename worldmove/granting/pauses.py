"""Which worlds may stand still at the same time, so that each goes on within its horizon; pure.

All of them need the receiver, one after the other: its line for what is left of their state, its executors to
read it back. A world may stop when, served in the order in which they have to go on, all that stand or may
stop at any moment are done in time: for every slack, the work of those with at most that slack fits into it.
And it stops no earlier than it must for the receiver to have work all the time: early means longer.

What is left is told as bytes land, in steps as large as grants are. In between it is expected to become less
with time: that says when the next one may stop, but not whether all are done in time.
"""

from __future__ import annotations

from typing import NamedTuple

EXACT_S = 1e-9
"""So far off may times be that were added up."""


class Need(NamedTuple):
    """What one pause takes, in seconds.

    Attributes:
        work_s: of the receiver.
        apart_s: elsewhere: of the source, the ledger, the standby.
        stop_s: until the world stands, once it may.
        horizon_s: how long the world may stand.
        deadline: when the whole move has to be done, in seconds of the caller's clock.
    """

    work_s: float
    apart_s: float
    stop_s: float
    horizon_s: float
    deadline: float


class Pauses:
    """Moves that want to stop their world, and those that may."""

    def __init__(self) -> None:
        self._waiting: dict[str, Need] = {}
        self._may: dict[str, Need] = {}
        self._until: dict[str, float] = {}
        self._told_at = 0.0

    @property
    def waiting(self) -> int:
        """Moves that may not stop their world yet."""
        return len(self._waiting)

    def want(self, name: str, need: Need) -> None:
        """The move has copied what it could, and wants to stop its world."""
        if name not in self._may:
            self._waiting[name] = need

    def may(self, name: str) -> bool:
        """Whether it may."""
        return name in self._may

    def stands(self, name: str, until: float, now: float) -> None:
        """The world has stopped, and must go on at `until`."""
        if name in self._may:
            if self._first() is None:
                self._told_at = now
            self._until[name] = until

    def progress(self, name: str, work_s: float, now: float) -> None:
        """So much of the receiver's work is left for a world that stands."""
        need = self._may.get(name)
        if need is not None and name in self._until and work_s < need.work_s:
            self._may[name] = need._replace(work_s=work_s)
            self._told_at = now

    def leave(self, name: str, now: float) -> None:
        """The world runs (here or there), or the move copies once more."""
        self._waiting.pop(name, None)
        gone = self._may.pop(name, None)
        if self._until.pop(name, None) is not None and gone is not None and gone.work_s > 0:
            self._told_at = now  # whatever was done meanwhile was done for it

    def due(self, now: float) -> list[str]:
        """Who may stop its world from now on; by deadline, and nobody overtakes."""
        found = []
        for name in sorted(self._waiting, key=lambda one: self._waiting[one].deadline):
            need = self._waiting[name]
            if self._may and not (self._ahead(now) <= need.stop_s + EXACT_S and self._fits(need, now)):
                break
            del self._waiting[name]
            self._may[name] = need
            found.append(name)
        return found

    def wait_s(self, now: float) -> float | None:
        """After how many seconds to ask `due` again; `None`: not before something is told."""
        first = self._first()
        if first is None or not self._waiting:
            return None
        need = min(self._waiting.values(), key=lambda one: one.deadline)
        early = self._ahead(now) - need.stop_s
        left = self._told_at + self._may[first].work_s - now
        return early if EXACT_S < early <= left else None

    def _first(self) -> str | None:
        """Which of the worlds that stand the receiver works for."""
        standing = (name for name in self._until if self._may[name].work_s > 0)
        return min(standing, key=lambda name: self._until[name] - self._may[name].apart_s, default=None)

    def _ahead(self, now: float) -> float:
        """How long the receiver has work, as far as can be expected.

        Where nothing lands that is no less than the work for all but one of them: so a line that stands still
        lets one more world stop, and no others.
        """
        work_s = sum(need.work_s for need in self._may.values())
        first = self._first()
        if first is None:
            return work_s
        return work_s - min(max(now - self._told_at, 0.0), self._may[first].work_s)

    def _fits(self, one: Need, now: float) -> bool:
        pairs = [(one.horizon_s - one.apart_s, one.work_s)]
        for name, need in self._may.items():
            left = self._until[name] - now if name in self._until else need.horizon_s
            pairs.append((left - need.apart_s, need.work_s))
        work = 0.0
        for slack, part in sorted(pairs):
            work += part
            if work > slack:
                return False
        return True
