"""The two sides of a *direct* lane: messages lie in slots of rings in GPU memory, a slot a message.

Copies between rings and regions are begun in order and overlap the wire: a few slots are filled ahead of the
one that is sent, and what has landed is brought to its place while the next ones come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from worldmove.errors import DeviceError, FramingError
from worldmove.transport.base import Buffer, Connection, DeviceBytes, Incoming
from worldmove.transport.device import DeviceTable, LaneGpu
from worldmove.transport.exchange import Puller, Pulling, Server
from worldmove.transport.faults import Faults
from worldmove.transport.framing import Spans
from worldmove.transport.packing import AT_ONCE, SLOT_BYTES, pack
from worldmove.transport.slots import Load


def _free_slots(gpu: LaneGpu) -> asyncio.Queue[int]:
    free: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(gpu.slots):
        free.put_nowait(slot)
    return free


class DirectSource(Server):
    """Fills slots from the regions, and sends them.

    Args:
        connection, stall_s, faults: see `Server`.
        gpu: with the ring. table: of the lease.
    """

    chunk_bytes = SLOT_BYTES
    depth = AT_ONCE

    def __init__(
        self, connection: Connection, gpu: LaneGpu, table: DeviceTable, stall_s: float, faults: Faults
    ) -> None:
        super().__init__(connection, table, stall_s, faults)
        self._gpu = gpu
        self._memory = table
        self._free = _free_slots(gpu)
        self._filled: asyncio.Queue[tuple[Load, int, asyncio.Future[None]]] = asyncio.Queue()

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._forward()]

    async def _serve(self) -> None:
        while True:
            for load in pack(await self._pulls.get()):
                slot = await self._free.get()
                self._filled.put_nowait((load, slot, self._memory.gather(load.rows, slot)))

    async def _forward(self) -> None:
        while True:
            load, slot, copied = await self._filled.get()
            await copied
            data = self._gpu.slot(slot, load.nbytes)
            if self._faults.spoils():
                self._gpu.flip(data.address + data.nbytes // 2)
            await self._turn()
            self._ship(data, partial(self._free.put_nowait, slot))

    def _damaged(self, data: Buffer) -> Buffer:
        """What is damaged is the ring's copy, never the world."""
        match self._faults.wound():
            case "flip" if isinstance(data, DeviceBytes):
                self._gpu.flip(data.address + data.nbytes // 2)
            case "short" if isinstance(data, DeviceBytes):
                return DeviceBytes(data.address, data.nbytes - 1)
            case "over" if isinstance(data, DeviceBytes):
                return DeviceBytes(data.address, data.nbytes + 1)
        return data


class DirectDestination(Puller[Load]):
    """Lands in slots, and brings what has landed to its place; a pull is over when all of it is there.

    Args:
        connection, stall_s: see `Puller`.
        gpu: with the ring. table: of the lease.
        faults: damage to do to what has landed.
    """

    chunk_bytes = SLOT_BYTES

    def __init__(
        self, connection: Connection, gpu: LaneGpu, table: DeviceTable, stall_s: float, faults: Faults
    ) -> None:
        super().__init__(connection, table, stall_s)
        self._gpu = gpu
        self._memory = table
        self._faults = faults
        self._free = _free_slots(gpu)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._fail()]

    async def _fail(self) -> None:
        """Ends the exchange when a copy fails."""
        await self._broken

    def _cut(self, spans: Spans) -> list[Load]:
        return list(pack(spans))

    async def _land(self, pull: Pulling, chunk: Load, incoming: Incoming) -> None:
        slot = await self._free.get()
        incoming.into(self._gpu.slot(slot, chunk.nbytes)).add_done_callback(
            partial(self._arrived, pull, chunk, slot)
        )

    def _arrived(self, pull: Pulling, load: Load, slot: int, received: asyncio.Future[None]) -> None:
        if received.cancelled() or received.exception() is not None:
            return
        # The copy is given to the device after UCX has said that the bytes are there: it sees them.
        self._guarded(lambda: self._scatter(pull, load, slot))

    def _scatter(self, pull: Pulling, load: Load, slot: int) -> None:
        if self._faults.spoils():
            self._gpu.flip(self._gpu.slot(slot, 0).address + load.nbytes // 2)
        self._memory.scatter(load.rows, slot).add_done_callback(partial(self._placed, pull, slot))

    def _placed(self, pull: Pulling, slot: int, copied: asyncio.Future[None]) -> None:
        if copied.cancelled():
            return
        self._guarded(copied.result)
        if not self._broken.done():
            self._free.put_nowait(slot)
            self._landed(pull)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (DeviceError, FramingError) as error:
            if not self._broken.done():
                self._broken.set_exception(error)
