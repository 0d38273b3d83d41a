"""What is made of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or the share is none.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"quantile {share} of {len(values)} values")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number of values the mean of the middle two.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the median of no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def gbps(nbytes: int, seconds: float) -> float:
    """Gigabits (10⁹) per second."""
    return nbytes * 8 / seconds / 1e9
