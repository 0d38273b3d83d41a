"""A token bucket in bytes, on times that it is given.

The bucket allows debt: a grant is given unless the bucket is in debt, and takes all its bytes at once. So a
grant may be larger than the burst, and a timer that is late by less than `burst / rate` costs nothing. In any
interval of T seconds at most `burst + rate * T` bytes are granted, and one grant more.
"""

from __future__ import annotations

_EPSILON = 1e-3
"""Bytes that floating-point arithmetic may be off by."""


class Bucket:
    """A token bucket in bytes; pure. Full at first; `rate` in bytes per second, `None`: without a limit."""

    def __init__(self, rate: float | None, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self._level = float(burst)
        self._at: float | None = None

    def _fill(self, now: float) -> None:
        if self.rate is not None and self._at is not None and now > self._at:
            self._level = min(float(self.burst), self._level + self.rate * (now - self._at))
        self._at = now if self._at is None else max(self._at, now)

    def delay(self, now: float) -> float:
        """Seconds until a grant can be given; 0 if it can be given at `now`."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        return 0.0 if self._level > -_EPSILON else -self._level / self.rate

    def take(self, nbytes: int, now: float) -> None:
        """Takes the bytes of a grant, into debt where it must."""
        if self.rate is not None:
            self._fill(now)
            self._level -= nbytes

    def refund(self, nbytes: int, now: float) -> None:
        """Puts back the bytes of a grant that was never used."""
        if self.rate is not None:
            self._fill(now)
            self._level = min(float(self.burst), self._level + nbytes)
