"""Where the time of a lease goes: of each step how often, how long, and from when to when."""

from __future__ import annotations

import time
from collections.abc import Mapping

Told = dict[str, dict[str, float]]
"""By step: `count`, `sum_ms`, `longest_ms`, `bytes`, and `first_ms` and `last_ms`: from when to when,
counted from the beginning of the very first step. Steps overlap, so sums may exceed it all."""


class Account:
    """Adds up steps; two readings of a clock for each, so that it can always run along."""

    def __init__(self) -> None:
        self._steps: dict[str, list[float]] = {}
        self._began: float | None = None

    @staticmethod
    def now() -> float:
        """Seconds, for `note`."""
        return time.perf_counter()

    def note(self, step: str, began: float, nbytes: int = 0) -> float:
        """A step that began then is over; returns the time."""
        now = time.perf_counter()
        self._began = began if self._began is None else min(self._began, began)
        found = self._steps.get(step)
        if found is None:
            self._steps[step] = [1, now - began, now - began, began, now, nbytes]
        else:
            found[0] += 1
            found[1] += now - began
            found[2] = max(found[2], now - began)
            found[3] = min(found[3], began)
            found[4] = now
            found[5] += nbytes
        return now

    def told(self) -> Told:
        """All of it, in milliseconds and bytes."""
        zero = self._began or 0.0
        return {
            step: {
                "count": count,
                "sum_ms": round(total * 1000, 3),
                "longest_ms": round(longest * 1000, 3),
                "first_ms": round((first - zero) * 1000, 3),
                "last_ms": round((last - zero) * 1000, 3),
                "bytes": nbytes,
            }
            for step, (count, total, longest, first, last, nbytes) in self._steps.items()
        }


def lines(told: Mapping[str, Mapping[str, float]]) -> list[str]:
    """An account as a table, a step a line."""
    return [
        f"{step:<9} {one['count']:>5.0f} x  sum {one['sum_ms']:>9.2f}  longest {one['longest_ms']:>8.2f}  "
        f"{one['first_ms']:>8.2f} to {one['last_ms']:>8.2f} ms  {one['bytes'] / 1e6:>8.1f} MB"
        for step, one in told.items()
    ]
