"""Admission: the conditions term by term, promises, rates; and that promises are kept on a modelled line."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmove.admission import Demand, Supply, judge, pause_of
from worldmove.dirtying import Dirtying
from worldmove.errors import ValidationError
from worldmove.promises import Promises
from worldmove.rates import LINE, MOST_NAMES, Rates, Window, path_name
from worldmove.rests import Stops

MB = 1_000_000


def demand(**more: Any) -> Demand:
    base: dict[str, Any] = {"state_bytes": 100 * MB, "live": True, "block_s": 0.1, "horizon_s": 0.25}
    return Demand(**(base | {"deadline_s": 10.0, "dirty_rate": 10.0 * MB} | more))


def supply(**more: Any) -> Supply:
    base: dict[str, Any] = {"path": 125.0 * MB, "line": 200.0 * MB}
    base |= {"source_digest": 2000.0 * MB, "destination_digest": 2000.0 * MB}
    return Supply(**(base | {"open_s": 0.05, "commit_s": 0.004, "resume_s": 0.001} | more))


def test_every_term_is_shown() -> None:
    verdict = judge(demand(), supply(), share=50.0 * MB)
    assert verdict.admissible
    assert verdict.unmeasured == ()
    delta = 10 * MB * (0.1 + 0.05) / (1 - 10 / 125)
    pause_ms = 50 + delta / 125e3 + 50 + 5
    assert verdict.required["delta_bytes"] == pytest.approx(delta)
    assert verdict.required["pause_ms"] == pytest.approx(pause_ms)
    assert verdict.available["pause_ms"] == 250
    total_s = 0.05 + 0.1 + 0.105 + (100 * MB + delta) / (40 * MB)
    assert verdict.required["total_ms"] == pytest.approx(total_s * 1000)
    assert verdict.available["bytes_per_s"] == 50 * MB
    assert verdict.required["bytes_per_s"] < 50 * MB
    assert verdict.available["share_bytes_per_s"] == 50 * MB
    assert verdict.span_s == pytest.approx(10 - 0.05 - 0.1 - 0.105)
    assert verdict.reserved_bytes == pytest.approx(100 * MB + delta + 10 * MB * verdict.span_s)


REFUSED = [
    ("converges", demand(dirty_rate=200.0 * MB), supply()),
    ("pause", demand(horizon_s=0.1), supply()),
    ("pause", demand(live=False), supply()),
    ("pause", demand(), supply(commit_s=0.2)),
    ("pause", demand(), supply(source_digest=100.0 * MB)),
    ("deadline", demand(deadline_s=0.8), supply()),
    ("deadline", demand(deadline_s=1.0), supply(open_s=0.9)),
    ("pause", demand(), supply(egress=12.0 * MB)),
]


@pytest.mark.parametrize(("condition", "asked", "there"), REFUSED)
def test_a_move_that_could_not_even_alone_says_why(condition: str, asked: Demand, there: Supply) -> None:
    verdict = judge(asked, there, share=60.0 * MB)
    assert (verdict.admissible, verdict.code, verdict.condition) == (False, "inadmissible", condition)
    assert verdict.retry_after_s is None
    assert verdict.reason is not None
    assert "_ms is" in verdict.reason


@pytest.mark.parametrize(
    ("condition", "asked"),
    [
        ("converges", demand(dirty_rate=40.0 * MB)),
        ("deadline", demand(deadline_s=4.0)),
    ],
)
def test_live_rounds_that_have_a_share_of_the_time_bring_a_share_of_the_bytes(
    condition: str, asked: Demand
) -> None:
    """The pause has all of it, and so has a move that is not live."""
    assert judge(asked, supply()).admissible
    verdict = judge(asked, supply(live_share=0.25))
    assert (verdict.admissible, verdict.condition) == (False, condition)
    assert verdict.available["bytes_per_s"] == pytest.approx(125 * MB / 4)
    assert verdict.required["send_ms"] == pytest.approx(verdict.required["delta_bytes"] / 125e3)
    standing = demand(live=False, horizon_s=2.0)
    assert judge(standing, supply(live_share=0.25)) == judge(standing, supply())


def test_a_full_gate_says_when_there_will_be_room() -> None:
    verdict = judge(demand(), supply(), share=15.0 * MB)
    assert (verdict.code, verdict.condition) == ("gate-full", "deadline")
    short = verdict.required["bytes_per_s"] - 15 * MB
    assert verdict.retry_after_s == pytest.approx(short * verdict.span_s / (125 * MB))
    assert judge(demand(), supply(), share=15.0 * MB + short + 1).admissible


def test_a_world_that_no_line_could_follow_hears_when_it_could_come_by_standing() -> None:
    """It asks for three times its state, and not for what it dirties, which nobody could ever send."""
    asked, there = demand(dirty_rate=500.0 * MB, horizon_s=2.0), supply()
    verdict = judge(asked, there, share=0.0)
    assert (verdict.code, verdict.condition) == ("gate-full", "deadline")
    assert verdict.required["bytes_per_s"] == pytest.approx(300 * MB / verdict.span_s)
    assert verdict.retry_after_s == pytest.approx(300 / 125)


def test_nobody_is_told_to_wait_longer_than_what_was_promised_lasts() -> None:
    """A path that nobody knew may have been promised to more than it can bring."""
    promises = Promises()
    promises.owe("before", 1e6 * MB, deadline=1.5)
    verdict = promises.judge(demand(), supply(), now=1.0)
    assert (verdict.code, verdict.available["share_bytes_per_s"]) == ("gate-full", 0.0)
    assert verdict.retry_after_s == 0.5
    promises.drop("before")
    assert promises.judge(demand(), supply(), now=1.0).admissible


def test_who_only_has_to_let_others_stop_first_waits_for_that() -> None:
    verdict = judge(demand(), supply(turn_s=1e3), share=100.0 * MB)
    assert (verdict.code, verdict.retry_after_s) == ("gate-full", 1e3)


def test_what_is_not_known_does_not_refuse_and_is_named() -> None:
    verdict = judge(demand(dirty_rate=None), Supply(line=125.0 * MB))
    assert verdict.admissible
    assert verdict.provisional
    assert set(verdict.unmeasured) == {"path", "source_digest", "destination_digest", "dirty_rate"}
    assert not judge(demand(dirty_rate=None, horizon_s=10.0), supply()).provisional
    assert not judge(demand(dirty_rate=None, horizon_s=0.01), supply()).admissible


def test_a_world_that_dirties_too_fast_may_be_stopped_for_all_of_its_state() -> None:
    verdict = judge(demand(dirty_rate=500.0 * MB, horizon_s=2.0), supply())
    assert verdict.admissible
    assert verdict.required["delta_bytes"] == 100 * MB
    assert verdict.reserved_bytes == 300 * MB, "a round that tells so, one more, and the pause"


def test_rounds_that_would_not_end_in_time_end_early_where_the_pause_may_bring_all() -> None:
    """As much is dirtied as is sent, nearly: what remains in the end is far away, the whole state is not."""
    there = Supply(path=3.0 * MB, line=3.0 * MB)
    asked = demand(state_bytes=3 * MB, dirty_rate=2.95 * MB, block_s=0.01, horizon_s=10.0, deadline_s=60.0)
    verdict = judge(asked, there)
    assert verdict.admissible
    assert verdict.required["total_ms"] < 4000
    hasty = msgspec.structs.replace(asked, horizon_s=0.9)
    assert judge(hasty, there).condition == "deadline", "all of it does not fit this pause"


def test_where_few_may_stand_at_once_each_counts_what_it_keeps_others_from() -> None:
    """One at a time, a block apart: the line would carry forty times as many."""
    asked = demand(state_bytes=5 * MB, block_s=2.0, horizon_s=0.06, dirty_rate=0.1 * MB, deadline_s=100.0)
    verdict = judge(asked, Supply(line=200.0 * MB), 200.0 * MB)
    assert verdict.admissible
    assert verdict.reserved_bytes > 0.4 * MB * 200
    promises = Promises()
    taken = [promises.admit(str(n), asked, Supply(line=200.0 * MB), 0.0).admissible for n in range(400)]
    assert 40 < sum(taken) < 100


def test_a_pause_of_what_is_really_left() -> None:
    assert pause_of(demand(), supply(), 5.0 * MB).send_s == pytest.approx(0.04)


rates = st.floats(1e6, 1e10)
seconds = st.floats(0.001, 100)
demands = st.builds(
    Demand,
    state_bytes=st.integers(1, 1 << 34),
    live=st.booleans(),
    block_s=st.floats(0.01, 2),
    horizon_s=st.floats(0.01, 10),
    deadline_s=seconds,
    dirty_rate=st.none() | st.floats(0, 1e10),
)
supplies = st.builds(
    Supply,
    path=st.none() | rates,
    line=rates,
    egress=st.none() | rates,
    source_digest=st.none() | rates,
    destination_digest=st.none() | rates,
    open_s=st.floats(0, 1),
    commit_s=st.floats(0, 0.1),
    resume_s=st.floats(0, 0.1),
    blocked_s=st.floats(0, 0.1),
)


@settings(deadline=None)
@given(asked=demands, there=supplies, share=rates)
def test_a_verdict_holds_what_it_says(asked: Demand, there: Supply, share: float) -> None:
    verdict = judge(asked, there, share)
    if verdict.admissible:
        assert verdict.pause.total_s <= asked.horizon_s
        assert verdict.required["total_ms"] <= asked.deadline_s * 1000 * (1 + 1e-9)
        assert verdict.reserved_bytes <= share * asked.deadline_s * (1 + 1e-9)
        assert verdict.required["bytes_per_s"] <= verdict.available["bytes_per_s"] * (1 + 1e-9)
        assert judge(asked, there, 2 * share).admissible, "more room refuses nobody"
    else:
        assert verdict.reason
        assert verdict.condition
        assert (verdict.retry_after_s is not None) == (verdict.code == "gate-full")
        assert verdict.retry_after_s is None or verdict.retry_after_s > 0


def test_a_turn_that_is_cut_in_two_is_counted_once() -> None:
    """Small worlds stand together; a large one, between them by deadline, stands alone."""
    there = Supply(line=100.0 * MB)
    small = demand(live=False, state_bytes=MB, horizon_s=0.205, block_s=0.2)
    large = demand(live=False, state_bytes=20 * MB, horizon_s=0.205, block_s=0.2)
    alone = {asked: Promises().admit("alone", asked, there, 0.0).reserved_bytes for asked in (small, large)}

    def counted(*arrivals: Demand) -> list[bool]:
        promises = Promises()
        found = [promises.admit(str(n), one, there, 0.0) for n, one in enumerate(arrivals)]
        pairs = zip(arrivals, found, strict=True)
        return [each.reserved_bytes > alone[one] * 1.01 for one, each in pairs]

    assert counted(small, small) == counted(large, large) == [False, False]
    assert counted(small, large, large, small) == [False, True, True, False]
    assert counted(large, large, small, small) == [False, False, True, False]


def test_worlds_that_have_time_for_others_cost_their_bytes_alone() -> None:
    """They are told a block before the receiver is done with others, or with less time as early as can be."""

    def rests(room_s: float, late_s: float = 0.0, aside_s: float = 0.0, work_s: float = 0.2) -> float:
        return Stops(0.05, work_s, room_s, late_s, aside_s, 3.0).rests() * work_s

    assert rests(0.26) == rests(0.36, late_s=0.1) == 0.0
    assert rests(0.26, aside_s=0.001) == pytest.approx(0.001)
    assert 0.025 < rests(0.2) == rests(0.2, late_s=0.1) < 0.05, "half a block, and deviations"
    assert 0 < rests(0.249) < rests(0.23) < rests(0.21) < rests(0.2)
    assert rests(0.061, work_s=0.01) < rests(0.05, work_s=0.01) <= rests(0.02, work_s=0.01)
    assert rests(0.07, work_s=0.01) == 0.0, "also where several stand together"


def test_worlds_with_less_time_than_others_may_be_told_later() -> None:
    """What may stand for longer is overtaken, which may leave no time for one more beside it."""
    there = Supply(line=100.0 * MB)
    short = demand(live=False, state_bytes=20 * MB, horizon_s=0.5, block_s=0.1)
    long = demand(live=False, state_bytes=20 * MB, horizon_s=2.0, block_s=0.1)

    def reserved(*arrivals: Demand) -> list[float]:
        promises = Promises()
        found = [promises.admit(str(n), one, there, 0.0) for n, one in enumerate(arrivals)]
        return [each.reserved_bytes / MB for each in found]

    assert reserved(short, short) == reserved(long, long) == [20.0, 20.0]
    for arrivals in ((short, long), (long, short)):
        first, second = reserved(*arrivals)
        assert first == 20.0
        assert 24.0 < second < 30.0, "half a block of the line, and deviations"


def test_promises_leave_a_share() -> None:
    promises = Promises()
    assert promises.share(100.0, 10.0, 0.0) == 100.0
    first = demand(live=False, horizon_s=1.0, state_bytes=100, deadline_s=10.0)
    there = Supply(line=100.0)
    verdict = promises.admit("a", first, there, 0.0)
    assert verdict.admissible
    used = 100.0 * 10.0 - promises.share(100.0, 10.0, 0.0) * 10.0
    assert 100.0 < used < 120.0, "its bytes, and what the line rests for it"
    assert promises.share(100.0, 1.0, 0.0) == 0.0, (
        "its whole state may go while its world stands, before mine"
    )
    assert promises.reserved(0.0) == pytest.approx(used / verdict.span_s)
    promises.landed("a", 60)
    assert promises.share(100.0, 10.0, 0.0) == pytest.approx(100.0 - (used - 60) / 10)
    promises.owes("a", 10)
    assert promises.share(100.0, 10.0, 0.0) == pytest.approx(99.0)
    promises.drop("a")
    promises.drop("a")
    promises.landed("a", 1)
    assert (len(promises), promises.share(100.0, 10.0, 10.0)) == (0, 0.0)


class _Job:
    def __init__(self, name: str, left: float, deadline: float) -> None:
        self.name, self.left, self.deadline = name, left, deadline


@settings(deadline=None)
@given(
    line=st.floats(10, 1000),
    arrivals=st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 3000), st.floats(0.5, 20), st.floats(0, 0.5)), max_size=40
    ),
)
def test_every_promise_is_kept_on_a_line_that_serves_by_deadline(
    line: float, arrivals: list[tuple[float, int, float, float]]
) -> None:
    """Fluid model: whoever has the earliest deadline gets the line, and dirties all along."""
    promises, now = Promises(), 0.0
    jobs: list[_Job] = []
    there = Supply(line=line)

    def serve(until: float) -> None:
        nonlocal now
        while jobs and now < until - 1e-12:
            job = min(jobs, key=lambda one: one.deadline)
            part = min(job.left / line, until - now)
            job.left -= part * line
            promises.landed(job.name, int(part * line))
            now += part
            if job.left <= 1e-6:
                assert now <= job.deadline + 1e-6
                jobs.remove(job)
                promises.drop(job.name)
        now = max(now, until)

    for number, (gap, size, deadline_s, dirty) in enumerate(arrivals):
        serve(now + gap)
        asked = demand(state_bytes=size, deadline_s=deadline_s, horizon_s=1e6, dirty_rate=dirty * line)
        verdict = promises.admit(f"m{number}", asked, there, now)
        if verdict.admissible:
            jobs.append(_Job(f"m{number}", verdict.reserved_bytes, now + deadline_s))
    serve(1e9)


def test_what_a_world_dirties_shows_in_the_second_round_and_later() -> None:
    rounds = Dirtying(1000)
    for began, nbytes in ((0.0, 1000), (10.0, 300), (14.0, 80), (15.0, 30)):
        rounds.begins(began)
        rounds.took(nbytes)
    assert rounds.rate == 30.0
    fast = Dirtying(1000, block_s=2.0)
    for began in (0.0, 0.5, 1.0):
        fast.begins(began)
        fast.took(100)
    assert fast.rate == 50.0, "one block's worth, however soon it was asked for"
    whole = Dirtying(1000)
    for began in (0.0, 1.0, 2.0):
        whole.begins(began)
        whole.took(950)
    assert whole.rate is None, "all of it was made anew: nobody knows how often"


def test_quantiles_are_on_the_safe_side() -> None:
    window = Window(span_s=10.0, most=20)
    assert window.quantile(0.1, 0.0) is None
    for value in range(1, 21):
        window.note(float(value), now=value / 10)
    assert (window.quantile(0.1, 2.0), window.quantile(0.95, 2.0)) == (3.0, 19.0)
    window.note(100.0, 2.0)
    assert window.quantile(1.0, 2.0) == 100.0
    assert window.quantile(0.0, 2.0) == 2.0
    assert window.quantile(0.0, 2.0, within_s=0.25) == 18.0
    assert window.quantile(0.5, 2.5, within_s=0.25) is None
    assert window.quantile(0.5, 13.0) is None
    with pytest.raises(ValidationError):
        window.note(math.nan, 0.0)


@settings(deadline=None)
@given(values=st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=64), share=st.floats(0, 1))
def test_a_quantile_is_a_sample(values: list[float], share: float) -> None:
    window = Window()
    for value in values:
        window.note(value, 0.0)
    found = window.quantile(share, 0.0)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)


def test_rates_by_name_are_bounded() -> None:
    measured = Rates()
    measured.note_bytes(LINE, 100, 2.0, now=0.0)
    measured.note_bytes(LINE, 0, 2.0, now=5.0)
    assert (measured.rate(LINE, 1.0), measured.rate(LINE, 1.0, within_s=0.5)) == (50.0, None)
    assert (measured.tail("commit", 1.0), measured.rate("x", 1.0)) == (None, None)
    measured.note("commit", 0.1, 0.0)
    assert measured.tail("commit", 1.0) == 0.1
    for number in range(MOST_NAMES + 5):
        measured.note(path_name("staged", f"n{number}"), 1.0, 0.0)
    assert len(measured.names) == MOST_NAMES
    assert LINE not in measured.names
