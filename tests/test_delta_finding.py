"""What the search for a content finds: everything that may be taken, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from delta_kit import region
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmove.delta.choosing import Chooser
from worldmove.delta.columns import edges_of, every
from worldmove.delta.finding import FEW
from worldmove.delta.geometry import Flags, Geometry
from worldmove.delta.matching import Matcher
from worldmove.digest import LeafTable, Rows
from worldmove.manifest import LeafMap


@contextlib.contextmanager
def tables(*columns: Rows) -> Iterator[list[LeafTable]]:
    """One with each of these rows, all of them known; closed afterwards."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(LeafTable(len(rows)))) for rows in columns]
        for each, rows in zip(made, columns, strict=True):
            each.rows[:] = rows
            each.learn(0, each.count)
        yield made


def digests(rng: np.random.Generator, count: int) -> Rows:
    """Random ones, all different."""
    return rng.integers(0, 1 << 64, (count, 2), dtype=np.uint64)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Regions of several lengths of leaves, on several devices, with and without a stride."""
    shapes = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 5, 30, 200]),
                st.sampled_from([0, 0, 100]),
                st.sampled_from([8, 8, 16]),
                st.sampled_from([0, 1, 3]),
                st.sampled_from(["host", "host", "gpu", None]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    regions = tuple(
        region(f"r{number}", leaves, tail=tail, leaf_kib=kib)
        for number, (leaves, tail, kib, _, _) in enumerate(shapes)
    )
    return Geometry(LeafMap(regions), [step for *_, step, _ in shapes], [device for *_, device in shapes])


@settings(max_examples=200, deadline=None)
@given(geometries(), st.integers(0, 2**32 - 1), st.sampled_from([2, 20, 2000]), st.sampled_from([0.0, 0.3]))
def test_a_leaf_is_sent_only_if_its_content_lies_nowhere_where_it_may_be_taken(
    geometry: Geometry, seed: int, variety: int, unknown: float
) -> None:
    rng = np.random.default_rng(seed)
    kinds, count = digests(rng, variety), geometry.count
    old = kinds[rng.integers(variety, size=count)]
    shifted = np.minimum(np.arange(count) + geometry.step * int(rng.integers(1, 4)), count - 1)
    new = np.where(rng.random((count, 1)) < 0.5, old[shifted], kinds[rng.integers(variety, size=count)])
    settled = rng.random(count) < unknown
    with tables(old, new) as (own, theirs):
        for each in (own, theirs):
            each.forget(np.flatnonzero(rng.random(count) < unknown))
        check(geometry, own, theirs, settled)


def check(geometry: Geometry, own: LeafTable, theirs: LeafTable, settled: Flags) -> None:
    """Everything is taken from where it may be taken, and only what can't be is missing."""
    matches = Matcher(geometry, own).match(theirs, settled)
    targets = every(matches.runs.target, matches.runs.leaves)
    origins = every(matches.runs.source, matches.runs.leaves)
    assert targets.tolist() == np.flatnonzero(matches.copied).tolist()
    assert np.array_equal(theirs.rows[targets], own.rows[origins])
    assert np.array_equal(geometry.group[targets], geometry.group[origins])
    free = own.known & ~settled & (geometry.group >= 0)
    assert free[origins].all()
    wanted = own.unequal(theirs) & theirs.known & ~settled
    assert np.array_equal(matches.copied | matches.missing, wanted)
    assert not (matches.copied & matches.missing).any()
    lies = {(group, *row) for group, row in zip(geometry.group[free], own.rows[free].tolist(), strict=True)}
    missing = matches.missing
    for group, row in zip(geometry.group[missing], theirs.rows[missing].tolist(), strict=True):
        assert (group, *row) not in lies


