"""Sessions move among nodes while the network, the ledger and the nodes do their worst: never two owners.

`STORM_EXAMPLES=N` lets it go through N storms instead of the suite's few.
"""

from __future__ import annotations

import os
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storm_kit import Fleet, Leg
from storm_sides import StormDestination, StormSource

from worldmove.protocol import State

STORMS = int(os.environ.get("STORM_EXAMPLES", "300"))
HOP = st.integers(1, 2)
NUMBER = st.integers(0, 60)
FAULTS = st.sampled_from(["none", "none", "none", "before", "after"])
BUSY = precondition(lambda self: self.fleet.open_sides())


class Storm(RuleBasedStateMachine):
    """Everything that can happen, one thing after another."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()

    @initialize(hops=st.tuples(HOP, HOP), live=st.booleans(), apart=st.booleans(), lead=st.integers(0, 220))
    def moves(self, hops: tuple[int, int], live: bool, apart: bool, lead: int) -> None:
        """Both sessions begin to move, and come some way in good weather."""
        for session_id, hop in zip(self.fleet.sessions, hops, strict=True):
            self.fleet.start(session_id, hop, live=live, apart=apart)
        self.calm(lead)

    @rule(
        session=st.integers(0, 1), hop=HOP, live=st.booleans(), apart=st.booleans(), lead=st.integers(0, 120)
    )
    def move(self, session: int, hop: int, live: bool, apart: bool, lead: int) -> None:
        """One moves on, or back."""
        self.fleet.start(self.fleet.sessions[session], hop, live=live, apart=apart)
        self.calm(lead)

    @rule(count=st.integers(1, 25))
    def calm(self, count: int) -> None:
        """Things happen in turn."""
        for number in range(count):
            self.fleet.check()
            if not self.fleet.step(number):
                return

    @BUSY
    @rule(number=NUMBER, fault=FAULTS, late=st.booleans())
    def one(self, number: int, fault: str, late: bool) -> None:
        """Any one thing happens, or goes wrong, out of turn."""
        choices = self.fleet.choices()
        if choices:
            who, job = choices[number % len(choices)]
            answer = None if job is None else {"ledger": fault, "time": late}.get(job.waits)
            self.fleet.take(who, job, answer)

    @rule(session=st.integers(0, 1), leaf=st.integers(0, 3))
    def generate(self, session: int, leaf: int) -> None:
        self.fleet.generate(self.fleet.sessions[session], leaf)

    def _inbox(self, number: int) -> deque[object] | None:
        full = [side.inbox for side in self.fleet.open_sides() if any(side.inbox)]
        return full[number % len(full)] if full else None

    @BUSY
    @rule(number=NUMBER, which=NUMBER)
    def lose(self, number: int, which: int) -> None:
        """A message is lost; that a connection is broken is noticed all the same."""
        inbox = self._inbox(number)
        if inbox is not None:
            index = which % len(inbox)
            if inbox[index] is not None:
                del inbox[index]

    @BUSY
    @rule(number=NUMBER, which=NUMBER, later=st.integers(0, 4))
    def duplicate(self, number: int, which: int, later: int) -> None:
        inbox = self._inbox(number)
        if inbox is not None:
            index = which % len(inbox)
            if inbox[index] is not None:
                inbox.insert(min(index + 1 + later, len(inbox)), inbox[index])

    @BUSY
    @rule(number=NUMBER, by=st.integers(1, 4))
    def reorder(self, number: int, by: int) -> None:
        inbox = self._inbox(number)
        if inbox is not None:
            inbox.rotate(by)

    @BUSY
    @rule(number=NUMBER, keep=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def cut(self, number: int, keep: tuple[int, int]) -> None:
        """A connection breaks; some of what was under way still arrives."""
        legs = [leg for leg in self.fleet.legs if not all(side.finished or side.closed for side in leg.sides)]
        if legs:
            for side, count in zip(legs[number % len(legs)].sides, keep, strict=True):
                side.closed = True
                side.inbox = deque([*list(side.inbox)[:count], None])

    @BUSY
    @rule(number=NUMBER)
    def give_up(self, number: int) -> None:
        sides = self.fleet.open_sides()
        sides[number % len(sides)].fail("cancelled")

    @BUSY
    @rule(number=NUMBER)
    def patience_ends(self, number: int) -> None:
        sides = self.fleet.open_sides()
        sides[number % len(sides)].expire()

    @rule(number=NUMBER, count=st.integers(1, 9))
    def damage(self, number: int, count: int) -> None:
        """Some bytes that come from now on are wrong."""
        if self.fleet.legs:
            self.fleet.legs[number % len(self.fleet.legs)].destination.damages += count

    @BUSY
    @rule(number=NUMBER)
    def crash(self, number: int) -> None:
        """A node dies that has a part in some move."""
        sides = self.fleet.open_sides()
        self.fleet.crash(sides[number % len(sides)].node)

    @precondition(lambda self: any(node.jobs for node in self.fleet.nodes))
    @rule(number=NUMBER)
    def crash_again(self, number: int) -> None:
        """A node dies that has not settled what its former incarnation left."""
        nodes = [node for node in self.fleet.nodes if node.jobs]
        self.fleet.crash(nodes[number % len(nodes)])

    @precondition(lambda self: not all(node.alive for node in self.fleet.nodes))
    @rule(number=NUMBER, lead=st.integers(0, 30))
    def restart(self, number: int, lead: int) -> None:
        """The next incarnation of a dead node."""
        dead = [node for node in self.fleet.nodes if not node.alive]
        dead[number % len(dead)].restart()
        self.calm(lead)

    @precondition(lambda self: self.fleet.zombies)
    @rule(number=NUMBER)
    def dead_call_lands(self, number: int) -> None:
        """A dead incarnation's call reaches the ledger."""
        self.fleet.land(number)

    @invariant()
    def holds(self) -> None:
        self.fleet.check()

    def teardown(self) -> None:
        """Once messages flow again, everything ends, and every world is in exactly one place."""
        self.fleet.drain()


