"""Plans of a round: whatever has moved, carrying one out gives the new bytes, in any allowed order."""

from __future__ import annotations

import numpy as np
import pytest
from delta_kit import KIB, SEED, Playing, World, move, region
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmove.delta.columns import every
from worldmove.delta.geometry import Geometry, steps_of
from worldmove.delta.matching import Matcher
from worldmove.delta.moving import LIMITS, Limits
from worldmove.manifest import LeafMap, Region

SMALL = Limits(scratch_bytes=16 * KIB, stage_bytes=40 * KIB, stage_moves=3, max_runs=4096)
CUTS = (LIMITS, SMALL, SMALL._replace(max_runs=0), Limits(max_runs=0))
"""As usual; small scratch and stages; and leaf by leaf, with each."""

KINDS = ("any", "shift", "permuted", "repeats", "exchange", "fresh")


def filled(rng: np.random.Generator, regions: list[Region], step: int, variety: int) -> World:
    """Random leaves, of so many kinds, one of which is all zero."""
    world = World(regions, step=step)
    kinds = rng.integers(0, 256, (variety, 16 * KIB), dtype=np.uint8)
    kinds[0] = 0
    for leaf in range(world.geometry.count):
        size = world.leaf(leaf).size
        world.leaf(leaf)[:] = kinds[rng.integers(variety)][:size]
    return world