@pytest.mark.parametrize("count", [FEW // 2, 8 * FEW])
def test_of_a_permuted_world_everything_is_found(count: int) -> None:
    """Few leaves are searched for in another way than many; in both no leaf hides another one."""
    rng = np.random.default_rng(count)
    regions = (region("k", count // 2), region("v", count // 2))
    geometry = Geometry(LeafMap(regions), [0, 0], ["host", "host"])
    rows, order = digests(rng, count), rng.permutation(count)
    with tables(rows, rows[order]) as (own, theirs):
        matches = Matcher(geometry, own).match(theirs, np.zeros(count, dtype=np.bool_))
    assert not matches.missing.any()
    assert np.array_equal(every(matches.runs.source, matches.runs.leaves), order[order != np.arange(count)])


def test_a_leaf_is_never_taken_for_a_shorter_one_of_its_own_region() -> None:
    """Not even where digests say so, and there is none of its length but in another region."""
    regions = (region("k", 3, tail=100), region("v", 3))
    geometry = Geometry(LeafMap(regions), [0, 0], ["host", "host"])
    rows = digests(np.random.default_rng(0), 6)
    rows[4] = rows[2]
    new = rows.copy()
    new[0] = rows[2]
    with tables(rows, new) as (own, theirs):
        matches = Matcher(geometry, own).match(theirs, np.zeros(6, dtype=np.bool_))
    assert (matches.runs.target.tolist(), matches.runs.source.tolist()) == ([0], [4])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 90))
def test_a_table_in_parts_is_planned_region_by_region_as_the_whole_is(seed: int, part: int) -> None:
    """After a round that copied within regions only: every leaf once, and as little is sent."""
    rng = np.random.default_rng(seed)
    regions = tuple(region(f"r{number}", int(rng.integers(1, 60))) for number in range(6))
    geometry = Geometry(LeafMap(regions), [2] * 6, ["host"] * 6)
    old = digests(rng, geometry.count)
    there, inside = geometry.shifted(np.arange(geometry.count), 1)
    new = np.where(inside[:, np.newaxis], old[there], digests(rng, geometry.count))
    with tables(old, new) as (own, theirs):
        whole = Matcher(geometry, own).match(theirs, np.zeros(geometry.count, dtype=np.bool_))
        assert in_parts(geometry, own, theirs, part) == np.flatnonzero(whole.missing).tolist()


def in_parts(geometry: Geometry, own: LeafTable, theirs: LeafTable, part: int) -> list[int]:
    """What is sent if the table comes in parts of so many leaves."""
    chooser = Chooser(geometry, own, theirs)
    planned = np.zeros(geometry.count, dtype=np.bool_)
    chooser.plan(planned)
    chooser.end(copied=1, sent=0)
    chooser.begin()
    theirs.forget()
    sent: list[int] = []
    for first in range(0, geometry.count, part):
        count = min(part, geometry.count - first)
        theirs.learn(first, count)
        ready = chooser.ready(first, count)
        assert not (ready & planned).any()
        assert theirs.known[ready].all()
        planned |= ready
        sent += chooser.plan(~ready).missing.tolist()
    assert planned.all()
    return sent


def test_regions_are_whole_once_their_last_leaf_has_come() -> None:
    geometry = Geometry(LeafMap(tuple(region(f"r{n}", 4) for n in range(4))), [0] * 4, ["host"] * 4)
    known = np.zeros(16, dtype=np.bool_)
    known[2:10] = True
    assert geometry.whole_regions(known, 2, 10) == slice(4, 8)
    known[0:2] = True
    assert geometry.whole_regions(known, 0, 2) == slice(0, 4)
    known[10:11] = True
    some = geometry.whole_regions(known, 10, 11)
    assert some.start == some.stop
    known[11:16] = True
    assert geometry.whole_regions(known, 11, 16) == slice(8, 16)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(0, 2**32 - 1))
def test_rows_of_neighbours(leaves: list[bool], seed: int) -> None:
    flags = np.array(leaves, dtype=np.bool_)
    begins = np.random.default_rng(seed).random(flags.size) < 0.2
    first, count = edges_of(flags, begins)
    assert every(first, count).tolist() == np.flatnonzero(flags).tolist()
    together = first[1:] == (first + count)[:-1]
    assert begins[first[1:][together]].all()
    assert set(np.flatnonzero(flags & begins).tolist()) <= set(first.tolist())


def test_a_table_that_is_closed_is_kept_by_no_search() -> None:
    """A search outlives the move that was given up: until it is collected, the memory would stay mapped."""
    geometry = Geometry(LeafMap((region("k", 200), region("v", 200))), [1, 1], ["host", "host"])
    rows = digests(np.random.default_rng(3), geometry.count)
    before = mapped()
    with tables(rows, rows[::-1]) as (own, theirs):
        chooser = Chooser(geometry, own, theirs)
        chooser.prepare()
        assert chooser.plan(np.zeros(geometry.count, dtype=np.bool_)).targets.size
        assert mapped() == before + 2
    assert mapped() == before


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:worldmove-leaves")
