"""Hashes of a table's regions, taken while it still fills: who needs all of them waits for the last.

The root of a large world is made of a hash over every region's leaf digests. To begin with them once the
table is complete costs a standing world one to three milliseconds.
"""

from __future__ import annotations

import asyncio

import numpy as np

from worldmove.digest import LeafTable
from worldmove.errors import ValidationError
from worldmove.reading import Reader

GRAIN_LEAVES = 16 * 1024
"""Rows that are worth a request of their own: 256 KiB, a third of a millisecond's work."""


class RegionHashes:
    """BLAKE2b-256 of every region's leaf digests, of one filling of a table.

    Args:
        reader: whose host executors hold the table.
        table: no row may change once it was noted.
        at_once: begin as soon as rows are there; otherwise when all are asked for.
    """

    def __init__(self, reader: Reader, table: LeafTable, *, at_once: bool = True) -> None:
        self._reader = reader
        self._table = table
        self._first = reader.memory.leaf_map.first
        self._at_once = at_once and not reader.small(table)
        self._there = np.zeros(table.count, dtype=np.bool_)
        self._begun = np.zeros(self._first.size - 1, dtype=np.bool_)
        self._waiting = 0
        self._asked: list[tuple[list[int], asyncio.Future[list[bytes]]]] = []

    def note(self, first: int, count: int) -> None:
        """Rows are there; regions that are complete are hashed once there are enough of them.

        Raises:
            ValidationError: some of them were there already; nothing is noted.
        """
        rows = self._there[first : first + count]
        if rows.any():
            raise ValidationError("leaves of a table that came before", field="first")
        rows[:] = True
        self._waiting += count
        if self._waiting >= GRAIN_LEAVES and self._at_once:
            self._ask(self._complete())

    async def all(self) -> list[bytes]:
        """One for each region, in manifest order; of rows as they are, whether they were noted or not.

        Raises:
            ProcessLostError: an executor died meanwhile.
        """
        if (digests := self._reader.small_digests(self._table)) is not None:
            return digests
        self._ask(np.flatnonzero(~self._begun).tolist())
        found: dict[int, bytes] = {}
        for regions, asked in self._asked:
            found.update(zip(regions, await asyncio.shield(asked), strict=True))
        return [found[region] for region in range(len(self._begun))]

    def _complete(self) -> list[int]:
        """Regions of which every row is there, and that nobody hashes yet."""
        if self._there.all():
            return np.flatnonzero(~self._begun).tolist()
        before = np.concatenate([[0], np.cumsum(self._there)])
        leaves = before[self._first[1:]] - before[self._first[:-1]]
        return np.flatnonzero((leaves == np.diff(self._first)) & ~self._begun).tolist()

    def _ask(self, regions: list[int]) -> None:
        if not regions:
            return
        self._waiting = 0
        self._begun[regions] = True
        asking = asyncio.ensure_future(self._hashed(regions))
        asking.add_done_callback(_seen)
        self._asked.append((regions, asking))

    async def _hashed(self, regions: list[int]) -> list[bytes]:
        # The rows themselves may be on their way to somebody: they leave before anything is asked.
        await asyncio.sleep(0)
        return await self._reader.region_digests(self._table, regions, urgent=True)


def _seen(asked: asyncio.Future[list[bytes]]) -> None:
    """Whoever asks for all of them hears of a failure; a move that was given up asks no more."""
    if not asked.cancelled():
        asked.exception()
