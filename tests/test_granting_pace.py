"""The pace of a gate on modelled lines: it fills them, and does not drive them into a collapse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.granting.meter import EPOCH_S, Epoch, Meter
from worldmove.granting.pace import (
    COLD_WINDOW,
    FIRST_WAIT_S,
    LEAST_WINDOW,
    PROBE_WINDOW,
    TRIAL_EPOCHS,
    Pace,
)

Line = Callable[[int, int], float]


def drive(pace: Pace, line: Line, seconds: float, *, senders: int = 32, start: float = 0.0) -> float:
    """Runs a backlogged gate on a line; returns its mean goodput in bytes per second."""
    now, total = start, 0.0
    while now < start + seconds:
        allowed, window = pace.now_allowed(calm=True)
        used = min(allowed, senders)
        goodput = line(used, window)
        total += goodput * EPOCH_S
        now += EPOCH_S
        epoch = Epoch(int(goodput * EPOCH_S), EPOCH_S, used, None)
        pace.heard(epoch, crowded=senders > allowed, tight=True, now=now)
    return total / (now - start)


def shallow(rate: float) -> Line:
    """FACTS: 962 Mb/s with one sender, 539 with four, 228 with twelve."""
    measured = {1: 0.96, 2: 0.75, 3: 0.62, 4: 0.54, 8: 0.5}

    def line(senders: int, window: int) -> float:
        known = max((n for n in measured if n <= senders), default=1)
        return rate * measured[known] * min(1.0, window / 65536)

    return line


def fat(rate: float, per_sender: float, delay_s: float) -> Line:
    """A line that one sender can't fill, with a long round trip."""

    def line(senders: int, window: int) -> float:
        return min(rate, senders * per_sender, window / delay_s)

    return line


def test_one_sender_stays_alone_on_a_shallow_line() -> None:
    pace = Pace()
    goodput = drive(pace, shallow(125e6), 50.0)
    assert goodput >= 0.95 * 0.96 * 125e6
    assert pace.senders == 1
    assert pace.window <= 4 * LEAST_WINDOW, "no more bytes than it takes"


@pytest.mark.parametrize("delay_s", [0.001, 0.08])
def test_a_line_that_needs_several_senders_gets_them(delay_s: float) -> None:
    pace, line = Pace(), fat(1e9, 3e8, delay_s)
    drive(pace, line, 60.0)
    assert drive(pace, line, 30.0, start=60.0) >= 0.9e9
    assert 3 <= pace.senders <= 5


def test_a_window_grows_with_the_round_trip() -> None:
    pace, line = Pace(), fat(1e9, 1e9, 0.1)
    drive(pace, line, 30.0)
    assert pace.window >= 1e9 * 0.1 * 0.9
    assert drive(pace, line, 30.0, start=30.0) >= 0.93e9


def test_a_collapse_is_met_by_fewer_senders_at_once() -> None:
    pace = Pace()
    drive(pace, fat(1e9, 1.5e8, 0.001), 60.0)
    many = pace.senders
    assert many >= 6
    drive(pace, shallow(1e9), 1.0, start=60.0)
    assert pace.senders <= many // 2
    assert pace.collapses >= 1
    drive(pace, shallow(1e9), 120.0, start=61.0)
    assert pace.senders == 1


def test_a_paused_world_ends_trials_for_its_time() -> None:
    pace = Pace()
    while pace.now_allowed(calm=True) == pace.now_allowed(calm=False):
        pace.heard(Epoch(10_000_000, 0.1, 1, "A"), crowded=True, tight=True, now=FIRST_WAIT_S)
    assert pace.now_allowed(calm=False) == (pace.senders, pace.window)


def test_nothing_is_learned_of_a_trial_that_was_not_in_force() -> None:
    """While worlds stand the window is what it was: that goodput stays is no word for a narrower one."""
    pace, epoch = Pace(), Epoch(10_000_000, 0.1, 1, "A")
    pace.heard(epoch, crowded=False, tight=False, now=FIRST_WAIT_S)
    trial, before = pace.now_allowed(calm=True), pace.now_allowed(calm=False)
    assert trial[1] < before[1], "a narrower window is tried"
    for second in range(2, 100):
        pace.heard(epoch, crowded=True, tight=True, now=float(second), calm=False)
    assert (pace.now_allowed(calm=True), pace.now_allowed(calm=False)) == (trial, before)
    for _ in range(TRIAL_EPOCHS):
        pace.heard(epoch, crowded=False, tight=False, now=100.0)
    assert (pace.senders, pace.window) == trial, "in force it has lost nothing"


