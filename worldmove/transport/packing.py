"""How the bytes of pulls are cut into the messages of a *direct* lane, and lie in the slots of its ring.

Both sides come to the same loads, so nothing about them is sent. A slot holds one message, without gaps, as
what lies in one would be bytes of another session. Long pieces travel alone: whoever receives them can land
them where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from worldmove.transport.framing import Spans
from worldmove.transport.slots import ROW, Load

SLOT_BYTES = 256 << 20
"""The longest message; rings are multiples of it."""
ALONE = 32 << 20
"""From this length on a piece is a message of its own, about as fast as a long one through a ring."""
STRAIGHT = 8 << 20
"""From this length on a message that is one piece may be received where it belongs."""
LEAST_CHUNK = 16 << 20
MOST_DEPTH = 16
PAGE = 4096


Landing = Literal["auto", "ring", "straight"]
"""Where long messages are received: in the ring, in the session's memory, or there where it is as fast."""


class Shape(NamedTuple):
    """What the destination wants of a lease.

    Attributes:
        chunk_bytes: of a slot, and of a message at most.
        depth: messages on their way at once.
    """

    chunk_bytes: int = 128 << 20
    depth: int = 3


class Gauge(NamedTuple):
    """What was measured.

    Attributes:
        gbps: 10⁹ bit/s of the way that is taken.
        sent, received: messages of this side so far.
        shape: of all that follows.
        straight: long messages are landed where they belong.
        rates: of both ways, by name.
    """

    gbps: float
    sent: int
    received: int
    shape: Shape = Shape()
    straight: bool = False
    rates: tuple[tuple[str, float], ...] = ()


def pack(spans: Spans, chunk_bytes: int = SLOT_BYTES, alone: int = ALONE) -> Iterator[Load]:
    """Cuts a pull into loads of one message each.

    Args:
        spans: of one pull, checked.
        chunk_bytes: of every slot.
        alone: spans from this length on are cut into even loads of their own; shorter ones are packed
            together, and of these loads all but the last fill their slot.
    """
    rows: list[tuple[int, int, int, int]] = []
    end = 0
    for region, offset, length in spans.tolist():
        start, rest = offset, length
        if length >= alone:
            for size in _even(length, chunk_bytes):
                yield _load([(region, start, size, 0)], size)
                start += size
            continue
        while rest:
            size = min(rest, chunk_bytes - end)
            rows.append((region, start, size, end))
            start, rest, end = start + size, rest - size, end + size
            if end == chunk_bytes:
                yield _load(rows, end)
                rows, end = [], 0
    if rows:
        yield _load(rows, end)


def _even(length: int, chunk_bytes: int) -> Iterator[int]:
    """Sizes of about the same, whole pages but for the last."""
    each = -(-length // -(-length // chunk_bytes))
    each = min(-(-each // PAGE) * PAGE, chunk_bytes)
    while length:
        yield min(each, length)
        length -= min(each, length)


def _load(rows: list[tuple[int, int, int, int]], nbytes: int) -> Load:
    return Load([(0, nbytes)], np.array(rows, dtype=ROW))
