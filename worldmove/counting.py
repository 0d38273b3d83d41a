"""What one round took: bytes, leaves and times, as the receiving end sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from worldmove.protocol import RoundComplete


@dataclass(slots=True)
class RoundCount:
    """What a round took so far.

    Attributes:
        leaves, bytes: of what was asked for. copied_bytes: of what lay elsewhere here.
        share: of the time in which bytes may come.
        asked_at, landed_at: when the first bytes were asked for, and the last ones landed; monotonic seconds.
    """

    number: int
    final: bool
    started: float
    leaves: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    share: float = 1.0
    asked_at: float | None = None
    landed_at: float | None = None

    @property
    def ms(self) -> float:
        """Since the round began."""
        return (time.monotonic() - self.started) * 1000

    @property
    def wire_ms(self) -> float:
        """From the first request to the last landing, had nothing waited; 0 where nothing was asked for."""
        if self.asked_at is None or self.landed_at is None:
            return 0.0
        return (self.landed_at - self.asked_at) * 1000 * self.share

    def complete(self, number: int) -> RoundComplete:
        """What the machine hears of round `number`."""
        return RoundComplete(
            number=number,
            leaves=self.leaves,
            bytes=self.bytes,
            ms=self.ms,
            copied_bytes=self.copied_bytes,
            wire_ms=self.wire_ms,
        )