@given(
    most_senders=st.integers(1, 8),
    most_bytes=st.integers(1, 1 << 32),
    epochs=st.lists(
        st.tuples(st.integers(1, 1 << 36), st.integers(1, 12), st.booleans(), st.booleans(), st.floats(0, 5)),
        max_size=200,
    ),
)
def test_it_never_leaves_its_bounds(
    most_senders: int, most_bytes: int, epochs: list[tuple[int, int, bool, bool, float]]
) -> None:
    pace, now = Pace(most_senders, most_bytes), 0.0
    for nbytes, senders, crowded, tight, gap in epochs:
        now += gap
        pace.heard(Epoch(nbytes, EPOCH_S, senders, None), crowded=crowded, tight=tight, now=now)
        for calm in (False, True):
            allowed, window = pace.now_allowed(calm=calm)
            assert 1 <= allowed <= most_senders
            assert min(LEAST_WINDOW, most_bytes) <= window <= max(most_bytes, 1)


def test_what_may_be_tried_next_is_within_reach() -> None:
    assert Pace().reach == (2, 2 * COLD_WINDOW)
    assert Pace(most_senders=1, most_bytes=COLD_WINDOW).reach == (1, COLD_WINDOW)
    assert Pace(most_senders=3, most_bytes=COLD_WINDOW, still=True).reach == (3, COLD_WINDOW)


def test_a_cold_gate_is_warmed_once() -> None:
    pace = Pace()
    assert pace.window == COLD_WINDOW
    pace.warm(1e9, 0.001)
    assert pace.window == 20_000_000
    pace.warm(1e6, 0.001)
    assert pace.window == 20_000_000
    slow, far = Pace(), Pace()
    slow.warm(1e6, 0.001)
    far.warm(1e9, 0.05)
    assert (slow.window, far.window) == (LEAST_WINDOW, 100_000_000)


def test_where_nobody_knows_the_round_trip_a_cold_gate_leaves_room_for_a_long_one() -> None:
    windows = []
    for goodput in (1e6, 1e7, 1e8, 1e9):
        pace = Pace()
        pace.warm(goodput)
        windows.append(pace.window)
    assert windows == [LEAST_WINDOW, 2_000_000, COLD_WINDOW, 20_000_000]


def test_a_probe_finds_the_line_and_not_a_narrow_window() -> None:
    """What it hears meanwhile teaches nothing; afterwards the window is what the probe's rate asks for."""
    pace = Pace()
    with pace.probed():
        assert pace.now_allowed(calm=False)[1] == PROBE_WINDOW
        pace.heard(Epoch(1 << 30, EPOCH_S, 1, None), crowded=False, tight=True, now=1.0)
        with pace.probed():
            pass
        assert pace.window == PROBE_WINDOW
    assert pace.window == COLD_WINDOW
    pace.warm(1e10, 0.001)
    assert pace.window == 200_000_000
    with pace.probed():
        assert pace.window == 200_000_000
    narrow = Pace(most_bytes=LEAST_WINDOW)
    with narrow.probed():
        assert narrow.window == LEAST_WINDOW


def test_idle_times_do_not_count_as_slow() -> None:
    meter = Meter(epoch_s=0.1)
    now, epochs = 0.0, []
    for _ in range(20):
        meter.granted(1, "A", now, full=True)
        now += 0.01
        epoch = meter.landed(1000, now, full=False)
        if epoch is not None:
            epochs.append(epoch)
            meter.restart()
        now += 5.0
    assert [round(epoch.goodput) for epoch in epochs] == [100_000] * len(epochs)
    assert len(epochs) >= 1
    assert epochs[0].alone == "A"


def test_what_came_to_nothing_is_not_measured() -> None:
    meter = Meter(epoch_s=0.1)
    meter.granted(1, "A", 0.0, full=True)
    meter.granted(2, "B", 0.0, full=True)
    meter.broken(["B"], 10.0, full=True)
    assert meter.landed(1000, 10.05, full=True) is None
    epoch = meter.landed(1000, 10.2, full=False)
    assert epoch is not None
    assert round(epoch.goodput) == 10_000
    assert (epoch.alone, epoch.senders) == ("B", 1)


def test_a_line_that_has_little_to_do_is_not_measured() -> None:
    meter = Meter(epoch_s=0.1)
    for step in range(100):
        meter.granted(1, "A", float(step), full=False)
        assert meter.landed(10, step + 0.5, full=False) is None
