"""How the bytes of pulls lie in the slots of a *direct* lane's ring: packed, without gaps, slot after slot.

Both sides come to the same loads, so nothing about them is sent. Without gaps, since what lies in one would
be bytes of another session.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from worldmove.transport.framing import Spans
from worldmove.transport.slots import ROW, Load

SLOT_BYTES = 256 << 20
"""A slot, and the longest message: chosen by measurement, see docs/benchmarks/direct.md."""
AT_ONCE = 2
"""Messages on their way at once: NVLink is full with two, and the other slots are being filled or emptied."""


def pack(spans: Spans, slot_bytes: int = SLOT_BYTES) -> Iterator[Load]:
    """Cuts a pull into loads of one message each; all but the last fill their slot.

    Args:
        spans: of one pull, checked.
        slot_bytes: of every slot.
    """
    rows: list[tuple[int, int, int, int]] = []
    end = 0
    for region, offset, length in spans.tolist():
        start, rest = offset, length
        while rest:
            size = min(rest, slot_bytes - end)
            rows.append((region, start, size, end))
            start, rest, end = start + size, rest - size, end + size
            if end == slot_bytes:
                yield Load([(0, end)], np.array(rows, dtype=ROW))
                rows, end = [], 0
    if rows:
        yield Load([(0, end)], np.array(rows, dtype=ROW))
