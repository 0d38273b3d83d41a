"""Reading a session's memory into leaf tables, through the executors. The node itself hashes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from worldmove.digest import LeafTable, hash_bytes, root
from worldmove.executor.messages import CopyPiece, Piece
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.memory import Holding
from worldmove.manifest import Span

OnRead = Callable[[int, int], None]
"""Called with (first leaf, number of leaves) as parts of a reading are done."""


class Reader:
    """One memory at one revision, attached to the executors, with tables for what was read."""

    def __init__(self, memory: Holding, pool: ExecutorPool, seed: int) -> None:
        self.memory = memory
        self.seed = seed
        self._pool = pool
        self._keys: list[int] = []
        self._tables: list[tuple[LeafTable, int]] = []

    async def open(self, *, writable: bool = True) -> None:
        """Maps the extents in every executor; undone if it fails."""
        try:
            for extent, fd in zip(self.memory.extents, self.memory.fds, strict=True):
                self._keys.append(await self._pool.attach(fd, extent.nbytes, writable=writable))
        except BaseException:
            await self.close()
            raise

    def all_spans(self) -> list[Span]:
        """Every byte of every region."""
        return self.memory.leaf_map.spans(0, self.memory.leaf_map.count)

    async def table(self) -> LeafTable:
        """A new table, all leaves unknown, that executors can write; lives as long as the reader."""
        table = LeafTable(self.memory.leaf_map.count)
        try:
            key = await self._pool.attach(table.fd, table.nbytes, writable=True)
        except BaseException:
            table.close()
            raise
        self._tables.append((table, key))
        return table

    async def read(
        self, table: LeafTable, spans: Sequence[Span], *, urgent: bool, on_read: OnRead | None = None
    ) -> None:
        """Digests leaf-aligned spans of memory, as they are now, into `table`.

        Raises:
            ProcessLostError: an executor ended meanwhile; some leaves may not have been read.
        """
        if not spans:
            return
        pieces = [self._piece(span) for span in spans]

        def part(done: list[Piece]) -> None:
            for first, count in _leaf_ranges(done):
                table.learn(first, count)
                if on_read is not None:
                    on_read(first, count)

        await self._pool.digest(self._key_of(table), self.seed, pieces, urgent=urgent, on_part=part)

    async def copy_from(self, source: Reader, spans: Sequence[Span], *, urgent: bool) -> None:
        """Copies spans of another memory with the same manifest into this one."""
        pieces = []
        for span in spans:
            theirs = source.memory.places[span.region]
            mine = self.memory.places[span.region]
            pieces.append(
                CopyPiece(
                    source._keys[theirs.extent],
                    theirs.offset + span.offset,
                    self._keys[mine.extent],
                    mine.offset + span.offset,
                    span.length,
                )
            )
        await self._pool.copy(pieces, urgent=urgent)

    async def region_digests(self, table: LeafTable) -> list[bytes]:
        """BLAKE2b-256 of every region's leaf digests, in manifest order."""
        first = self.memory.leaf_map.first
        ranges = [(int(start), int(stop - start)) for start, stop in itertools.pairwise(first)]
        return await self._pool.region_digests(self._key_of(table), ranges)

    async def root(
        self, table: LeafTable, *, session_id: str, epoch: int, block: int, host_states: Sequence[bytes]
    ) -> str:
        """The root (hex) of what `table` says of this memory, together with every rank's host state."""
        digests = await self.region_digests(table)
        value = root(
            session_id=session_id,
            epoch=epoch,
            block=block,
            seed=self.seed,
            regions=self.memory.manifest.regions,
            region_digests=digests,
            state_digests=[hash_bytes(state) for state in host_states],
        )
        return value.hex()

    async def fill(self, byte: int) -> None:
        """Overwrites the regions; what lies beside them in the same extents is somebody else's."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.memory.extents]
        for place, region in zip(self.memory.places, self.memory.manifest.regions, strict=True):
            ranges[place.extent].append((place.offset, region.nbytes))
        for key, some in zip(self._keys, ranges, strict=False):
            await self._pool.fill(key, byte, some)

    async def close(self) -> None:
        """Waits until no executor touches this memory, then unmaps it there."""
        keys, self._keys = self._keys, []
        tables, self._tables = self._tables, []
        for key in [*keys, *(key for _, key in tables)]:
            await self._pool.settle(key)
            await self._pool.detach(key)
        for table, _ in tables:
            table.close()

    def _key_of(self, table: LeafTable) -> int:
        return next(key for known, key in self._tables if known is table)

    def _piece(self, span: Span) -> Piece:
        place = self.memory.places[span.region]
        first, _ = self.memory.leaf_map.leaves_of(span)
        leaf = int(self.memory.leaf_map.leaf_bytes[span.region])
        return Piece(self._keys[place.extent], place.offset + span.offset, span.length, leaf, first)


def _leaf_ranges(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Merges the leaves of pieces into contiguous ranges, so that small regions travel together."""
    if not pieces:
        return []
    first = np.array([piece.first_leaf for piece in pieces], dtype=np.int64)
    count = np.array([-(-piece.length // piece.leaf_bytes) for piece in pieces], dtype=np.int64)
    order = np.argsort(first)
    first, count = first[order], count[order]
    breaks = np.flatnonzero(first[1:] != first[:-1] + count[:-1]) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(first)]]) - 1
    return [(int(first[a]), int(first[b] + count[b] - first[a])) for a, b in zip(starts, stops, strict=True)]