def changed(old: World, rng: np.random.Generator, kind: str, step: int) -> World:
    """What the source has by now."""
    new = World(old.regions, step=step)
    count = old.geometry.count
    origin = {
        "any": rng.integers(0, count, count),
        "shift": np.arange(count) + step,
        "permuted": rng.permutation(count),
        "repeats": np.repeat(rng.integers(0, count, count), rng.integers(1, 5, count))[:count],
        "exchange": np.roll(np.arange(count), count // 2),
        "fresh": np.full(count, count),
    }[kind]
    for leaf in range(count):
        bytes_ = new.leaf(leaf)
        there = int(origin[leaf])
        if there < count and old.leaf(there).size == bytes_.size and rng.random() < 0.9:
            bytes_[:] = old.leaf(there)
        elif rng.random() < 0.5:
            bytes_[:] = rng.integers(0, 256, bytes_.size, dtype=np.uint8)
    return new


@st.composite
def rounds(draw: st.DrawFn) -> tuple[World, World, np.random.Generator, Limits]:
    """Old and new contents of one to three regions, dice for the order of events, and how copies are cut."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    regions = [
        region(f"r{number}", leaves, tail=tail, leaf_kib=draw(st.sampled_from([8, 8, 16])))
        for number, (leaves, tail) in enumerate(
            draw(
                st.lists(st.tuples(st.integers(1, 14), st.sampled_from([0, 0, 100])), min_size=1, max_size=3)
            )
        )
    ]
    step = draw(st.integers(1, 4))
    old = filled(rng, regions, step, draw(st.sampled_from([2, 5, 1000])))
    new = changed(old, rng, draw(st.sampled_from(KINDS)), step)
    return old, new, rng, draw(st.sampled_from(CUTS))


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_the_plan_gives_exactly_the_new_bytes_in_any_allowed_order(
    given_: tuple[World, World, np.random.Generator, Limits],
) -> None:
    old, new, rng, limits = given_
    before = [memory.copy() for memory in old.memory]
    playing = Playing(old, new, rng, limits)
    kept = np.ones(old.geometry.count, dtype=np.bool_)
    kept[playing.plan.targets] = kept[playing.plan.missing] = False
    while playing.steps:
        playing.step()
    assert old.same(new)
    assert sorted(playing.landed) == playing.plan.missing.tolist()
    for leaf in np.flatnonzero(kept).tolist():
        owner, start = int(old.geometry.owner[leaf]), int(old.geometry.offset[leaf])
        stop = start + int(old.geometry.length[leaf])
        assert np.array_equal(before[owner][start:stop], old.leaf(leaf)), "a kept leaf had to be kept"


@settings(max_examples=100, deadline=None)
@given(rounds(), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=3))
def test_whatever_ends_a_round_in_the_middle_the_next_one_is_right(
    given_: tuple[World, World, np.random.Generator, Limits], ends: list[tuple[float, float]]
) -> None:
    """Ended after some steps, in the middle of one; then a new round, from tables of what there is."""
    old, new, rng, limits = given_
    for share, inside in ends:
        playing = Playing(old, new, rng, limits)
        for _ in range(int(playing.steps * share)):
            playing.step()
        if playing.steps:
            playing.step(until=inside)
    playing = Playing(old, new, rng, limits)
    while playing.steps:
        playing.step()
    assert old.same(new)


@settings(max_examples=60, deadline=None)
@given(rounds(), st.integers(0, 2**32 - 1))
def test_what_was_asked_for_before_is_neither_taken_from_nor_written(
    given_: tuple[World, World, np.random.Generator, Limits], seed: int
) -> None:
    """Hasty leaves land whenever they like."""
    old, new, *_ = given_
    dice = np.random.default_rng(seed)
    asked = dice.random(old.geometry.count) < 0.4
    matches = Matcher(old.geometry, old.read()).match(new.read(), asked)
    assert not (asked & matches.copied).any()
    assert not asked[every(matches.runs.source, matches.runs.leaves)].any()
    assert not (asked & matches.missing).any()


def case(pattern: str) -> tuple[World, World]:
    """Sixty leaves in two regions, numbered by their content, before and after."""
    regions = [region("k", 30), region("v", 30)]
    old, new = World(regions, step=3), World(regions, step=3)
    numbers = np.arange(60)
    after = {
        "shift": np.where(numbers % 30 < 27, numbers + 3, numbers + 100),
        "sink": np.where(numbers % 30 < 6, numbers, np.where(numbers % 30 < 27, numbers + 3, numbers + 100)),
        "ring": np.where(numbers % 30 // 3 == 4, numbers + 100, numbers),
        "exchange": (numbers + 30) % 60,
        "zeros": np.where(numbers % 2, numbers, 0),
        "turned": 59 - numbers,
        "rewrite": numbers + 100,
        "same": numbers,
    }[pattern]
    for leaf in range(60):
        old.leaf(leaf)[:] = leaf
        new.leaf(leaf)[:] = after[leaf]
    return old, new


@pytest.mark.parametrize(
    ("pattern", "copied", "sent"),
    [
        *(("shift", 54, 6), ("sink", 42, 6), ("ring", 0, 6), ("exchange", 60, 0)),
        *(("zeros", 29, 0), ("turned", 60, 0), ("rewrite", 0, 60), ("same", 0, 0)),
    ],
)
def test_what_is_sent_of_each_pattern(pattern: str, copied: int, sent: int) -> None:
    old, new = case(pattern)
    playing = Playing(old, new, np.random.default_rng(0))
    assert (playing.plan.targets.size, playing.plan.missing.size) == (copied, sent)
    while playing.steps:
        playing.step()
    assert old.same(new)


@pytest.mark.parametrize("pattern", ["shift", "sink"])
def test_a_rolling_cache_is_one_directional_pass_over_each_region(pattern: str) -> None:
    playing = Playing(*case(pattern), np.random.default_rng(0))
    schedule = playing.plan.schedule
    assert schedule.count == 1
    assert len(schedule.moves(0)) == 2
    assert playing.plan.asks(0).size == 0
    assert playing.plan.asks(1).tolist() == playing.plan.missing.tolist()


def test_content_that_left_and_came_back_is_found_where_it_is() -> None:
    old, new = case("shift")
    playing = Playing(old, new, np.random.default_rng(0))
    while playing.steps:
        playing.step()
    back, _ = case("shift")
    playing = Playing(old, back, np.random.default_rng(0))
    assert playing.plan.missing.size == 6  # what had gone is nowhere
    while playing.steps:
        playing.step()
    assert old.same(back)


def test_nothing_is_copied_between_devices_or_from_where_nobody_can_copy() -> None:
    regions = [region("k", 30), region("v", 30)]
    for devices in (["gpu", "host"], [None, None], ["host", None]):
        old, new = World(regions, devices=devices), World(regions, devices=devices)
        for leaf in range(60):
            old.leaf(leaf)[:], new.leaf(leaf)[:] = leaf, (leaf + 30) % 60
        playing = Playing(old, new, np.random.default_rng(0))
        assert playing.plan.targets.size == 0
        assert playing.plan.missing.size == 60


def test_a_leaf_is_never_taken_for_one_of_another_length() -> None:
    """Not even where digests say so."""
    world = World([region("k", 2), region("v", 1, tail=100)])
    theirs = World(world.regions)
    own = world.read()
    table = theirs.read()
    own.rows[2], table.rows[0] = (7, 7), (7, 7)
    matches = Matcher(world.geometry, own).match(table, np.zeros(3, dtype=np.bool_))
    assert not matches.copied.any()
    assert matches.missing[0]


def test_unknown_leaves_are_no_source_and_unknown_targets_no_task() -> None:
    old, new = case("shift")
    own, theirs = old.read(), new.read()
    own.forget(np.array([3]))
    theirs.forget(np.array([10]))
    matches = Matcher(old.geometry, own).match(theirs, np.zeros(60, dtype=np.bool_))
    assert matches.missing[0]
    assert not matches.copied[10]
    assert not matches.missing[10]


def test_steps_come_from_strides_that_leaves_divide() -> None:
    regions = (
        Region("a", "uint8", (4 << 20,), stride_bytes=520 * KIB),
        Region("b", "uint8", (4 << 20,), stride_bytes=1001),
        Region("c", "uint8", (4 << 20,)),
    )
    assert steps_of(regions) == [4, 0, 0]
    assert Geometry(LeafMap(regions), steps_of(regions), ["host"] * 3).count == LeafMap(regions).count


# What the order is for: without it these come out wrong.


@pytest.mark.parametrize("pattern", ["shift", "sink"])
def test_leaves_that_land_before_their_old_content_was_copied_spoil_it(pattern: str) -> None:
    old, new = case(pattern)
    playing = Playing(old, new, np.random.default_rng(0))
    for leaf in playing.plan.missing.tolist():
        old.leaf(leaf)[:] = new.leaf(leaf)
    move(old, playing.plan.schedule, 0, playing.scratch, playing.rng)
    assert not old.same(new)


@pytest.mark.parametrize("pattern", ["exchange", "turned"])
def test_stages_that_are_made_backwards_spoil_it(pattern: str) -> None:
    old, new = case(pattern)
    playing = Playing(old, new, np.random.default_rng(0), SMALL)
    schedule = playing.plan.schedule
    assert schedule.count > 2
    for stage in reversed(range(schedule.count)):
        move(old, schedule, stage, playing.scratch, playing.rng)
    assert not old.same(new)


def test_the_scratch_is_as_small_as_said() -> None:
    old, new = case("exchange")
    playing = Playing(old, new, np.random.default_rng(SEED), SMALL)
    while playing.steps:
        playing.step()
    assert old.same(new)
    assert playing.scratch.memory.size == 16 * KIB
