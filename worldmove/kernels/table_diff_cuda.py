"""The difference of two leaf tables in device memory: as `table_diff.py`, without waiting for the host."""

from __future__ import annotations

from typing import NamedTuple

import cupy
import numpy as np

from worldmove.kernels.device import load
from worldmove.kernels.leaf_digest import DIGEST_BYTES
from worldmove.kernels.table_diff import DIFF_THREADS


class Difference(NamedTuple):
    """What a comparison found, on the device; ready when the stream has come so far.

    Attributes:
        leaves: int64 with room for every leaf; the first `count` are the differing ones, ascending.
        count: int64[1].
    """

    leaves: cupy.ndarray
    count: cupy.ndarray


class TableDiff:
    """The kernels with working memory for tables up to a size, loaded on the current device.

    Two comparisons with one object must be ordered (one stream, or events): they share the working memory.

    Args:
        room: largest number of leaves.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses the source.
    """

    def __init__(self, room: int) -> None:
        kernels = load("table_diff")
        self._mark, self._list = kernels["table_diff_mark"], kernels["table_diff_list"]
        self._room = room
        blocks = -(-max(room, 1) // DIFF_THREADS)
        self._marks = cupy.empty(blocks * (DIFF_THREADS // 32), dtype=cupy.uint32)
        self._counts = cupy.empty(blocks, dtype=cupy.uint32)

    def difference(self) -> Difference:
        """Room for a result."""
        return Difference(cupy.empty(max(self._room, 1), dtype=cupy.int64), cupy.zeros(1, dtype=cupy.int64))

    def compare(
        self,
        *,
        mine: int,
        theirs: int,
        known_mine: int,
        known_theirs: int,
        leaves: int,
        out: Difference,
        base: int = 0,
    ) -> None:
        """Lists the leaves that the tables don't prove equal: two launches on the current stream.

        Args:
            mine: address of uint8[leaves, 16], a multiple of 16.
            theirs: likewise.
            known_mine: address of one byte a leaf; 0: the row means nothing.
            known_theirs: likewise for `theirs`; may be the same.
            leaves: how many.
            out: of `difference`.
            base: added to every index.

        Raises:
            ValueError: more leaves than there is room for.
        """
        if leaves > self._room:
            raise ValueError(f"{leaves} leaves; there is room for {self._room}")
        if not leaves:
            out.count.fill(0)
            return
        grid, block = (-(-leaves // DIFF_THREADS),), (DIFF_THREADS,)
        pointers = [np.uint64(address) for address in (mine, theirs, known_mine, known_theirs)]
        self._mark(grid, block, (*pointers, np.uint64(leaves), self._marks, self._counts))
        sizes = (np.uint64(leaves), np.uint64(base))
        self._list(grid, block, (self._marks, self._counts, *sizes, out.leaves, out.count))

    def warm_up(self) -> None:
        """Launches both kernels once on a little memory and waits."""
        table, known = cupy.zeros((1, DIGEST_BYTES), dtype=cupy.uint8), cupy.zeros(1, dtype=cupy.uint8)
        self.compare(
            mine=table.data.ptr,
            theirs=table.data.ptr,
            known_mine=known.data.ptr,
            known_theirs=known.data.ptr,
            leaves=min(1, self._room),
            out=self.difference(),
        )
        cupy.cuda.get_current_stream().synchronize()
