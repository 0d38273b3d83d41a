"""What a *direct* lane does on its GPU; imported only there, as it brings CuPy along."""

from __future__ import annotations

from collections.abc import Sequence

from worldmove.cuda.memory import Window
from worldmove.errors import DeviceError, FramingError
from worldmove.transport.base import Connection
from worldmove.transport.device import DeviceTable, LaneGpu
from worldmove.transport.direct import DirectDestination, DirectSource
from worldmove.transport.exchange import Exchange
from worldmove.transport.faults import Faults
from worldmove.transport.lane_messages import Wish
from worldmove.transport.packing import Gauge, Shape
from worldmove.transport.sides import Asks
from worldmove.transport.slots import RingShape
from worldmove.transport.table import LaneRegion
from worldmove.transport.warming import Warming, oblige


class DeviceSide:
    """A lane that maps memory of one GPU; see `sides.Side`."""

    def __init__(self, gpu: LaneGpu) -> None:
        self._gpu = gpu

    def map(self, fd: int, nbytes: int, _writable: bool, /) -> Window:
        """See `Side.map`."""
        try:
            return self._gpu.map(fd, nbytes)
        except DeviceError as error:
            raise FramingError(f"an extent can't be mapped: {error.message}") from error

    def table(
        self, extents: Sequence[Window], regions: Sequence[LaneRegion], ring: RingShape | None
    ) -> DeviceTable:
        """See `Side.table`."""
        if ring is not None:
            raise FramingError("a direct lane has a ring of its own")
        return DeviceTable(self._gpu, extents, regions)

    def source(
        self,
        connection: Connection,
        table: DeviceTable,
        stall_s: float,
        faults: Faults,
        asks: Asks,
        /,
    ) -> Exchange:
        """See `Side.source`."""
        return DirectSource(connection, self._gpu, table, stall_s, faults, asks=asks)

    def destination(
        self, connection: Connection, table: DeviceTable, stall_s: float, faults: Faults, gauge: Gauge, /
    ) -> Exchange:
        """See `Side.destination`."""
        return DirectDestination(connection, self._gpu, table, stall_s, faults, gauge=gauge)

    async def measure(self, connection: Connection, table: DeviceTable, wish: Wish) -> Gauge:
        """See `warming.Warming`."""
        shape = Shape(wish.chunk_bytes, wish.depth)
        return await Warming(connection, self._gpu, shape).measure(table, wish.landing)

    async def oblige(self, connection: Connection, stall_s: float) -> Gauge:
        """See `warming.oblige`."""
        return await oblige(connection, self._gpu, stall_s)
