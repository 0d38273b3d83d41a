"""A control page as others see it who only look: executors, which begin as soon as its ranks stand."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from worldmove.errors import FramingError
from worldmove.manifest import MAX_HOST_STATE, MAX_RANKS
from worldmove.page.control import HEADER_BYTES, MAGIC, PAUSE_AT, PROGRESS, STATE, VERSION, page_bytes

_HEADER = struct.Struct("<5Q")
_WORD = 8


class StopWords(NamedTuple):
    """Where a page says that its ranks stand at a boundary, in indices of its words.

    Attributes:
        nbytes: of the page.
        pause_at: the word of that name.
        ranks: for each rank, its progress and its state.
    """

    nbytes: int
    pause_at: int
    ranks: tuple[tuple[int, int], ...]


def open_to_look(fd: int) -> int:
    """A new opening of a page, which can only be read.

    Raises:
        FramingError: the system refuses.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FramingError(f"cannot open the control page again: {error}") from error


def stop_words(fd: int) -> StopWords:
    """Those of a page, which need not be this process's own.

    Raises:
        FramingError: it is no control page of this version.
    """
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        raise FramingError(f"a control page has at least {HEADER_BYTES} bytes")
    magic, version, ranks, state, stride = _HEADER.unpack(header)
    if (magic, version) != (MAGIC, VERSION) or not 1 <= ranks <= MAX_RANKS:
        raise FramingError("the control page has another magic, version or number of ranks than expected")
    size = os.fstat(fd).st_size
    if state > MAX_HOST_STATE or size != page_bytes(ranks, state) or ranks * stride != size - HEADER_BYTES:
        raise FramingError(f"a control page of {size} bytes does not fit its header")
    bases = [(HEADER_BYTES + rank * stride) // _WORD for rank in range(ranks)]
    return StopWords(size, PAUSE_AT, tuple((base + PROGRESS, base + STATE) for base in bases))
