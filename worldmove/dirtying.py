"""How fast a world makes bytes that have to be sent, as the rounds of a move show it; pure."""

from __future__ import annotations

SATURATED = 0.9
"""A round that asked for this share of the state says only that at least as much was made; one that asked for
nothing, that the world did not generate."""


class Dirtying:
    """The rounds of one move.

    Args:
        state_bytes: of the session.
        block_s: what one block takes. Rounds may follow one another faster than that: what one block has made
            counts over the whole of it, as a rate that is too high would refuse the session's next moves.
    """

    def __init__(self, state_bytes: int, block_s: float = 0.0) -> None:
        self._state = state_bytes
        self._block = block_s
        self._began: list[float] = []
        self.rate: float | None = None

    def begins(self, now: float) -> None:
        """A round begins: what it asks for was made since the one before it began."""
        self._began.append(now)

    def took(self, nbytes: int) -> None:
        """The latest round has asked for so many bytes. The fastest one counts; the first says nothing."""
        if len(self._began) < 2 or not 0 < nbytes < SATURATED * self._state:
            return
        seconds = max(self._began[-1] - self._began[-2], self._block)
        if seconds > 0:
            self.rate = max(self.rate or 0.0, nbytes / seconds)
