"""Cutting jobs into parts: small enough that a pausing move never waits long, large enough to be cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from worldmove.executor.messages import CopyPiece, Piece
from worldmove.manifest import DIGEST_BYTES

MAX_PART_BYTES = 32 * 1024 * 1024
MIN_PART_BYTES = 4 * 1024 * 1024
MAX_PART_PIECES = 1500
"""Keeps a request within one packet."""
MAX_LAND_PIECES = MAX_PART_PIECES // 2


def part_size(
    nbytes: int,
    processes: int,
    smallest: int = MIN_PART_BYTES,
    largest: int = MAX_PART_BYTES,
    alone: int = 1,
) -> int:
    """Bytes of a part for a job of `nbytes`, so that all of `processes` have work, and end together.

    `alone` says in how many a single process gets it. It ends together with itself, and on the host every
    request wakes two processes beside a transfer that needs the cores.
    """
    shares = 2 * processes if processes > 1 else alone
    return min(largest, max(smallest, -(-nbytes // shares)))


def split_digest(pieces: Iterable[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    """Cuts at leaves into parts of at most `part_bytes` bytes (or one leaf, where that is larger)."""
    part: list[Piece] = []
    room = part_bytes
    for whole in pieces:
        piece = whole
        while piece.length:
            take = min(piece.length, room // piece.leaf_bytes * piece.leaf_bytes)
            if take == 0 and not part:
                take = min(piece.length, piece.leaf_bytes)
            if take:
                part.append(piece._replace(length=take))
                room -= take
                piece = piece._replace(
                    offset=piece.offset + take,
                    length=piece.length - take,
                    first_leaf=piece.first_leaf + take // piece.leaf_bytes,
                )
            if piece.length or room <= 0 or len(part) == MAX_PART_PIECES:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def split_copy(pieces: Iterable[CopyPiece], part_bytes: int) -> Iterator[list[CopyPiece]]:
    """Cuts into parts of at most `part_bytes`; a piece that overlaps itself stays whole."""
    part: list[CopyPiece] = []
    room = part_bytes
    for whole in pieces:
        piece = whole
        while piece.length:
            take = piece.length if _overlaps(piece) else min(piece.length, room)
            part.append(piece._replace(length=take))
            room -= take
            piece = piece._replace(
                source_offset=piece.source_offset + take,
                offset=piece.offset + take,
                length=piece.length - take,
            )
            if room <= 0 or len(part) == MAX_PART_PIECES:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def split_land(
    copies: Iterable[CopyPiece], reads: Iterable[Piece], part_bytes: int
) -> Iterator[list[tuple[CopyPiece, Piece]]]:
    """Cuts copies, each with the piece that it writes, at leaves as `split_digest` does."""
    part: list[tuple[CopyPiece, Piece]] = []
    room = part_bytes
    for whole, written in zip(copies, reads, strict=True):
        copy, read = whole, written
        while read.length:
            take = min(read.length, room // read.leaf_bytes * read.leaf_bytes)
            if take == 0 and not part:
                take = min(read.length, read.leaf_bytes)
            if take:
                part.append((copy._replace(length=take), read._replace(length=take)))
                room -= take
                copy, read = _behind(copy, read, take)
            if read.length or room <= 0 or len(part) == MAX_LAND_PIECES:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def _behind(copy: CopyPiece, read: Piece, taken: int) -> tuple[CopyPiece, Piece]:
    """What is left of both without their first `taken` bytes, which are whole leaves or all."""
    left = copy.length - taken
    return (
        copy._replace(source_offset=copy.source_offset + taken, offset=copy.offset + taken, length=left),
        read._replace(
            offset=read.offset + taken, length=left, first_leaf=read.first_leaf + taken // read.leaf_bytes
        ),
    )


def split_fill(ranges: Iterable[tuple[int, int]], part_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Cuts (offset, length) ranges into parts of at most `part_bytes` bytes."""
    part: list[tuple[int, int]] = []
    room = part_bytes
    for offset, length in ranges:
        start, end = offset, offset + length
        while start < end:
            take = min(end - start, room)
            part.append((start, take))
            start += take
            room -= take
            if room <= 0 or len(part) == MAX_PART_PIECES:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def split_ranges(ranges: Iterable[tuple[int, int]], part_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Groups ranges of a leaf table; one range is never cut, since it has one digest."""
    part: list[tuple[int, int]] = []
    room = part_bytes
    for first, count in ranges:
        part.append((first, count))
        room -= count * DIGEST_BYTES
        if room <= 0 or len(part) == MAX_PART_PIECES:
            yield part
            part, room = [], part_bytes
    if part:
        yield part


def _overlaps(piece: CopyPiece) -> bool:
    return piece.key == piece.source_key and abs(piece.offset - piece.source_offset) < piece.length
