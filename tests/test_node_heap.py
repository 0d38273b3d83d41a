"""What a node sets aside from Python's garbage collector, and when it takes that back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from worldmove.node.heap import STEP, Heap


@pytest.fixture
def heap() -> Iterator[Heap]:
    gc.unfreeze()
    yield Heap()
    gc.unfreeze()
    assert gc.isenabled()


def test_sessions_are_set_aside_as_they_become_more(heap: Heap) -> None:
    heap.holds(STEP - 1, moving=False)
    assert gc.get_freeze_count() == 0
    heap.holds(STEP, moving=False)
    first = gc.get_freeze_count()
    assert first > 0
    more = [[number] for number in range(1000)]
    heap.holds(2 * STEP - 1, moving=False)
    assert gc.get_freeze_count() <= first
    heap.holds(2 * STEP, moving=False)
    assert gc.get_freeze_count() >= first + len(more) - 100


def test_nothing_is_set_aside_while_sessions_move(heap: Heap) -> None:
    heap.holds(10 * STEP, moving=True)
    assert gc.get_freeze_count() == 0
    heap.holds(10 * STEP, moving=False)
    assert gc.get_freeze_count() > 0


def test_few_sessions_are_searched_again(heap: Heap) -> None:
    heap.holds(4 * STEP, moving=False)
    heap.holds(2 * STEP, moving=False)
    assert gc.get_freeze_count() > 0
    heap.holds(2 * STEP - 1, moving=True)
    assert gc.get_freeze_count() == 0
    heap.holds(2 * STEP - 1, moving=False)
    assert gc.get_freeze_count() > 0


def test_what_is_built_at_once_is_not_searched_meanwhile(heap: Heap) -> None:
    with heap.building():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