Storm.TestCase.settings = settings(
    max_examples=STORMS,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestStorm = Storm.TestCase


def begun(fleet: Fleet, hop: int) -> Leg:
    leg = fleet.start(fleet.sessions[0], hop, live=False)
    assert leg is not None
    return leg


def until(fleet: Fleet, side: StormSource | StormDestination, state: State) -> None:
    """Goes on in good weather until then."""
    for number in range(1000):
        if side.machine.state is state:
            return
        fleet.check()
        assert fleet.step(number)
    raise AssertionError(f"it is never {state}")


def left_at_source() -> Fleet:
    """A world lives on another node; the one that it came from has died before it could let go of it."""
    fleet = Fleet(sessions=1)
    leg = begun(fleet, 1)
    until(fleet, leg.source, State.COMMITTED)
    fleet.crash(fleet.nodes[0])
    until(fleet, leg.destination, State.RELEASED)
    return fleet


def test_a_world_does_not_come_back_beside_what_it_left_behind() -> None:
    fleet = left_at_source()
    fleet.nodes[0].restart()
    back = begun(fleet, 2)
    until(fleet, back.destination, State.REJECTED)
    fleet.drain()


def test_a_world_left_behind_has_no_say_in_later_moves() -> None:
    fleet = left_at_source()
    onwards = begun(fleet, 1)
    until(fleet, onwards.source, State.VERIFYING)
    fleet.nodes[0].restart()
    until(fleet, onwards.source, State.RELEASED)
    fleet.drain()


def test_a_move_that_is_given_up_before_it_is_written_down_does_not_begin_later() -> None:
    fleet = Fleet(sessions=1)
    leg = begun(fleet, 1)
    until(fleet, leg.source, State.ADMITTED)
    for side in reversed(leg.sides):
        side.fail("cancelled")
        while settling := [job for job in side.jobs if job.name == "SettleRecord"]:
            fleet.take(side, settling[0])
    fleet.drain()
    assert fleet.record(fleet.sessions[0]).phase == "owned"
