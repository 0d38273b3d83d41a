"""Jobs as parts: the requests that do the work, cut by size, with the memory that each of them touches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from worldmove.errors import ValidationError
from worldmove.executor.jobs import Part
from worldmove.executor.messages import (
    Armed,
    Copy,
    CopyPiece,
    Digest,
    Fill,
    Hash,
    Land,
    Order,
    Piece,
    Room,
    Shift,
    Stop,
)
from worldmove.executor.parts import split_copy, split_digest, split_fill, split_land, split_ranges
from worldmove.manifest import DIGEST_BYTES


def digest_parts(table: int, seed: int, pieces: Sequence[Piece], size: int) -> list[Part]:
    """Digests of pieces into a table, in parts of `size` bytes."""
    return [
        Part(
            partial(Digest, table=table, seed=seed, pieces=tuple(part)),
            frozenset({table, *(piece.key for piece in part)}),
            sum(piece.length for piece in part),
            part,
        )
        for part in split_digest(pieces, size)
    ]


def check_rows(pieces: Sequence[Piece], room: int) -> None:
    """Raises ValidationError unless all leaves have rows in a table of `room` bytes."""
    for piece in pieces:
        if piece.leaf_bytes <= 0 or piece.first_leaf < 0:
            raise ValidationError(f"{piece} has an impossible leaf", field="pieces")
        if (piece.first_leaf + piece.leaves) * DIGEST_BYTES > room:
            raise ValidationError(f"{piece} lies outside a table of {room} bytes", field="pieces")


def copy_parts(pieces: Sequence[CopyPiece], size: int) -> list[Part]:
    """Copies, in parts of `size` bytes."""
    return [
        Part(
            partial(Copy, pieces=tuple(part)),
            frozenset(key for piece in part for key in (piece.key, piece.source_key)),
            sum(piece.length for piece in part),
        )
        for part in split_copy(pieces, size)
    ]


def move_parts(pieces: Sequence[CopyPiece], size: int, order: Order) -> list[Part]:
    """Copies; where they depend on their order one part, which one executor does, else of `size` bytes."""
    if not order or not pieces:
        return copy_parts(pieces, size)
    scratch = order if isinstance(order, Room) else None
    keys = {key for piece in pieces for key in (piece.key, piece.source_key)}
    keys |= {scratch.key} if scratch is not None else set()
    request = partial(Shift, pieces=tuple(pieces), scratch=scratch)
    return [Part(request, frozenset(keys), sum(piece.length for piece in pieces))]


def land_parts(
    table: int, seed: int, copies: Sequence[CopyPiece], reads: Sequence[Piece], size: int
) -> list[Part]:
    """Copies with what is read back of each, one for one, in parts of `size` bytes."""
    parts = []
    for some in split_land(copies, reads, size):
        moved, read = (tuple(each) for each in zip(*some, strict=True))
        keys = {table, *(piece.key for piece in moved), *(piece.source_key for piece in moved)}
        request = partial(Land, pieces=moved, table=table, seed=seed, read=read)
        parts.append(Part(request, frozenset(keys), sum(piece.length for piece in moved), list(read)))
    return parts


def armed_parts(parts: Sequence[Part], stop: Stop) -> list[Part]:
    """Digests or landings that begin where a world stands, each with the very pieces that it had."""

    def armed(part: Part, call: int) -> Armed:
        return Armed(call, stop, part.make(call))  # type: ignore[arg-type]  # the executor checks it

    return [Part(partial(armed, part), part.keys | {stop.key}, part.nbytes, part.pieces) for part in parts]


def fill_parts(key: int, byte: int, ranges: Sequence[tuple[int, int]], size: int) -> list[Part]:
    """Fills of ranges, in parts of `size` bytes."""
    return [
        Part(
            partial(Fill, key=key, byte=byte, ranges=tuple(some)),
            frozenset({key}),
            sum(length for _, length in some),
        )
        for some in split_fill(ranges, size)
    ]


def hash_parts(table: int, ranges: Sequence[tuple[int, int]], size: int) -> list[Part]:
    """Hashes of ranges of a table, in parts of `size` bytes of it."""
    return [
        Part(
            partial(Hash, table=table, ranges=tuple(group)),
            frozenset({table}),
            sum(count for _, count in group) * DIGEST_BYTES,
        )
        for group in split_ranges(ranges, size)
    ]
