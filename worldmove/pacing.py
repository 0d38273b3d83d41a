"""A share of the time: work that yields to what goes on beside it. Pure; times are given."""

from __future__ import annotations


class Duty:
    """Lets work begin only while it has had less than its share of the time since it first began.

    Args:
        share: of the time in which anything of it may be under way, above 0; at 1 nothing ever waits.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._under_way = 0
        self._began: float | None = None
        self._busy = 0.0
        self._since = 0.0

    def delay(self, now: float) -> float:
        """Seconds until some of the work may begin; what is under way counts as busy."""
        if self._began is None or self._share >= 1:
            return 0.0
        busy = self._busy + (now - self._since if self._under_way else 0.0)
        return max(busy / self._share - (now - self._began), 0.0)

    def begin(self, now: float) -> None:
        """Some of it begins."""
        if self._began is None:
            self._began = now
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def end(self, now: float) -> None:
        """Some of it has ended."""
        self._under_way -= 1
        if not self._under_way:
            self._busy += now - self._since
