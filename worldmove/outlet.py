"""What a node sends: all outbound moves over lanes share one bucket, those whose world stands first.

A destination judges a move by what its source may still send until the deadline, so that is promised, too.
"""

from __future__ import annotations

import time
from math import inf
from typing import TypeVar

from worldmove.errors import InadmissibleError, WorldMoveError
from worldmove.gate import MIN_BATCH, Gate, Pass
from worldmove.promises import Promises

BURST_S = 0.02
LEAST_RATE = 1.0
"""Told where nothing is left: a rate of 0 says that nobody has measured."""
NEARLY = 0.99
"""Of what may still be sent: a rate as high as that is limited by it."""
E = TypeVar("E", bound=WorldMoveError | None)


class Outlet:
    """The egress of one node.

    Args:
        rate: bytes per second for all outbound moves together; `None`: without a limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._gate = None if rate is None else Gate(rate, max(int(rate * BURST_S), MIN_BATCH), senders=1)
        self._promises = Promises()

    def left(self, deadline_s: float) -> float | None:
        """Bytes per second, on average until then, that are promised to no other move; `None`: no limit."""
        if self._rate is None:
            return None
        now = time.monotonic()
        return max(self._promises.share(self._rate, now + deadline_s, now), LEAST_RATE)

    def advised(self, error: E) -> E:
        """A destination's refusal, with when to ask again where what this node may still send was too little.

        There only the rest is known; here, that others have what is missing, and until when.
        """
        last_s = self._promises.last_s(time.monotonic())
        if self._rate is None or last_s == 0 or not isinstance(error, InadmissibleError):
            return error
        available = error.numbers("available")
        rest, there = available.get("egress_bytes_per_s", inf), available.get("bytes_per_s", 0.0)
        if there >= NEARLY * rest and error.numbers("required").get("bytes_per_s", inf) <= self._rate:
            error.details.setdefault("retry_after_ms", 1000 * last_s)
        return error

    def join(self, move_id: str, nbytes: int, deadline_s: float) -> Leaves | None:
        """A move that may send `nbytes` until its deadline; `None` where there is no limit."""
        if self._gate is None:
            return None
        self._promises.owe(move_id, nbytes, time.monotonic() + deadline_s)
        return Leaves(self, self._gate.join(move_id, "self", deadline_s))

    def over(self, move_id: str) -> None:
        """The move is over, however it ended."""
        self._promises.drop(move_id)


class Leaves:
    """One outbound move's leave to send, piece by piece."""

    def __init__(self, outlet: Outlet, one: Pass) -> None:
        self._outlet = outlet
        self._pass = one

    def stand(self, seconds: float | None) -> None:
        """Its world stands and has to go on within `seconds`: it goes first; `None`: it runs again."""
        self._pass.stand(seconds)

    async def take(self, nbytes: int) -> None:
        """Returns when so many bytes may be sent; raises as `Pass.acquire`."""
        grant = await self._pass.acquire(nbytes)
        grant.landed()

    def over(self) -> None:
        """Nothing of the move is sent any more."""
        self._pass.leave()
        self._outlet.over(self._pass.name)
