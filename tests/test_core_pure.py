"""Small pure parts of a move: batches of spans, and the policy of live rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.delta import batches, long_batches
from worldmove.delta.cutting import MOST_SPANS
from worldmove.gate import MIN_BATCH
from worldmove.manifest import MAX_LEAF, LeafMap, Region, Span
from worldmove.pacing import Duty
from worldmove.rounds import RoundPolicy, Taken

KIB = 1024

SIZES = st.integers(0, 40 * 64 * KIB)
STRIDES = st.sampled_from([None, 8 * KIB, 12 * KIB, 256 * KIB, 999])


@st.composite
def sessions(draw: st.DrawFn) -> LeafMap:
    regions = []
    for number in range(draw(st.integers(1, 5))):
        nbytes = draw(SIZES)
        stride = draw(STRIDES)
        fits = stride is not None and 0 < stride <= nbytes
        regions.append(Region(f"r{number}", "uint8", (nbytes,), stride_bytes=stride if fits else None))
    return LeafMap(tuple(regions))


def covered(spans: list[Span]) -> dict[int, list[tuple[int, int]]]:
    """Merged byte ranges of each region."""
    found: dict[int, list[tuple[int, int]]] = {}
    for span in sorted(spans):
        ranges = found.setdefault(span.region, [])
        if ranges and ranges[-1][1] == span.offset:
            ranges[-1] = (ranges[-1][0], span.offset + span.length)
        else:
            ranges.append((span.offset, span.offset + span.length))
    return found


@pytest.mark.parametrize("cutter", [batches, long_batches])
@given(leaf_map=sessions(), data=st.data(), limit=st.integers(1, 3 * 1024 * KIB))
def test_batches_cover_exactly_what_was_asked(
    cutter: Callable[..., Iterator[list[Span]]], leaf_map: LeafMap, data: st.DataObject, limit: int
) -> None:
    count = leaf_map.count
    wanted = data.draw(st.lists(st.integers(0, max(count - 1, 0)), unique=True, max_size=60))
    leaves = np.array(sorted(wanted) if count else [], dtype=np.int64)
    spans = leaf_map.runs(leaves)
    cut = list(cutter(iter(spans), leaf_map, limit))
    pieces = [span for batch in cut for span in batch]
    assert covered(pieces) == covered(spans)
    assert pieces == sorted(pieces)
    assert sum(span.length for span in pieces) == leaf_map.bytes_of(leaves)
    again = [leaf for span in pieces for leaf in range(*_leaves(leaf_map, span))]
    assert again == leaves.tolist()
    for batch in cut:
        assert batch
        nbytes = sum(span.length for span in batch)
        assert nbytes <= limit or len(again_of(leaf_map, batch)) == 1
        for span in batch:
            leaf = int(leaf_map.leaf_bytes[span.region])
            end = int(leaf_map.nbytes[span.region])
            assert span.length > 0
            assert span.offset % leaf == 0
            assert span.length % leaf == 0 or span.offset + span.length == end


def _leaves(leaf_map: LeafMap, span: Span) -> tuple[int, int]:
    first, count = leaf_map.leaves_of(span)
    return first, first + count


def again_of(leaf_map: LeafMap, batch: list[Span]) -> list[int]:
    return [leaf for span in batch for leaf in range(*_leaves(leaf_map, span))]


@given(sessions(), st.integers(1, 2048 * KIB))
def test_batches_are_filled_before_the_next_one_begins(leaf_map: LeafMap, limit: int) -> None:
    """No batch could have taken the next one's first leaf."""
    cut = list(batches(leaf_map.spans(0, leaf_map.count), leaf_map, limit))
    for batch, following in itertools.pairwise(cut):
        first = following[0]
        leaf = min(int(leaf_map.leaf_bytes[first.region]), first.length)
        assert sum(span.length for span in batch) + leaf > limit


def test_leaves_larger_than_the_limit_travel_one_by_one() -> None:
    leaf_map = LeafMap((Region("k", "uint8", (200 * KIB,)),))
    cut = list(batches(leaf_map.spans(0, 4), leaf_map, 1))
    assert [[span.length for span in batch] for batch in cut] == [[64 * KIB]] * 3 + [[8 * KIB]]


