"""Goodput of a line that has enough to do: bytes that landed over the time in which much was out, in epochs.

Senders that are asked for little say nothing about it: such times, and what lands in them, don't count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EPOCH_S = 0.1
"""Busy seconds of one sample: some round trips and some hundred scheduling hiccups of a busy host."""


class Epoch(NamedTuple):
    """One sample. `senders` answered at once at most; `alone` is the only one, if there was only one."""

    nbytes: int
    seconds: float
    senders: int
    alone: str | None

    @property
    def goodput(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


class Meter:
    """Adds up what lands while the line is full: as much is out as it takes, or more is waited for."""

    def __init__(self, epoch_s: float = EPOCH_S) -> None:
        self._epoch = epoch_s
        self._since: float | None = None
        self.restart()

    def restart(self, senders: Iterable[str] = ()) -> None:
        """Forgets the epoch under way; `senders` answer at this moment."""
        self._nbytes = 0
        self._seconds = 0.0
        self._names = set(senders)
        self._most = len(self._names)

    def broken(self, senders: Iterable[str], now: float, *, full: bool) -> None:
        """A grant came to nothing: the time until here says nothing about the line."""
        self.restart(senders)
        self._since = now if full else None

    def granted(self, senders: int, sender: str, now: float, *, full: bool) -> None:
        """A grant was given to `sender`; `senders` answer at once now. `full`: the line is, with it."""
        if full and self._since is None:
            self._since = now
        self._most = max(self._most, senders)
        self._names.add(sender)

    def landed(self, nbytes: int, now: float, *, full: bool) -> Epoch | None:
        """Bytes have landed; `full`: the line still is. Restart after a complete epoch is returned."""
        if self._since is None:
            self._since = now if full else None
            return None
        self._seconds += max(now - self._since, 0.0)
        self._since = now if full else None
        self._nbytes += nbytes
        if self._seconds < self._epoch or not self._nbytes:
            return None
        alone = next(iter(self._names)) if len(self._names) == 1 else None
        return Epoch(self._nbytes, self._seconds, self._most, alone)
