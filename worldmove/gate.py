"""The receiver's gate: bytes are pulled only under a grant, at a bounded rate, a bounded number under way.

Only the receiver sees how many senders answer at once, and senders that answer unscheduled collapse its line.
`Bucket` and `Queue` decide, on times that they are given; `Gate` runs them on the event loop.

The bucket allows debt: a grant is given unless the bucket is in debt, and takes all its bytes at once. So a
grant may be larger than the burst, and a timer that is late by less than `burst / rate` costs nothing. In any
interval of T seconds at most `burst + rate * T` bytes are granted, and one grant more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from worldmove.errors import ConfigError, ValidationError
from worldmove.views import GateView

MIN_BATCH = 256 * 1024
_EPSILON = 1e-3
"""Bytes that floating-point arithmetic may be off by."""
_TICK_S = 1e-3
"""The event loop's timers count milliseconds."""


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


class Request(NamedTuple):
    """Somebody's wish for `nbytes`; `number` is unique within a queue and grows."""

    number: int
    nbytes: int


class Queue:
    """Who is granted when; pure. Urgent requests first, each kind in the order of its asking.

    Nothing overtakes the head of the line, however small it is, so a large request is not starved by small
    ones. Urgent requests belong to paused worlds, whose number and time are bounded; others wait for them.
    """

    def __init__(self, bucket: Bucket, limit: int | None) -> None:
        self.outstanding = 0
        self._bucket = bucket
        self._limit = limit
        self._count = 0
        self._lines: dict[bool, deque[Request]] = {True: deque(), False: deque()}

    @property
    def waiting(self) -> int:
        """Requests that are not granted yet."""
        return len(self._lines[True]) + len(self._lines[False])

    def ask(self, nbytes: int, *, urgent: bool) -> Request:
        """Joins the line."""
        self._count += 1
        request = Request(self._count, nbytes)
        self._lines[urgent].append(request)
        return request

    def withdraw(self, request: Request) -> None:
        """Leaves the line before the grant."""
        for line in self._lines.values():
            with contextlib.suppress(ValueError):
                line.remove(request)

    def due(self, now: float) -> tuple[list[Request], float | None]:
        """What is granted at `now`, and after how many seconds to ask again.

        `None`: not before something is given back or asked for.
        """
        granted: list[Request] = []
        while line := self._lines[True] or self._lines[False]:
            head = line[0]
            if not self._fits(head.nbytes):
                return granted, None
            wait = self._bucket.delay(now)
            if wait > 0:
                return granted, wait
            granted.append(line.popleft())
            self._bucket.take(head.nbytes, now)
            self.outstanding += head.nbytes
        return granted, None

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or not self.outstanding or self.outstanding + nbytes <= self._limit

    def give_back(self, request: Request) -> None:
        """The bytes of a grant have arrived, or never will."""
        self.outstanding -= request.nbytes

    def undo(self, request: Request, now: float) -> None:
        """A grant was never used: nobody was asked to send its bytes."""
        self.give_back(request)
        self._bucket.refund(request.nbytes, now)


class Grant:
    """Leave to have `nbytes` sent; given back by `release`, once, however often that is called."""

    def __init__(self, gate: Gate, request: Request) -> None:
        self.nbytes = request.nbytes
        self._gate = gate
        self._request: Request | None = request

    def release(self) -> None:
        """Tells the gate that the bytes have arrived or that their sender can send no more."""
        request, self._request = self._request, None
        if request is not None:
            self._gate._returned(request)  # noqa: SLF001 - the two are one


class Gate:
    """Grants bytes on the event loop; one per node, shared by all its inbound moves.

    `rate_bytes_per_s`: what the path carries; `None` grants without pacing. `burst_bytes`: how much may be
    granted at once after a pause; make it what the rate brings in some milliseconds. `outstanding_bytes`: how
    much may be granted and not yet released, to all senders together; a larger grant is given when nothing
    else is out. `None`: no bound.
    """

    def __init__(
        self, rate_bytes_per_s: float | None, burst_bytes: int, *, outstanding_bytes: int | None = None
    ) -> None:
        if rate_bytes_per_s is not None and not 0 < rate_bytes_per_s < float("inf"):
            raise ConfigError(f"the gate's rate must be above 0, not {rate_bytes_per_s}", option="gate_rate")
        for name, value in (("burst_bytes", burst_bytes), ("outstanding_bytes", outstanding_bytes)):
            if value is not None and value <= 0:
                raise ConfigError(f"the gate's {name} must be above 0, not {value}", option=name)
        self._bucket = Bucket(rate_bytes_per_s, burst_bytes)
        self._queue = Queue(self._bucket, outstanding_bytes)
        self._granted = 0
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def batch_bytes(self, most: int) -> int:
        """A good size for one grant: at most `most`, and a paced gate's burst: urgent ones wait little."""
        if self._bucket.rate is None:
            return most
        return min(most, max(MIN_BATCH, self._bucket.burst))

    async def acquire(self, nbytes: int, *, urgent: bool = False) -> Grant:
        """Waits for a grant of `nbytes`; urgent ones are served first. A cancelled wait costs nothing.

        Raises:
            ValidationError: `nbytes` is not above 0.
        """
        if nbytes <= 0:
            raise ValidationError(f"a grant has at least 1 byte, not {nbytes}", field="nbytes")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = self._queue.ask(nbytes, urgent=urgent)
        self._futures[request.number] = future
        self._serve()
        try:
            await future
        except BaseException:
            self._forsaken(request, future)
            raise
        self._granted += nbytes
        return Grant(self, request)

    @contextlib.asynccontextmanager
    async def grant(self, nbytes: int, *, urgent: bool = False) -> AsyncIterator[Grant]:
        """Holds a grant of `nbytes` for the length of the block; raises as `acquire`."""
        grant = await self.acquire(nbytes, urgent=urgent)
        try:
            yield grant
        finally:
            grant.release()

    def view(self) -> GateView:
        """How the gate stands."""
        return GateView(
            rate_bytes_per_s=self._bucket.rate,
            outstanding_bytes=self._queue.outstanding,
            granted_bytes=self._granted,
            waiting=self._queue.waiting,
        )

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        granted, wait = self._queue.due(now)
        for request in granted:
            future = self._futures.pop(request.number)
            if future.done():  # cancelled; its task has yet to run, and asks for another round then
                self._queue.undo(request, now)
            else:
                future.set_result(None)
        if wait is not None:
            self._timer = asyncio.get_running_loop().call_later(max(wait, _TICK_S), self._serve)

    def _forsaken(self, request: Request, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._futures.pop(request.number, None)
            self._queue.withdraw(request)
        else:  # granted, and cancelled before its task could run
            self._queue.undo(request, time.monotonic())
        self._serve()

    def _returned(self, request: Request) -> None:
        self._queue.give_back(request)
        self._serve()
