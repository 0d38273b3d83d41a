"""Small pure parts of a move: batches of spans, and the policy of live rounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.delta import batches
from worldmove.gate import MIN_BATCH
from worldmove.manifest import MAX_LEAF, LeafMap, Region, Span
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


@given(sessions(), st.data(), st.integers(1, 3 * 1024 * KIB))
def test_batches_cover_exactly_what_was_asked(leaf_map: LeafMap, data: st.DataObject, limit: int) -> None:
    count = leaf_map.count
    wanted = data.draw(st.lists(st.integers(0, max(count - 1, 0)), unique=True, max_size=60))
    leaves = np.array(sorted(wanted) if count else [], dtype=np.int64)
    spans = leaf_map.runs(leaves)
    cut = list(batches(iter(spans), leaf_map, limit))
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
    (batch,) = batches(leaf_map.spans(0, 4000), leaf_map, 16 * KIB * KIB)
    assert len(batch) == 4000


def test_the_size_of_each_batch_may_be_another() -> None:
    leaf_map = LeafMap((Region("k", "uint8", (1024 * KIB,)),))
    wanted = iter((64 * KIB, 128 * KIB, 512 * KIB, 1024 * KIB))
    cut = list(batches(leaf_map.spans(0, leaf_map.count), leaf_map, lambda: next(wanted)))
    assert [sum(span.length for span in batch) // KIB for batch in cut] == [64, 128, 512, 320]


def test_nothing_makes_no_batch() -> None:
    assert list(batches([], LeafMap(()), 5)) == []
    empty = LeafMap((Region("zero", "uint8", (0,)),))
    assert list(batches(empty.spans(0, 0), empty, 5)) == []


def test_a_gates_smallest_batch_holds_every_leaf() -> None:
    assert MIN_BATCH >= MAX_LEAF


def taken(nbytes: int, ms: float) -> Taken:
    return Taken(leaves=nbytes // 100, bytes=nbytes, ms=ms)


POLICY = RoundPolicy(max_rounds=4, shrink=0.8, small_bytes=1000, pause_share=0.25, horizon_ms=400.0)
HISTORIES: list[tuple[str, list[tuple[int, float]], bool]] = [
    ("a first round that brought much is followed by another", [(10_000, 900.0)], True),
    ("however fast it was", [(10_000, 1.0)], True),
    ("a small remainder is paused for", [(1_000, 900.0)], False),
    ("one byte more is not", [(1_001, 900.0)], True),
    ("nothing at all is", [(0, 0.0)], False),
    ("shrinking and slow: another", [(10_000, 900.0), (7_999, 101.0)], True),
    ("no longer shrinking", [(10_000, 900.0), (8_000, 101.0)], False),
    ("growing", [(10_000, 900.0), (12_000, 101.0)], False),
    ("shrinking, and fits into its share of the horizon", [(10_000, 900.0), (5_000, 100.0)], False),
    ("small at last", [(10_000, 900.0), (5_000, 300.0), (900, 200.0)], False),
    ("the round before counts, not the first", [(90_000, 900.0), (5_000, 300.0), (4_500, 200.0)], False),
    ("enough rounds", [(9_000, 900.0), (6_000, 500.0), (4_000, 400.0), (2_000, 300.0)], False),
]  # fmt: skip


@pytest.mark.parametrize(("what", "rounds", "more"), HISTORIES, ids=[what for what, *_ in HISTORIES])
def test_when_live_rounds_end(what: str, rounds: list[tuple[int, float]], more: bool) -> None:
    assert POLICY.another([taken(*one) for one in rounds]) == more, what


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6)), min_size=1, max_size=12))
def test_rounds_are_bounded_and_each_one_is_worth_it(rounds: list[tuple[int, float]]) -> None:
    history = [taken(*one) for one in rounds]
    if not POLICY.another(history):
        return
    assert len(history) < POLICY.max_rounds
    assert history[-1].bytes > POLICY.small_bytes
    if len(history) > 1:
        assert history[-1].bytes < POLICY.shrink * history[-2].bytes


def test_a_lie_about_the_time_ends_the_rounds() -> None:
    for lie in (float("nan"), float("-inf"), -1.0):
        assert not POLICY.another([taken(10_000, 900.0), taken(5_000, lie)])
