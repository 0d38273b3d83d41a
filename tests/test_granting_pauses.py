"""Which worlds may stop: all go on in time, and the receiver rests no more than `rests` says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmove.granting.pauses import Need, Pauses
from worldmove.rests import Stops


class _Receiver:
    """Works for whoever has to go on first, and tells in grains; a world stops some time after it may."""

    def __init__(self, grain_s: float) -> None:
        self.pauses = Pauses()
        self.now = 0.0
        self.needs: dict[str, Need] = {}
        self.delays: dict[str, float] = {}
        self.rests: list[tuple[float, float]] = []
        """While others wait: since when, and for how long."""
        self._grain = grain_s
        self._stops_at: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._until: dict[str, float] = {}

    def want(self, name: str, need: Need, delay: float) -> None:
        self.needs[name], self.delays[name] = need, delay
        self.pauses.want(name, need)

    def run(self, end: float) -> None:
        while self.now < end:
            for name in self.pauses.due(self.now):
                self._stops_at[name] = self.now + self.delays[name]
            for name in [one for one, at in self._stops_at.items() if at <= self.now + 1e-12]:
                del self._stops_at[name]
                self._until[name] = self.now + self.needs[name].horizon_s
                self._left[name] = self._told[name] = self.needs[name].work_s
                self.pauses.stands(name, self._until[name], self.now)
            step = min([end, *self._stops_at.values()]) - self.now
            wait = self.pauses.wait_s(self.now)
            step = step if wait is None else min(step, wait)
            if self._left:
                self._work(step)
            elif step <= 0 or not (self._stops_at or self.pauses.waiting):
                self.now = end
            else:
                if self.pauses.waiting:
                    self.rests.append((self.now, step))
                self.now += step

    def _work(self, step: float) -> None:
        name = min(self._left, key=lambda one: self._until[one] - self.needs[one].apart_s)
        untold = self._told[name] - self._left[name]
        step = min(step, self._left[name], max(self._grain - untold, 1e-6))
        self._left[name] -= step
        self.now += step
        done = self._left[name] <= 1e-9
        if done or self._told[name] - self._left[name] >= self._grain - 1e-9:
            self._told[name] = self._left[name]
            self.pauses.progress(name, 0.0 if done else self._left[name], self.now)
        if done:
            assert self.now + self.needs[name].apart_s <= self._until[name] + 1e-6
            del self._left[name]
            self.pauses.leave(name, self.now)

    def finish(self) -> None:
        self.run(self.now + 1000)
        assert not self.pauses.waiting
        assert not self._left


grains = st.sampled_from([0.005, 0.02, 0.1, 1.0])


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(0, 0.3),
            st.floats(0.001, 0.3),
            st.floats(0, 0.1),
            st.floats(0.05, 1.0),
            st.floats(0, 0.5),
        ),
        max_size=30,
    ),
    grain=grains,
)
def test_every_world_that_may_stop_goes_on_in_time(
    steps: list[tuple[float, float, float, float, float]], grain: float
) -> None:
    receiver = _Receiver(grain)
    for number, (gap, work, apart, horizon, delay) in enumerate(steps):
        if work + apart <= horizon:
            need = Need(work, apart, delay, horizon, receiver.now + 10)
            receiver.want(f"m{number}", need, delay)
        receiver.run(receiver.now + gap)
    receiver.finish()


@settings(deadline=None)
@given(
    works=st.lists(st.floats(0.01, 0.3), min_size=2, max_size=30),
    delays=st.lists(st.floats(0, 1), min_size=30, max_size=30),
    block=st.floats(0.02, 0.5),
    grain=grains,
)
def test_the_receiver_never_rests_while_worlds_wait_that_have_time_for_each_other(
    works: list[float], delays: list[float], block: float, grain: float
) -> None:
    """Also where what is left is told in grains that take longer than a block: `rests` counts on it."""
    receiver, horizon = _Receiver(grain), 2 * max(works) + block + grain
    for number, work in enumerate(works):
        need = Need(work, 0.0, block, horizon, deadline=float(number))
        receiver.want(f"m{number}", need, delays[number] * block)
        assert Stops(block, work, horizon, min(grain, max(works)), 0.0, 100.0).flows
    receiver.finish()
    assert sum(length for since, length in receiver.rests if since + length > block) < 1e-6


def test_nobody_overtakes_in_the_pauses() -> None:
    pauses = Pauses()
    pauses.want("long", Need(0.2, 0.0, 0.1, 0.25, deadline=5.0))
    assert pauses.due(0.0) == ["long"]
    pauses.want("late", Need(0.01, 0.0, 0.3, 0.25, deadline=9.0))
    pauses.want("early", Need(0.2, 0.0, 0.1, 0.25, deadline=7.0))
    assert pauses.due(0.0) == [], "the small one waits behind the earlier one"
    assert (pauses.may("long"), pauses.may("early"), pauses.waiting) == (True, False, 2)
    pauses.leave("long", 0.0)
    assert pauses.due(0.0) == ["early", "late"]


def test_what_is_left_is_expected_to_become_less_between_grants() -> None:
    pauses = Pauses()
    for name, stop_s, horizon_s in (("a", 0.1, 1.0), ("b", 0.1, 1.0), ("c", 0.1, 1.0), ("d", 0.1, 1.0)):
        pauses.want(name, Need(0.3, 0.0, stop_s, horizon_s, deadline=float(ord(name))))
    assert pauses.due(0.0) == ["a"]
    assert pauses.wait_s(0.0) is None, "it does not stand yet"
    pauses.stands("a", 1.05, 0.05)
    assert pauses.wait_s(0.05) == pytest.approx(0.2)
    assert pauses.due(0.2) == []
    assert pauses.due(0.25) == ["b"]
    assert pauses.due(9.0) == [], "where nothing lands one more stops, and no others"
    assert pauses.wait_s(9.0) is None


def test_worlds_are_in_time_by_what_was_told_and_not_by_what_is_expected() -> None:
    pauses = Pauses()
    pauses.want("a", Need(0.3, 0.0, 0.1, 0.6, deadline=1.0))
    pauses.want("b", Need(0.3, 0.0, 0.1, 0.5, deadline=2.0))
    assert pauses.due(0.0) == ["a"]
    pauses.stands("a", 0.6, 0.0)
    assert pauses.due(0.25) == [], "as far as is known the line has brought nothing"
    pauses.progress("a", 0.15, 0.25)
    assert pauses.due(0.25) == []
    assert pauses.wait_s(0.25) == pytest.approx(0.05)
    assert pauses.due(0.3) == ["b"]


def test_who_is_given_up_was_worked_for_until_then() -> None:
    pauses = Pauses()
    for name in ("a", "b", "c"):
        pauses.want(name, Need(0.3, 0.0, 0.4, 2.0, deadline=float(ord(name))))
    assert pauses.due(0.0) == ["a", "b"]
    pauses.stands("a", 2.0, 0.0)
    pauses.stands("b", 2.1, 0.1)
    pauses.leave("a", 0.15)
    assert pauses.due(0.15) == ["c"]
    pauses.want("d", Need(0.3, 0.0, 0.4, 2.0, deadline=999.0))
    assert pauses.wait_s(0.15) == pytest.approx(0.2), "nothing of what is left was done before"
