"""A receiving node under simulated time: the node's books of promises, turns and rates, a simulated line."""

from __future__ import annotations

from math import inf

import simpy

from worldmove.admission import Supply
from worldmove.granting.meter import Epoch
from worldmove.granting.pauses import Need, Pauses
from worldmove.promises import Promises
from worldmove.quantities import parse_rate
from worldmove.rates import COMMIT, LINE, OPEN, RESUME, Rates
from worldmove.simulate.lines import GrantLine, RateLine, WayIn
from worldmove.simulate.scenario import Scenario


class Receiver:
    """A node that takes moves in: the node's own books, over a simulated line."""

    def __init__(self, env: simpy.Environment, scenario: Scenario) -> None:
        self.env = env
        self.promises = Promises()
        self.pauses = Pauses()
        self._rates = Rates(inf)
        self._rtt = scenario.line.rtt_ms / 1000
        self._turns: dict[str, simpy.Event] = {}
        self._wake = inf
        slowest = 1 + scenario.costs.spread
        self._source = parse_rate(scenario.costs.source_digest) / slowest
        self._destination = parse_rate(scenario.costs.destination_digest) / slowest
        self.line: WayIn = (
            GrantLine(env, scenario, self._heard) if scenario.by_grants else RateLine(env, scenario)
        )
        costs = scenario.costs
        for name, ms in ((OPEN, costs.open_ms), (COMMIT, costs.commit_ms), (RESUME, costs.resume_ms)):
            if ms:
                self._rates.note(name, ms / 1000 * slowest, 0.0)
        self._rates.note(LINE, scenario.line.bytes_per_s * scenario.line.share(1), 0.0)
        self._supply = self._look(0.0)

    def _heard(self, epoch: Epoch, now: float) -> None:
        self._rates.note(LINE, epoch.goodput, now)
        self._supply = self._look(now)

    def supply(self) -> Supply:
        """What the node would say that there is."""
        return self._supply

    def _look(self, now: float) -> Supply:
        line = self._rates.rate(LINE, now)
        return Supply(
            path=line,
            line=line,
            source_digest=self._source,
            destination_digest=self._destination,
            open_s=self._rates.tail(OPEN, now) or 0.0,
            commit_s=self._rates.tail(COMMIT, now) or 0.0,
            resume_s=self._rates.tail(RESUME, now) or 0.0,
            blocked_s=self.line.blocked_s(line) if line else 0.0,
            grain_s=self.line.grain_s(line) if line else 0.0,
            switch_s=self._rtt,
        )

    def turn(self, name: str, need: Need) -> simpy.Event:
        """Happens when the move may stop its world."""
        self.pauses.want(name, need)
        event = self._turns[name] = self.env.event()
        self.give_turns()
        return event

    def give_turns(self) -> None:
        """Lets those stop their worlds that may now."""
        now = self.env.now
        for name in self.pauses.due(now):
            self._turns.pop(name).succeed()
        wait = self.pauses.wait_s(now)
        if wait is not None and now + wait < self._wake:
            self._wake = now + wait
            self.env.timeout(wait).callbacks.append(self._woken)

    def _woken(self, _event: simpy.Event) -> None:
        self._wake = inf
        self.give_turns()

    def stands(self, name: str, until: float) -> None:
        """The world of a move that has its turn stands until then."""
        self.pauses.stands(name, until, self.env.now)
        self.give_turns()

    def progress(self, name: str, work_s: float) -> None:
        """So much of the receiver's work is left for a world that stands."""
        self.pauses.progress(name, work_s, self.env.now)
        if self.pauses.waiting:
            self.give_turns()

    def over(self, name: str) -> None:
        """The move has ended."""
        self.pauses.leave(name, self.env.now)
        self.promises.drop(name)
        self.give_turns()
