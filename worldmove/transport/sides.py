"""What differs between kinds of lanes: where memory lies, and how messages come from it and go to it."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from worldmove.errors import FramingError
from worldmove.ipc import map_shared
from worldmove.transport.base import Connection
from worldmove.transport.exchange import Destination, Exchange, Source
from worldmove.transport.faults import Faults
from worldmove.transport.lane_messages import Wish
from worldmove.transport.packing import Gauge, Shape
from worldmove.transport.slots import RingShape, Rows, SlotTable
from worldmove.transport.staged import StagedDestination, StagedSource
from worldmove.transport.table import LaneRegion, RegionTable

Stage = Callable[[int, Rows], asyncio.Future[None]]
Leave = Callable[[int], asyncio.Future[None]]


class Asks(NamedTuple):
    """What a source asks its node for, and what it is asked for.

    Attributes:
        stage: bytes in a slot. leave: to send so many. shape: what the destination wants.
        start: returns when the world stands, with `Start.wait`'s block; `None`: nothing is waited for.
        begun: told that block when the first messages are on their way after `start`.
    """

    stage: Stage
    leave: Leave | None
    shape: Shape
    start: Callable[[], Awaitable[int]] | None = None
    begun: Callable[[int], None] = lambda _block: None


class Side(Protocol):
    """How a lane of one kind does what the node asks for."""

    def map(self, fd: int, nbytes: int, writable: bool, /) -> Any:
        """Maps an extent.

        Raises:
            FramingError: it can't be mapped.
        """

    def table(self, extents: Sequence[Any], regions: Sequence[LaneRegion], ring: RingShape | None) -> Any:
        """Takes the extents for the regions of a lease; raises `FramingError`."""

    def source(
        self, connection: Connection, table: Any, stall_s: float, faults: Faults, asks: Asks, /
    ) -> Exchange:
        """Answers pulls."""

    def destination(
        self, connection: Connection, table: Any, stall_s: float, faults: Faults, gauge: Gauge, /
    ) -> Exchange:
        """Makes pulls, in the way that `measure` has chosen."""

    async def measure(self, connection: Connection, table: Any, wish: Wish, /) -> Gauge:
        """As destination: warms the way up, and chooses."""

    async def oblige(self, connection: Connection, stall_s: float, /) -> Gauge:
        """As source: what belongs to `measure`."""


class HostSide:
    """Lanes that map host memory: arenas themselves, or rings.

    Args:
        inline: digests what lands before it goes on, for benchmarks.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline

    def map(self, fd: int, nbytes: int, writable: bool, /) -> mmap.mmap:
        """See `Side.map`."""
        try:
            return map_shared(fd, nbytes, writable=writable, populate=True)
        except (OSError, ValueError) as error:
            raise FramingError(f"an extent can't be mapped: {error}") from error

    def table(
        self, extents: Sequence[mmap.mmap], regions: Sequence[LaneRegion], ring: RingShape | None
    ) -> RegionTable | SlotTable:
        """See `Side.table`."""
        if ring is None:
            return RegionTable(extents, regions)
        if len(extents) != 1:
            raise FramingError(f"{len(extents)} extents came for one ring")
        return SlotTable(extents[0], ring, [region.nbytes for region in regions])

    def source(
        self,
        connection: Connection,
        table: RegionTable | SlotTable,
        stall_s: float,
        faults: Faults,
        asks: Asks,
        /,
    ) -> Exchange:
        """See `Side.source`."""
        if isinstance(table, SlotTable):
            return StagedSource(connection, table, stall_s, faults, asks.stage)
        return Source(connection, table, stall_s, faults, asks.leave)

    def destination(
        self,
        connection: Connection,
        table: RegionTable | SlotTable,
        stall_s: float,
        faults: Faults,
        _gauge: Gauge,
        /,
    ) -> Exchange:
        """See `Side.destination`."""
        if isinstance(table, SlotTable):
            return StagedDestination(connection, table, stall_s, faults)
        return Destination(connection, table, stall_s, inline=self._inline)

    async def measure(self, _connection: Connection, _table: object, _wish: Wish, /) -> Gauge:
        """Nothing to warm up."""
        return Gauge(0.0, 1, 1)

    async def oblige(self, _connection: Connection, _stall_s: float, /) -> Gauge:
        """Nothing to warm up."""
        return Gauge(0.0, 1, 1)
