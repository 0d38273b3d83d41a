"""When to stop copying a world that is being written: the policy of live rounds, pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What one round took: leaves and bytes that were sent, milliseconds until they were read back."""

    leaves: int
    bytes: int
    ms: float


class RoundPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Live rounds end when the remainder is small, no longer shrinks, or there were enough.

    Attributes:
        max_rounds: live rounds at most.
        max_repairs: times that damaged leaves are sent again before the move aborts.
        shrink: a round must ask for less than this share of the round before.
        small_bytes: a remainder that is paused for at once.
        pause_share: the same as time: the share of the horizon that the last round may have taken.
        horizon_ms: the session's horizon.
    """

    max_rounds: int = 4
    max_repairs: int = 3
    shrink: float = 0.8
    small_bytes: int = 1 << 20
    pause_share: float = 0.25
    horizon_ms: float = 250.0

    def another(self, rounds: Sequence[Taken]) -> bool:
        """Is one more live round worth its bytes, after these?"""
        last = rounds[-1]
        if len(rounds) >= self.max_rounds or last.bytes <= self.small_bytes:
            return False
        if len(rounds) == 1:
            return True
        return last.bytes < self.shrink * rounds[-2].bytes and last.ms > self.pause_share * self.horizon_ms