def test_small_regions_share_a_batch() -> None:
    leaf_map = LeafMap(tuple(Region(f"r{number}", "uint8", (1,)) for number in range(4000)))
    cut = list(batches(leaf_map.spans(0, 4000), leaf_map, 16 * KIB * KIB))
    assert [len(batch) for batch in cut] == [*[MOST_SPANS] * (4000 // MOST_SPANS), 4000 % MOST_SPANS]


def test_the_size_of_each_batch_may_be_another() -> None:
    leaf_map = LeafMap((Region("k", "uint8", (1024 * KIB,)),))
    wanted = iter((64 * KIB, 128 * KIB, 512 * KIB, 1024 * KIB))
    cut = list(batches(leaf_map.spans(0, leaf_map.count), leaf_map, lambda: next(wanted)))
    assert [sum(span.length for span in batch) // KIB for batch in cut] == [64, 128, 512, 320]


def test_long_batches_leave_no_tails_of_regions_that_fit_one() -> None:
    """60 regions of a little less than 96 MiB in batches of 256: two to a batch, and none is cut."""
    size = 100_638_720
    leaf_map = LeafMap(tuple(Region(f"r{number}", "uint8", (size,)) for number in range(60)))
    cut = list(long_batches(leaf_map.whole(), leaf_map, 256 << 20))
    assert [[span.length for span in batch] for batch in cut] == [[size, size]] * 30


def test_what_is_longer_than_a_batch_is_cut_evenly() -> None:
    leaf_map = LeafMap((Region("a", "uint8", (10 * KIB,)), Region("k", "uint8", (5 * 64 * KIB,))))
    cut = list(long_batches(leaf_map.whole(), leaf_map, 256 * KIB))
    assert [[span.length // KIB for span in batch] for batch in cut] == [[10, 192], [128]]


def test_nothing_makes_no_batch() -> None:
    assert list(batches([], LeafMap(()), 5)) == []
    empty = LeafMap((Region("zero", "uint8", (0,)),))
    assert list(batches(empty.spans(0, 0), empty, 5)) == []
    assert list(long_batches(empty.whole(), empty, 5)) == []


def test_a_gates_smallest_batch_holds_every_leaf() -> None:
    assert MIN_BATCH >= MAX_LEAF


def taken(nbytes: int, ms: float, blocks: int = 1) -> Taken:
    return Taken(leaves=nbytes // 100, bytes=nbytes, ms=ms, blocks=blocks)


POLICY = RoundPolicy(max_rounds=4, shrink=0.8, small_bytes=1000, horizon_ms=400.0, block_ms=100.0)
FIRST = (100_000, 1000.0, 0)
HISTORIES: list[tuple[str, list[tuple[int, float, int]], int, bool, bool]] = [
    # The path carries 100 bytes a millisecond: a block of 5,000 bytes takes 50 ms of the 100 of the next one.
    ("a first round that brought much is followed by another", [FIRST], 10, True, False),
    ("however fast it was", [(100_000, 1.0, 0)], 0, True, False),
    ("a small remainder is paused for", [FIRST, (1_000, 900.0, 9)], 9, False, False),
    ("nothing at all is", [(0, 0.0, 0)], 0, False, False),
    ("five blocks went by, and half as many would", [FIRST, (50_000, 500.0, 10)], 5, True, False),
    ("one block went by, and another one might", [FIRST, (5_000, 50.0, 1)], 1, True, False),
    ("none went by", [FIRST, (5_000, 50.0, 1)], 0, False, False),
    ("as dirty as fast: no round would help", [FIRST, (30_000, 300.0, 3)], 3, False, False),
    ("a block that takes longer than the horizon", [FIRST, (50_000, 500.0, 1)], 0, False, True),
    ("dirtier than the path is fast", [FIRST, (100_000, 1000.0, 9)], 10, False, True),
    ("enough rounds", [FIRST, *[(9_000, 1000.0, 10)] * 3], 10, False, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "rounds", "since", "more", "lost"), HISTORIES, ids=[what for what, *_ in HISTORIES]
)
def test_when_live_rounds_end(
    what: str, rounds: list[tuple[int, float, int]], since: int, more: bool, lost: bool
) -> None:
    history = [taken(*one) for one in rounds]
    assert POLICY.another(history, since) == more, what
    assert more or (POLICY.hopeless(history, since) is not None) == lost, what


WAITING: list[tuple[str, dict[str, Any], bool]] = [
    ("the path was quicker than a block", {}, True),
    ("a block has gone by", {"since": 1}, False),
    ("it was waited for as long as a block takes", {"waited_ms": 100.0}, False),
    ("the deadline is near", {"left_ms": 400.0}, False),
    ("it is not the first round", {"rounds": 2}, False),
    ("nothing moves by strides", {"strided": False}, False),
    ("there is no other round", {"max_rounds": 1}, False),
]  # fmt: skip


@pytest.mark.parametrize(("what", "given", "waits"), WAITING, ids=[what for what, *_ in WAITING])
def test_when_the_end_of_a_block_is_waited_for(what: str, given: dict[str, Any], waits: bool) -> None:
    policy = msgspec.structs.replace(
        POLICY, strided=given.get("strided", True), max_rounds=given.get("max_rounds", 4)
    )
    rounds = [taken(100_000, 10.0, 0)] * given.get("rounds", 1)
    since, waited_ms, left_ms = (
        given.get(k, v) for k, v in (("since", 0), ("waited_ms", 0.0), ("left_ms", 5000.0))
    )
    assert policy.waits(rounds, since, waited_ms, left_ms) == waits, what


def test_what_is_hopeless_says_what_it_would_need() -> None:
    found = POLICY.hopeless([taken(1_000_000, 1000.0, 0), taken(500_000, 500.0, 1)], 5)
    assert found is not None
    # Six blocks of 500,000 bytes: five that went by in the round, and one more.
    assert (found.bytes, found.pause_ms, found.horizon_ms) == (3_000_000, 3000.0, 400.0)
    assert found.gbps == pytest.approx(0.008)
    assert found.needed_gbps == pytest.approx(0.06)
    assert str(found) == (
        "3000000 bytes would be left, a pause of 3000 ms at 0.008 Gb/s; the horizon is 400 ms, "
        "and it would fit at 0.06 Gb/s"
    )


def test_never_more_than_the_whole_state_is_left() -> None:
    policy = msgspec.structs.replace(POLICY, state_bytes=40_000, horizon_ms=500.0)
    rounds = [taken(40_000, 400.0, 0), taken(40_000, 400.0, 1)]
    assert not policy.another(rounds, 4)
    assert policy.hopeless(rounds, 4) is None
    assert msgspec.structs.replace(policy, horizon_ms=399.0).hopeless(rounds, 4) is not None


def test_reading_alone_can_take_the_horizon() -> None:
    slow = Taken(leaves=1, bytes=5_000, ms=900.0, wire_ms=50.0, blocks=9)
    found = POLICY.hopeless([taken(100_000, 1000.0, 0), slow])
    assert found is not None
    assert found.needed_gbps is None
    assert "reading it alone" in str(found)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6), st.integers(0, 99)), min_size=1, max_size=9
    ),
    st.integers(0, 1000),
)
def test_rounds_are_bounded_and_each_one_is_worth_it(
    rounds: list[tuple[int, float, int]], since: int
) -> None:
    history = [taken(*one) for one in rounds]
    POLICY.hopeless(history, since)
    if not POLICY.another(history, since):
        return
    assert len(history) < POLICY.max_rounds
    assert history[-1].bytes > POLICY.small_bytes
    assert len(history) == 1 or since > 0


def test_a_lie_about_the_time_ends_the_rounds() -> None:
    for lie in (float("nan"), float("-inf"), -1.0):
        assert not POLICY.another([taken(10_000, 900.0), taken(5_000, lie)])


@given(
    st.floats(0.01, 1),
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 0.5)), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_work_has_its_share_of_the_time_and_no_more(
    share: float, work: list[tuple[float, float]], width: int
) -> None:
    """Whoever waits as long as is said: before each beginning, the busy time is within the share."""
    duty, now, busy, began = Duty(share), 5.0, 0.0, None
    for took, late in work:
        while (delay := duty.delay(now)) > 1e-9:
            now += delay
        began = now if began is None else began
        assert busy <= share * (now - began) + 1e-6 * (1 + busy)
        for _ in range(width):
            duty.begin(now)
        now += took
        for _ in range(width):
            duty.end(now)
        busy += took
        now += late
    assert duty.delay(now + 1000 * (1 + busy)) == 0.0


def test_the_whole_share_never_waits() -> None:
    duty = Duty(1.0)
    duty.begin(1.0)
    assert duty.delay(9.0) == 0.0
    duty.end(9.0)
    assert duty.delay(9.0) == 0.0


def test_nothing_more_begins_while_some_of_it_has_had_its_share() -> None:
    duty = Duty(0.25)
    assert duty.delay(0.0) == 0.0
    duty.begin(0.0)
    assert duty.delay(0.0) == 0.0
    assert duty.delay(1.0) == 3.0
    duty.end(2.0)
    assert duty.delay(2.0) == 6.0
    assert duty.delay(8.0) == 0.0
