"""Cutting jobs into parts, and the order in which parts are handed out. No process is involved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.errors import ProcessLostError
from worldmove.executor.jobs import Board, Job, Part
from worldmove.executor.messages import CopyPiece, Digest, Done, Piece, Request
from worldmove.executor.parts import (
    MAX_PART_BYTES,
    MAX_PART_PIECES,
    MIN_PART_BYTES,
    part_size,
    split_copy,
    split_digest,
    split_land,
    split_ranges,
)

pieces_strategy = st.lists(
    st.builds(
        lambda key, leaf, leaves, short, first: Piece(
            key, 512 * key, max(leaf * leaves - short, 0), leaf, first
        ),
        st.integers(1, 3),
        st.sampled_from([64, 256, 1000]),
        st.integers(0, 40),
        st.integers(0, 63),
        st.integers(0, 1000),
    ),
    max_size=8,
)


def leaves_of(pieces: Sequence[Piece]) -> list[tuple[int, int, int, int]]:
    """(key, offset, length, index) of every leaf."""
    return [
        (
            piece.key,
            piece.offset + number * piece.leaf_bytes,
            min(piece.leaf_bytes, piece.length - number * piece.leaf_bytes),
            piece.first_leaf + number,
        )
        for piece in pieces
        for number in range(piece.leaves)
    ]


@given(pieces_strategy, st.integers(1, 5000))
def test_what_lands_is_cut_as_what_is_read_of_it(pieces: list[Piece], part_bytes: int) -> None:
    copies = [
        CopyPiece(9, 7 * number, piece.key, piece.offset, piece.length) for number, piece in enumerate(pieces)
    ]
    parts = list(split_land(copies, pieces, part_bytes))
    assert [[read for _, read in part] for part in parts] == list(split_digest(pieces, part_bytes))
    shifts = {piece.key: set[int]() for piece in pieces}
    for copy, read in (pair for part in parts for pair in part):
        assert (copy.key, copy.offset, copy.length) == (read.key, read.offset, read.length)
        shifts[read.key].add(copy.offset - copy.source_offset)
    for number, piece in enumerate(pieces):
        assert not piece.length or piece.offset - 7 * number in shifts[piece.key]


@given(pieces_strategy, st.integers(1, 5000))
def test_no_leaf_is_cut_lost_or_done_twice(pieces: list[Piece], part_bytes: int) -> None:
    parts = list(split_digest(pieces, part_bytes))
    assert all(parts)
    assert leaves_of([piece for part in parts for piece in part]) == leaves_of(pieces)
    for part in parts:
        nbytes = sum(piece.length for piece in part)
        assert nbytes <= part_bytes or (len(part) == 1 and part[0].leaves == 1)


def bytes_copied(pieces: Sequence[CopyPiece]) -> list[tuple[int, int, int, int]]:
    return [(p.source_key, p.source_offset + i, p.key, p.offset + i) for p in pieces for i in range(p.length)]


copies = st.lists(
    st.builds(
        CopyPiece,
        st.integers(1, 2),
        st.integers(0, 100),
        st.integers(1, 2),
        st.integers(0, 100),
        st.integers(0, 90),
    ),
    max_size=6,
)


@given(copies, st.integers(1, 200))
def test_copies_are_cut_unless_they_overlap(pieces: list[CopyPiece], part_bytes: int) -> None:
    parts = list(split_copy(pieces, part_bytes))
    assert all(parts)
    assert bytes_copied([piece for part in parts for piece in part]) == bytes_copied(pieces)
    for piece in pieces:
        if piece.key == piece.source_key and 0 <= abs(piece.offset - piece.source_offset) < piece.length:
            assert any(piece in part for part in parts)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=9), st.integers(1, 900))
def test_ranges_are_grouped_in_order(ranges: list[tuple[int, int]], part_bytes: int) -> None:
    parts = list(split_ranges(ranges, part_bytes))
    assert [one for part in parts for one in part] == ranges
    assert all(parts)


def test_a_request_never_names_too_many_pieces() -> None:
    pieces = [Piece(1, 64 * i, 64, 64, i) for i in range(4000)]
    assert [len(part) for part in split_digest(pieces, 1 << 30)] == [1500, 1500, 1000]
    assert [len(part) for part in split_copy([CopyPiece(1, i, 2, i, 1) for i in range(3000)], 1 << 30)] == [
        MAX_PART_PIECES
    ] * 2
    assert [len(part) for part in split_ranges([(0, 0)] * 1501, 1 << 30)] == [1500, 1]


@pytest.mark.parametrize(
    ("nbytes", "processes", "size"),
    [
        (0, 1, MIN_PART_BYTES),
        (10 << 20, 2, MIN_PART_BYTES),
        (40 << 20, 2, 10 << 20),
        (1 << 30, 1, MAX_PART_BYTES),
        (16 << 20, 1, 16 << 20),
    ],
)
def test_small_jobs_are_shared_out(nbytes: int, processes: int, size: int) -> None:
    assert part_size(nbytes, processes) == size


def test_a_device_gets_its_next_part_while_it_does_one() -> None:
    assert part_size(16 << 20, 1, alone=2) == 8 << 20


def part(*keys: int) -> Part:
    def make(call: int) -> Request:
        return Digest(call, 0, 0, ())

    return Part(make, frozenset(keys), 1)


def job(*parts: Part, urgent: bool = False) -> Job:
    return Job(parts, urgent=urgent, on_part=None)


async def test_urgent_parts_go_first_and_others_in_order() -> None:
    board = Board()
    slow, quick = job(part(1), part(1)), job(part(2), urgent=True)
    board.add(slow)
    board.add(quick)
    assert [board.take() for _ in range(4)] == [quick.parts[0], *slow.parts, None]


async def test_a_job_ends_with_its_last_part() -> None:
    board = Board()
    both = job(part(1), part(1, 2))
    board.add(both)
    first, second = board.take(), board.take()
    assert first is not None
    assert second is not None
    board.finish(second, Done(2))
    assert not board.touches(2)
    assert board.touches(1)
    assert not both.ended.done()
    board.finish(first, Done(1, (b"x",)))
    await both.ended
    assert first.done == Done(1, (b"x",))
    assert not board.touches(1)


async def test_a_dropped_job_is_quiet_when_its_running_parts_are() -> None:
    board = Board()
    three = job(part(1), part(1), part(2))
    board.add(three)
    running = board.take()
    assert running is not None
    board.drop(three)
    assert board.take() is None
    await board.quiet(2)
    waiting = [asyncio.ensure_future(board.quiet(1)) for _ in range(3)]
    idle = asyncio.ensure_future(board.idle())
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert not any(future.done() for future in [*waiting[1:], idle])
    board.finish(running, Done(1))
    await asyncio.gather(*waiting[1:], idle)
    assert not three.ended.done()


async def test_the_first_error_fails_the_job_and_drops_the_rest() -> None:
    board = Board()
    bad, good = job(part(1), part(1), part(1)), job(part(1))
    board.add(bad)
    board.add(good)
    first, second = board.take(), board.take()
    assert first is not None
    assert second is not None
    board.finish(first, ProcessLostError("gone"))
    with pytest.raises(ProcessLostError):
        await bad.ended
    assert board.take() is good.parts[0]
    board.finish(second, ProcessLostError("gone too"))
    board.finish(good.parts[0], Done(3))
    await good.ended
    await board.idle()


async def test_all_that_waits_can_be_failed() -> None:
    board = Board()
    jobs = [job(part(1)), job(part(2), urgent=True)]
    for each in jobs:
        board.add(each)
    board.drop_all(ProcessLostError("none left"))
    for each in jobs:
        with pytest.raises(ProcessLostError):
            await each.ended
    assert board.take() is None
    await board.idle()
