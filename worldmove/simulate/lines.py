"""A receiver's way in under simulated time, in two resolutions with one interface.

`GrantLine` asks the node's own `granting.policy` for every grant and lets the bytes arrive one grant after
the other. `RateLine` serves whoever that policy would serve, at the full rate, and only knows when a move's
bytes are
all there: a few events for a move instead of one for a grant.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any, Protocol

import simpy

from worldmove.granting.bucket import Bucket
from worldmove.granting.meter import Epoch
from worldmove.granting.pace import MOST_SENDERS, MOST_WINDOW, Pace
from worldmove.granting.policy import Member, Policy, Request
from worldmove.quantities import parse_size
from worldmove.simulate.scenario import Scenario

Steps = Generator[simpy.Event, Any, None]
Told = Callable[[float], None]
MIN_BATCH = 256 * 1024
ROUND_TRIPS = 16
"""Worlds that stand at the same time and may go before one, where single grants are not simulated."""
PARTS = 8
"""Of bytes that somebody wants to be told of as they land, where single grants are not simulated."""


class WayIn(Protocol):
    """What a move needs of its receiver's line."""

    def join(self, name: str, sender: str, deadline: float) -> Any:
        """A move comes; returns its place."""

    def carry(self, place: Any, nbytes: float, told: Told | None = None) -> Steps:
        """Until so many bytes of the move have landed; `told` of them as they do."""

    def stand(self, place: Any, until: float | None) -> None:
        """The move's world stands until then, or runs."""

    def leave(self, place: Any) -> None:
        """The move is over."""

    def blocked_s(self, line: float) -> float:
        """How long a world that stands may wait for what is under way, on a line of so many bytes per s."""

    def grain_s(self, line: float) -> float:
        """How much of a world that stands may have landed before anybody is told."""

    @property
    def collapses(self) -> int:
        """Breakdowns of goodput that the gate met."""


class _Carry:
    """What one move has still to get."""

    def __init__(self, nbytes: float, done: simpy.Event, told: Told | None) -> None:
        self.unasked = int(nbytes)
        self.missing = int(nbytes)
        self.done = done
        self.told = told


