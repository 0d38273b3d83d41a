"""One run of a scenario: moves arrive, the node's own admission judges them, simulated lines carry them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import simpy

from worldmove.admission import Demand
from worldmove.simulate.lines import Steps
from worldmove.simulate.moving import Ask, Ended, Moving
from worldmove.simulate.receiver import Receiver
from worldmove.simulate.scenario import Scenario

BURST = 10


class Run:
    """One load of a scenario.

    Args:
        scenario: what is simulated.
        load: bytes asked for, by what the receivers carry.

    Attributes:
        ended: every move, once `run` has returned.
        every_s: seconds from one request to the next, on average, over the whole fleet.
    """

    def __init__(self, scenario: Scenario, load: float) -> None:
        self.ended: list[Ended] = []
        self._scenario = scenario
        self._sizes = scenario.moves.sizes
        line = scenario.line.bytes_per_s * scenario.line.share(1)
        mean = sum(self._sizes) / len(self._sizes)
        self.every_s = mean / (load * line * scenario.receivers)
        self._env = simpy.Environment()
        # Apart, so that the same moves are asked for whatever becomes of them.
        self._draw = random.Random(scenario.seed)  # noqa: S311 - a simulation, no secret
        self._scatter = random.Random(scenario.seed + 1)  # noqa: S311
        self._receivers: dict[int, Receiver] = {}

    @property
    def collapses(self) -> int:
        """Breakdowns of goodput that the gates met."""
        return sum(receiver.line.collapses for receiver in self._receivers.values())

    def run(self) -> None:
        """Until the last move has ended."""
        self._env.process(self._arrive())
        self._env.run()

    def _arrive(self) -> Steps:
        for ask in self._asks():
            yield self._env.timeout(max(ask.at - self._env.now, 0.0))
            self._env.process(self._move(ask))

    def _asks(self) -> Iterator[Ask]:
        moves, draw, nodes = self._scenario.moves, self._draw, self._scenario.nodes
        at, number = 0.0, 0
        while True:
            match moves.arrivals:
                case "poisson":
                    at += draw.expovariate(1 / self.every_s)
                case "even":
                    at += self.every_s
                case "burst":
                    at += 0.0 if number % BURST else BURST * self.every_s
            if at >= moves.seconds:
                return
            receiver = 0 if moves.into == "one" else draw.randrange(nodes)
            sender = (receiver + draw.randrange(1, nodes)) % nodes
            yield Ask(number, at, f"n{sender}", receiver, draw.choice(self._sizes))
            number += 1

    def _receiver(self, number: int) -> Receiver:
        found = self._receivers.get(number)
        if found is None:
            found = self._receivers[number] = Receiver(self._env, self._scenario)
        return found

    def _takes(self, ms: float) -> simpy.Event:
        """A step that takes so long, more or less."""
        spread = self._scenario.costs.spread
        return self._env.timeout(ms / 1000 * (1 + self._scatter.uniform(-spread, spread)))

    def _move(self, ask: Ask) -> Steps:
        env, moves = self._env, self._scenario.moves
        receiver, name = self._receiver(ask.receiver), str(ask.number)
        demand = Demand(
            state_bytes=ask.nbytes,
            live=moves.live,
            block_s=moves.block_ms / 1000,
            horizon_s=moves.horizon_ms / 1000,
            deadline_s=moves.deadline_ms / 1000,
            dirty_rate=moves.dirty * ask.nbytes / (moves.block_ms / 1000),
        )
        if self._scenario.gate.on:
            verdict = receiver.promises.admit(name, demand, receiver.supply(), env.now)
            if not verdict.admissible:
                self.ended.append(Ended(ask, verdict.code))
                return
        until_boundary = self._scatter.random() * demand.block_s
        moving = Moving(
            ask, demand, receiver, self._scenario, takes=self._takes, until_boundary_s=until_boundary
        )
        yield from moving.steps()
        self.ended.append(moving.ended())
