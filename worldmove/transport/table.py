"""Where the regions of one lease lie in a lane's memory, and the check that nothing lies outside."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from worldmove.errors import FramingError
from worldmove.manifest import Span
from worldmove.transport.framing import Chunk, Spans


class LaneRegion(NamedTuple):
    """Place of one region: extent's index, offset in it and length, in bytes; in manifest order."""

    extent: int
    offset: int
    nbytes: int


class Sizes:
    """The bytes of every region of a lease, in manifest order: what both sides must agree on."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._nbytes = np.array(sizes, dtype=np.uint64)

    @property
    def digest(self) -> bytes:
        """BLAKE2b-128 of all regions' sizes (u64, little endian, manifest order): equal on both sides."""
        return hashlib.blake2b(self._nbytes.astype("<u8").tobytes(), digest_size=16).digest()

    def check(self, spans: Spans) -> None:
        """Raises `FramingError` if a span names no region of the table or leaves it.

        Args:
            spans: of any type with the fields region, offset and length, in this order.
        """
        if spans.size == 0:
            return
        if int(spans["region"].max()) >= self._nbytes.size:
            raise FramingError(f"a span names region {int(spans['region'].max())} of {self._nbytes.size}")
        size = self._nbytes[spans["region"]]
        inside = spans["offset"] <= size
        # Compared this way round: offset + length could wrap around.
        inside &= spans["length"] <= size - np.minimum(spans["offset"], size)
        if not inside.all():
            region, *place = spans[int(np.argmin(inside))].tolist()[:3]
            raise FramingError(
                f"span {(region, *place)} leaves its region of {int(self._nbytes[region])} bytes"
            )


class RegionTable(Sizes):
    """Translates neutral spans to memory.

    Args:
        extents: the memory, by extent; mappings are owned by the table and unmapped by `close`.
        regions: in manifest order.

    Raises:
        FramingError: a region doesn't lie inside its extent.
    """

    def __init__(self, extents: Sequence[mmap.mmap | memoryview], regions: Sequence[LaneRegion]) -> None:
        self._mappings = list(extents)
        self._views = [memoryview(extent) for extent in extents]
        for number, region in enumerate(regions):
            if not 0 <= region.extent < len(self._views):
                raise FramingError(f"region {number} lies in extent {region.extent} of {len(self._views)}")
            room = self._views[region.extent].nbytes - region.offset
            if region.offset < 0 or not 0 <= region.nbytes <= room:
                raise FramingError(f"region {number} does not lie inside its extent")
        self._places = [(region.extent, region.offset) for region in regions]
        super().__init__([region.nbytes for region in regions])

    def view(self, span: Span) -> memoryview:
        """The memory of a checked span."""
        extent, start = self._places[span.region]
        start += span.offset
        return self._views[extent][start : start + span.length]

    def gather(self, chunk: Chunk, buffer: memoryview) -> memoryview:
        """Copies the pieces of a chunk together; returns the filled part of `buffer`."""
        position = 0
        for piece in chunk.pieces:
            buffer[position : position + piece.length] = self.view(piece)
            position += piece.length
        return buffer[:position]

    def scatter(self, chunk: Chunk, buffer: memoryview) -> None:
        """Copies a gathered chunk to its pieces' places."""
        position = 0
        for piece in chunk.pieces:
            self.view(piece)[:] = buffer[position : position + piece.length]
            position += piece.length

    def close(self) -> None:
        """Unmaps everything; nothing may be in flight."""
        for view in self._views:
            view.release()
        for mapping in self._mappings:
            if isinstance(mapping, mmap.mmap):
                mapping.close()
