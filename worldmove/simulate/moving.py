"""One move under simulated time, from admission to release, in the steps that a node's drivers take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import simpy

from worldmove.admission import Demand, Pause, pause_of, span_of
from worldmove.granting.pauses import Need
from worldmove.simulate.lines import Steps, Told
from worldmove.simulate.receiver import Receiver
from worldmove.simulate.scenario import Scenario

MOST_ROUNDS = 16


class Ask(NamedTuple):
    """A move that is asked for."""

    number: int
    at: float
    sender: str
    receiver: int
    nbytes: int


class Ended(NamedTuple):
    """What became of it. Seconds; `spans` are (bytes, from, until) that the line carried of it."""

    ask: Ask
    code: str | None
    missed: bool = False
    pause_s: float = 0.0
    total_s: float = 0.0
    spans: tuple[tuple[float, float, float], ...] = ()

    @property
    def admitted(self) -> bool:
        """Whether it was taken on."""
        return self.code is None


class Moving:
    """A move that was taken on.

    Args:
        ask: what was asked for.
        demand: the same in admission's terms.
        receiver: where it goes.
        scenario: what steps take.
        takes: an event after so many milliseconds, more or less.
        until_boundary_s: how long its world generates on once it has been told to stop.
    """

    def __init__(
        self,
        ask: Ask,
        demand: Demand,
        receiver: Receiver,
        scenario: Scenario,
        *,
        takes: Callable[[float], simpy.Event],
        until_boundary_s: float,
    ) -> None:
        self._ask = ask
        self._demand = demand
        self._receiver = receiver
        self._scenario = scenario
        self._takes = takes
        self._until_boundary = until_boundary_s
        self._env = receiver.env
        self._name = str(ask.number)
        self._spans: list[tuple[float, float, float]] = []
        self._left = float(demand.state_bytes)
        self._clean_at = self._env.now
        self._pause_s = 0.0
        due = self._env.now + span_of(demand, receiver.supply())
        self._place = receiver.line.join(self._name, ask.sender, due)

    def steps(self) -> Steps:
        """The whole move; `ended` says how, afterwards."""
        yield self._takes(self._scenario.costs.open_ms)
        if self._demand.live:
            yield from self._copy()
        if self._scenario.gate.on:
            yield from self._wait_for_turn()
        yield from self._pause()
        self._receiver.line.leave(self._place)
        self._receiver.over(self._name)

    def ended(self) -> Ended:
        """How it ended, once its steps are done."""
        total_s = self._env.now - self._ask.at
        late = self._pause_s > self._demand.horizon_s or total_s > self._demand.deadline_s
        return Ended(self._ask, None, late, self._pause_s, total_s, tuple(self._spans))

    def _copy(self) -> Steps:
        """Live rounds, until what is left fits the pause."""
        yield from self._round()
        yield from self._copy_on()

    def _copy_on(self) -> Steps:
        """More of them, where it does not."""
        for _ in range(MOST_ROUNDS):
            if self._fits():
                break
            yield from self._round()

    def _round(self) -> Steps:
        began = self._env.now
        yield from self._carry(self._left)
        self._clean_at = began
        self._dirty()

    def _dirty(self) -> None:
        """What has to be sent by now: what was dirtied since the last round's table, and a block more."""
        demand = self._demand
        since = self._env.now - self._clean_at + demand.block_s
        self._left = min(float(demand.state_bytes), demand.dirties * since)

    def _fits(self) -> bool:
        return self._left <= self._fitting()

    def _fitting(self) -> float:
        """Bytes that the pause may bring within the horizon."""
        beside = pause_of(self._demand, self._receiver.supply(), 0.0)
        room_s = self._demand.horizon_s - beside.total_s
        return room_s * self._receiver.supply().full_rate

    def _wait_for_turn(self) -> Steps:
        """Until the world may stop; what it dirties meanwhile has to fit what the turn was given for.

        Where it does not fit the pause any more it is copied once more, which the turn waits for.
        """
        waited = 0.0
        for _ in range(MOST_ROUNDS):
            counted = min(float(self._demand.state_bytes), self._left + self._demand.dirties * waited)
            if self._demand.live:
                counted = min(counted, max(self._fitting(), self._left))
            began = self._env.now
            yield self._receiver.turn(self._name, self._need(counted))
            waited = self._env.now - began
            if self._demand.live:
                self._dirty()
                yield from self._copy_on()
            if self._left <= counted:
                return
            # It asks for a longer one before others are told.
            self._receiver.pauses.leave(self._name, self._env.now)

    def _need(self, left: float) -> Need:
        expected = pause_of(self._demand, self._receiver.supply(), left)
        return Need(
            expected.work_s,
            expected.total_s - expected.work_s,
            self._demand.block_s,
            self._demand.horizon_s,
            self._ask.at + self._demand.deadline_s,
        )

    def _carry(self, nbytes: float, told: Told | None = None) -> Steps:
        began = self._env.now
        yield from self._receiver.line.carry(self._place, nbytes, told)
        self._receiver.promises.landed(self._name, int(nbytes))
        self._spans.append((nbytes, began, self._env.now))

    def _progress(self, expected: Pause) -> Told | None:
        """Tells the receiver what is left of the work as bytes land: others that wait may stop then."""
        if not (self._scenario.by_grants or self._receiver.pauses.waiting):
            return None
        landed = 0.0

        def told(nbytes: float) -> None:
            nonlocal landed
            landed += nbytes
            left = max(1 - landed / max(self._left, 1.0), 0.0)
            self._receiver.progress(self._name, expected.work_s * left)

        return told

    def _pause(self) -> Steps:
        """The world stands; the rest is sent, checked and handed over."""
        env, costs, receiver = self._env, self._scenario.costs, self._receiver
        yield env.timeout(self._until_boundary)
        until = env.now + self._demand.horizon_s
        receiver.stands(self._name, until)
        receiver.line.stand(self._place, until)
        began = env.now
        expected = pause_of(self._demand, receiver.supply(), self._left)
        slowest = 1 + costs.spread  # which admission counts with
        yield self._takes(1000 * expected.source_s / slowest)
        yield from self._carry(self._left, self._progress(expected))
        receiver.progress(self._name, 0.0)
        yield self._takes(1000 * expected.destination_s / slowest)
        yield self._takes(costs.commit_ms + costs.resume_ms)
        self._pause_s = env.now - began
