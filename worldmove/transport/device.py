"""A GPU as a *direct* lane uses it: a ring of plain memory that UCX can register, and copies to and from it.

The session's own memory is of the kind that UCX 1.21 can't export and would carry over TCP without a word;
so every byte passes through the ring, by a copy within the device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import cupy
import numpy as np

from worldmove.cuda.memory import Device, Window
from worldmove.errors import DeviceError, FramingError
from worldmove.kernels.runs_cuda import RunKernels
from worldmove.kernels.streams import Begun, begin_copies
from worldmove.transport.base import DeviceBytes
from worldmove.transport.packing import SLOT_BYTES, STRAIGHT
from worldmove.transport.slots import Rows
from worldmove.transport.table import LaneRegion, Sizes

SLACK = 4096
"""Bytes behind the last slot: a fault of tests sends one byte too many from there."""


class LaneGpu:
    """One GPU with a ring; all of it belongs to the thread of the running event loop.

    Args:
        uuid: which.
        slots: the ring's size, in `packing.SLOT_BYTES`. How it is cut is a matter of each lease.

    Raises:
        DeviceError: it can't be used.
        NoMemoryError: it has no room for the ring.
    """

    def __init__(self, uuid: str, slots: int) -> None:
        self.ring_bytes = slots * SLOT_BYTES
        self._device = Device(uuid)
        # UCX works on the current device: it opens a peer's memory there, and copies by its engines.
        cupy.cuda.Device(self._device.info.ordinal).use()
        self._ring = self._device.allocate(self.ring_bytes + SLACK)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._kernels = RunKernels()
        self._kernels.warm_up()
        self._due: deque[tuple[Begun, asyncio.Future[None]]] = deque()
        self._looking: asyncio.Task[None] | None = None

    def map(self, fd: int, nbytes: int) -> Window:
        """Maps a session's memory of this device; raises as `Device.map`."""
        return self._device.map(fd, nbytes)

    def ring(self, offset: int, nbytes: int) -> DeviceBytes:
        """Bytes of the ring."""
        return DeviceBytes(self._ring + offset, nbytes)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> asyncio.Future[None]:
        """Begins to copy (source, target, bytes); one call is done after the other.

        Returns:
            A future that completes when it is done, or fails with `DeviceError`.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda one: one.cancelled() or one.exception())
        self._due.append((begin_copies(self._kernels, self._stream, copies), done))
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return done

    def flip(self, address: int) -> None:
        """Flips the bits of one byte, at once; for tests of what finds it."""
        byte = np.zeros(1, np.uint8)
        self._device.copy(int(byte.ctypes.data), address, 1)
        self._device.synchronize()
        byte ^= 0xFF
        self._device.copy(address, int(byte.ctypes.data), 1)
        self._device.synchronize()

    def settle(self) -> None:
        """Returns when everything that was begun is done; raises `DeviceError`."""
        self._device.synchronize()

    async def _look(self) -> None:
        """Looks after what is under way without pause: it takes less than a wake-up would."""
        try:
            while self._due:
                while self._due and self._due[0][0].done():
                    _answer(self._due.popleft()[1], None)
                await asyncio.sleep(0)
        except DeviceError as error:
            while self._due:
                _answer(self._due.popleft()[1], error)
        finally:
            self._looking = None


class DeviceTable(Sizes):
    """Where the regions of one lease lie on a lane's GPU.

    Args:
        gpu: which.
        extents: mapped; owned by the table and unmapped by `close`.
        regions: in manifest order; one that lies on another device has extent -1, and can't be pulled here.

    Raises:
        FramingError: a region doesn't lie inside its extent.
    """

    def __init__(self, gpu: LaneGpu, extents: Sequence[Window], regions: Sequence[LaneRegion]) -> None:
        super().__init__([region.nbytes for region in regions])
        self._gpu = gpu
        self._extents = list(extents)
        self._places: list[int | None] = []
        for number, region in enumerate(regions):
            if region.extent == -1:
                self._places.append(None)
                continue
            if not 0 <= region.extent < len(self._extents):
                raise FramingError(f"region {number} lies in extent {region.extent} of {len(self._extents)}")
            extent = self._extents[region.extent]
            if region.offset < 0 or not 0 <= region.nbytes <= extent.nbytes - region.offset:
                raise FramingError(f"region {number} does not lie inside its extent")
            self._places.append(extent.address + region.offset)

    def gather(self, rows: Rows, address: int) -> asyncio.Future[None]:
        """Begins to bring bytes of regions to a slot, which begins at `address`."""
        return self._gpu.copy(self._pairs(rows, address))

    def scatter(self, rows: Rows, address: int) -> asyncio.Future[None]:
        """Begins to bring a slot's bytes to their regions."""
        pairs = self._pairs(rows, address)
        return self._gpu.copy([(there, here, length) for here, there, length in pairs])

    def check(self, spans: Rows) -> None:
        """As `Sizes.check`; also raises for a region of another device."""
        super().check(spans)
        for region in set(spans["region"].tolist()):
            if self._places[region] is None:
                raise FramingError(f"region {region} lies on another device")

    def straight(self, rows: Rows) -> DeviceBytes | None:
        """Where a load of one long piece lies in its region; `None`: it is one that has to be taken apart."""
        if rows.size != 1:
            return None
        region, offset, length, _ = rows.tolist()[0]
        return DeviceBytes((self._places[region] or 0) + offset, length) if length >= STRAIGHT else None

    @property
    def largest(self) -> DeviceBytes | None:
        """The largest region that lies here."""
        sizes = self._nbytes.tolist()
        here = [(size, place) for size, place in zip(sizes, self._places, strict=True) if place]
        return DeviceBytes(max(here)[1], max(here)[0]) if here else None

    def _pairs(self, rows: Rows, address: int) -> list[tuple[int, int, int]]:
        return [
            ((self._places[region] or 0) + offset, address + place, length)
            for region, offset, length, place in rows.tolist()
        ]

    def close(self) -> None:
        """Unmaps everything, once no copy is under way."""
        self._gpu.settle()
        for extent in self._extents:
            extent.close()


def _answer(done: asyncio.Future[None], error: DeviceError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
