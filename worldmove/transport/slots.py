"""How the bytes of pulls lie in the slots of a ring, where a lane can't reach the regions themselves.

A slot holds whole messages one after the other, each at a multiple of `ALIGN`: a lane sends them from
there, or lands them there, as they are. Bringing them from or to their regions is somebody else's work;
`Load.rows` says what belongs where.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.errors import FramingError
from worldmove.transport.framing import CHUNK, Chunk
from worldmove.transport.table import Sizes

ALIGN = 512
ROW = np.dtype([("region", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("place", "<u8")])
"""Bytes of a region, and where in the slot they lie."""

Rows = npt.NDArray[np.void]


class RingShape(NamedTuple):
    """Slots of a ring, and the bytes of each."""

    slots: int
    slot_bytes: int


class Load(NamedTuple):
    """What one slot holds: the place and length of each message, and the rows of all together."""

    messages: list[tuple[int, int]]
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(nbytes for _, nbytes in self.messages)


def loads(chunks: Iterable[Chunk], slot_bytes: int) -> Iterator[Load]:
    """Distributes messages to slots, in order; a message is never cut.

    Args:
        chunks: as `framing.plan` returns them.
        slot_bytes: of every slot; at least `framing.CHUNK`.
    """
    messages: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    end = 0
    for chunk in chunks:
        place = -(-end // ALIGN) * ALIGN
        if messages and place + chunk.nbytes > slot_bytes:
            yield _load(messages, rows)
            messages, rows, place = [], [], 0
        messages.append((place, chunk.nbytes))
        end = place
        for piece in chunk.pieces:
            _append(rows, [piece.region, piece.offset, piece.length, end])
            end += piece.length
    if messages:
        yield _load(messages, rows)


def _append(rows: list[list[int]], row: list[int]) -> None:
    """Adds a row, or makes the last one longer where it goes on at both ends."""
    if rows:
        region, offset, length, place = rows[-1]
        if row[0] == region and row[1] == offset + length and row[3] == place + length:
            rows[-1][2] += row[2]
            return
    rows.append(row)


def _load(messages: list[tuple[int, int]], rows: list[list[int]]) -> Load:
    return Load(messages, np.array([tuple(row) for row in rows], dtype=ROW))


def unpack_rows(body: bytes) -> Rows:
    """Rows as they came in a message. Raises `FramingError` if they are no whole ones."""
    if len(body) % ROW.itemsize:
        raise FramingError(f"{len(body)} bytes hold no whole rows")
    return np.frombuffer(body, dtype=ROW)


class SlotTable(Sizes):
    """A lease whose regions lie where this process can't reach: it sees their sizes, and a ring.

    Args:
        ring: the memory; owned by the table and unmapped by `close`.
        shape: of the ring.
        sizes: bytes of each region, in manifest order.

    Raises:
        FramingError: the slots are too small for a message, or don't lie in the ring.
    """

    def __init__(self, ring: mmap.mmap, shape: RingShape, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        if shape.slots < 1 or shape.slot_bytes < CHUNK or shape.slots * shape.slot_bytes > len(ring):
            raise FramingError(
                f"a ring of {len(ring)} bytes has no {shape.slots} slots of {shape.slot_bytes}"
            )
        self.shape = shape
        self._ring = ring
        self._view = memoryview(ring)

    def message(self, slot: int, place: int, nbytes: int) -> memoryview:
        """The memory of a message in a slot; whoever keeps it keeps the ring from being unmapped.

        Raises:
            FramingError: there is no such slot, or the message leaves it.
        """
        if not 0 <= slot < self.shape.slots or not 0 <= place <= place + nbytes <= self.shape.slot_bytes:
            raise FramingError(f"the ring has no {nbytes} bytes at {place} of slot {slot}")
        start = slot * self.shape.slot_bytes + place
        return self._view[start : start + nbytes]

    def close(self) -> None:
        """Unmaps the ring; nothing may be in flight."""
        self._view.release()
        self._ring.close()