class GrantLine:
    """Every grant: asked for, given by the policy, served one after another, landed.

    Args:
        env: simulated time.
        scenario: line and gate.
        on_epoch: told what the gate measured.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        on_epoch: Callable[[Epoch, float], None] | None = None,
    ) -> None:
        self._env = env
        self._line = scenario.line
        self._rate = scenario.line.bytes_per_s
        self._gate_on = scenario.gate.on
        self._most = parse_size(scenario.gate.batch)
        self._under_way = scenario.gate.under_way
        self._live = scenario.moves.live
        self._pace = Pace(MOST_SENDERS, MOST_WINDOW)
        self._policy = Policy(Bucket(None, 1), self._pace, on_epoch)
        self._carries: dict[Member, _Carry] = {}
        self._busy_until = 0.0
        self._open: dict[str, int] = {}
        self._wake = inf

    @property
    def collapses(self) -> int:
        """Breakdowns of goodput that the gate met."""
        return self._pace.collapses

    def blocked_s(self, line: float) -> float:
        """A round trip, and what others may have under way, at most; where all stand nothing is tried."""
        senders, window = self._pace.reach if self._live else self._policy.allowed
        return self._line.rtt_ms / 1000 + min(window, senders * self._under_way * self._most) / line

    def grain_s(self, line: float) -> float:
        """A grant, as large as it may become."""
        window = self._pace.reach[1] if self._live else self._policy.allowed[1]
        return min(self._most, max(MIN_BATCH, window // 2)) / line

    def join(self, name: str, sender: str, deadline: float) -> Member:
        """A move comes to the gate."""
        return self._policy.join(name, sender, deadline)

    def stand(self, place: Member, until: float | None) -> None:
        """Its world stands, or runs."""
        self._policy.stand(place, until)
        self._serve()

    def leave(self, place: Member) -> None:
        """It is over."""
        self._policy.leave(place, self._env.now)
        self._carries.pop(place, None)
        self._serve()

    def carry(self, place: Member, nbytes: float, told: Told | None = None) -> Steps:
        """Until the bytes have landed; `told` of every grant's."""
        if int(nbytes) <= 0:
            return
        carry = self._carries[place] = _Carry(nbytes, self._env.event(), told)
        for _ in range(self._under_way):
            self._ask(place, carry)
        self._serve()
        yield carry.done

    def _ask(self, place: Member, carry: _Carry) -> None:
        if not carry.unasked or place.left:
            return
        part = max(MIN_BATCH, self._policy.allowed[1] // 2) if self._gate_on else self._most
        if part < self._most:
            self._policy.hold_back()
        nbytes = min(carry.unasked, self._most, part)
        carry.unasked -= nbytes
        if self._gate_on:
            self._policy.ask(place, nbytes)
        else:
            self._send(place, nbytes, None)

    def _serve(self) -> None:
        if not self._gate_on:
            return
        granted, wait = self._policy.due(self._env.now)
        for request in granted:
            self._send(request.member, request.nbytes, request)
        if wait is not None and self._env.now + wait < self._wake:
            self._wake = self._env.now + wait
            self._env.timeout(wait).callbacks.append(self._woken)

    def _woken(self, _event: simpy.Event) -> None:
        self._wake = inf
        self._serve()

    def _send(self, place: Member, nbytes: int, request: Request | None) -> None:
        now = self._env.now
        self._open[place.sender] = self._open.get(place.sender, 0) + 1
        began = max(now + self._line.rtt_ms / 1000, self._busy_until)
        self._busy_until = began + nbytes / (self._rate * self._line.share(len(self._open)))
        landed = self._env.timeout(self._busy_until - now)
        landed.callbacks.append(lambda _event: self._landed(place, nbytes, request))

    def _landed(self, place: Member, nbytes: int, request: Request | None) -> None:
        left = self._open[place.sender] - 1
        if left:
            self._open[place.sender] = left
        else:
            del self._open[place.sender]
        if request is not None:
            self._policy.landed(request, self._env.now)
        carry = self._carries.get(place)
        if carry is not None:
            carry.missing -= nbytes
            if carry.told is not None:
                carry.told(nbytes)
            if carry.missing <= 0:
                del self._carries[place]
                carry.done.succeed()
            else:
                self._ask(place, carry)
        self._serve()


class _Job:
    """A move on a `RateLine`."""

    def __init__(self, deadline: float, number: int) -> None:
        self.deadline = deadline
        self.number = number
        self.until: float | None = None
        self.missing = 0.0
        self.done: simpy.Event | None = None

    @property
    def key(self) -> tuple[bool, float, int]:
        """Its place in the order, as `granting.policy.Member` has it."""
        return (self.until is None, self.deadline if self.until is None else self.until, self.number)


class RateLine:
    """Whoever comes first has the whole line, until somebody comes who goes before."""

    def __init__(self, env: simpy.Environment, scenario: Scenario) -> None:
        self._env = env
        self._rate = scenario.line.bytes_per_s * scenario.line.share(1)
        self._rtt = scenario.line.rtt_ms / 1000
        self._largest = max(scenario.moves.sizes)
        self._jobs: set[_Job] = set()
        self._served: _Job | None = None
        self._since = 0.0
        self._version = 0
        self._numbers = 0

    @property
    def collapses(self) -> int:
        """None: one sender answers at a time."""
        return 0

    def blocked_s(self, line: float) -> float:  # noqa: ARG002 - as GrantLine
        """Round trips, of others that go before, too: whoever is next has the line at once otherwise."""
        return ROUND_TRIPS * self._rtt

    def grain_s(self, line: float) -> float:
        """All of it: nobody is told where nobody waited when it began."""
        return self._largest / line

    def join(self, name: str, sender: str, deadline: float) -> _Job:  # noqa: ARG002 - as GrantLine
        """A move comes."""
        self._numbers += 1
        return _Job(deadline, self._numbers)

    def stand(self, place: _Job, until: float | None) -> None:
        """Its world stands, or runs."""
        self._settle()
        place.until = until
        self._choose()

    def leave(self, place: _Job) -> None:
        """It is over."""
        self._settle()
        self._jobs.discard(place)
        self._choose()

    def carry(self, place: _Job, nbytes: float, told: Told | None = None) -> Steps:
        """Until the bytes have landed; `told` of each of `PARTS` parts."""
        if nbytes <= 0:
            return
        before, parts = self._rate * self._rtt, 1 if told is None else PARTS
        for _ in range(parts):
            self._settle()
            place.missing, place.done = before + nbytes / parts, self._env.event()
            self._jobs.add(place)
            self._choose()
            yield place.done
            before = 0.0
            if told is not None:
                told(nbytes / parts)

    def _settle(self) -> None:
        if self._served is not None:
            self._served.missing -= self._rate * (self._env.now - self._since)
        self._since = self._env.now

    def _choose(self) -> None:
        self._version += 1
        self._served = min(self._jobs, key=lambda job: job.key, default=None)
        if self._served is not None:
            version = self._version
            ready = self._env.timeout(max(self._served.missing, 0.0) / self._rate)
            ready.callbacks.append(lambda _event: self._finished(version))

    def _finished(self, version: int) -> None:
        job = self._served
        if version != self._version or job is None or job.done is None:
            return
        self._settle()
        self._jobs.discard(job)
        job.done.succeed()
        self._choose()
