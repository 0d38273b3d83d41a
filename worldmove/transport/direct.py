"""The two sides of a *direct* lane: messages lie in slots of a ring in GPU memory, a slot a message.

Copies between rings and regions are begun in order and overlap the wire: a few slots are filled ahead of the
one that is sent, and what has landed is brought to its place while the next ones come. Where UCX carries them
as fast (`warming`), long messages are received where they belong, without a slot.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from worldmove.errors import DeviceError, FramingError
from worldmove.transport import framing
from worldmove.transport.base import Buffer, Connection, DeviceBytes, Incoming
from worldmove.transport.device import DeviceTable, LaneGpu
from worldmove.transport.exchange import Puller, Server
from worldmove.transport.faults import Faults
from worldmove.transport.framing import Kind, Spans
from worldmove.transport.packing import SLOT_BYTES, Gauge, pack
from worldmove.transport.pulling import Pulling
from worldmove.transport.sides import Asks
from worldmove.transport.slots import Load


class Slot(NamedTuple):
    """Where one message lies in the ring."""

    data: DeviceBytes
    offset: int


class Slots:
    """A ring, cut for one lease: buffers that are taken and given back."""

    def __init__(self, gpu: LaneGpu, chunk_bytes: int) -> None:
        self._gpu = gpu
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for number in range(gpu.ring_bytes // chunk_bytes):
            self._free.put_nowait(number * chunk_bytes)

    async def take(self, nbytes: int) -> Slot:
        """The next free one."""
        offset = await self._free.get()
        return Slot(self._gpu.ring(offset, nbytes), offset)

    def give(self, slot: Slot) -> None:
        """It may be taken again."""
        self._free.put_nowait(slot.offset)


class Filled(NamedTuple):
    """A slot that is being filled."""

    slot: Slot
    copied: asyncio.Future[None]
    began: float


class DirectSource(Server):
    """Fills slots from the regions, and sends them.

    Args:
        connection, stall_s, faults: see `Server`.
        gpu: with the ring. table: of the lease. asks: see `Asks`.
    """

    chunk_bytes = SLOT_BYTES

    def __init__(
        self,
        connection: Connection,
        gpu: LaneGpu,
        table: DeviceTable,
        stall_s: float,
        faults: Faults,
        *,
        asks: Asks,
    ) -> None:
        self.depth = asks.shape.depth
        super().__init__(connection, table, stall_s, faults)
        self._gpu = gpu
        self._memory = table
        self._asks = asks
        self._chunk = asks.shape.chunk_bytes
        self._ring = Slots(gpu, self._chunk)
        self._filled: asyncio.Queue[Filled] = asyncio.Queue()
        self._start = asks.start
        self._block: int | None = None
        self._stood = 0.0

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._forward()]

    async def _serve(self) -> None:
        note, now = self.account.note, self.account.now
        while True:
            spans = await self._pulls.get()
            await self._awaits()
            for load in pack(spans, self._chunk):
                began = now()
                slot = await self._ring.take(load.nbytes)
                began = note("slot", began)
                copied = self._memory.gather(load.rows, slot.data.address)
                note("calls", began)
                self._filled.put_nowait(Filled(slot, copied, began))
                # Each call of CUDA takes its time: the first slot is sent before the last one is begun.
                await asyncio.sleep(0)

    def hold(self, start: Callable[[], Awaitable[int]]) -> None:
        """See `held.Holding`."""
        self._start = start

    async def _awaits(self) -> None:
        """Nothing is read of a world that will stand before it does; the destination hears at which block."""
        start, self._start = self._start, None
        if start is not None:
            self._block = await start()
            self._stood = self.account.now()
            self._send(Kind.STOOD, memoryview(framing.STOOD.pack(self._block)))

    async def _forward(self) -> None:
        note = self.account.note
        for number in itertools.count(1):
            slot, copied, began = await self._filled.get()
            await copied
            data = slot.data
            began = note("gather", began, data.nbytes)
            if self._faults.spoils():
                self._gpu.flip(data.address + data.nbytes // 2)
            await self._turn()
            began = note("turn", began)
            self._ship(data, partial(self._sent_slot, slot, began))
            note("post", began)
            self._begins(number)

    def _begins(self, number: int) -> None:
        """One of the first messages is on its way."""
        if self._block is None:
            return
        if number == 1:
            self.account.note("first", self._stood)
        if number == self.depth or self._filled.empty():
            # Only now: whoever hears of it gives the GPU work that these would have waited for.
            self._asks.begun(self._block)
            self._block = None

    def _sent_slot(self, slot: Slot, began: float) -> None:
        self.account.note("send", began, slot.data.nbytes)
        self._ring.give(slot)

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
    """Lands messages, and brings those in slots to their place; a pull is over when all of it is there.

    Args:
        connection, stall_s: see `Puller`.
        gpu: with the ring. table: of the lease.
        faults: damage to do to what has landed.
        gauge: the shape of what comes, and whether long messages are received where they belong.
    """

    chunk_bytes = SLOT_BYTES

    def __init__(
        self,
        connection: Connection,
        gpu: LaneGpu,
        table: DeviceTable,
        stall_s: float,
        faults: Faults,
        *,
        gauge: Gauge,
    ) -> None:
        super().__init__(connection, table, stall_s)
        self._gpu = gpu
        self._memory = table
        self._faults = faults
        self._gauge = gauge
        self._ring = Slots(gpu, gauge.shape.chunk_bytes)
        self._announced = 0.0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._fail()]

    def wake(self) -> None:
        """See `Puller.wake`; what was waited for before is no part of the account."""
        if self._resting:
            self._announced = self.account.now()
        super().wake()

    async def _fail(self) -> None:
        """Ends the exchange when a copy fails."""
        await self._broken

    def _cut(self, spans: Spans) -> list[Load]:
        if not self._open:
            self._announced = self.account.now()
        return list(pack(spans, self._gauge.shape.chunk_bytes))

    async def _land(self, pull: Pulling, chunk: Load, incoming: Incoming) -> None:
        note = self.account.note
        began = self._announced = note("announce", self._announced)
        place = self._memory.straight(chunk.rows) if self._gauge.straight else None
        if place is not None:
            incoming.into(place).add_done_callback(partial(self._there, pull, place, began))
        else:
            slot = await self._ring.take(chunk.nbytes)
            began = note("slot", began)
            incoming.into(slot.data).add_done_callback(partial(self._arrived, pull, chunk, slot, began))
        note("post", began)

    def _there(self, pull: Pulling, place: DeviceBytes, began: float, received: asyncio.Future[None]) -> None:
        if received.cancelled() or received.exception() is not None:
            return
        self.account.note("straight", began, place.nbytes)
        self._guarded(lambda: self._spoil(place))
        if not self._broken.done():
            self._landed(pull)

    def _arrived(
        self,
        pull: Pulling,
        load: Load,
        slot: Slot,
        began: float,
        received: asyncio.Future[None],
    ) -> None:
        if received.cancelled() or received.exception() is not None:
            return
        began = self.account.note("receive", began, load.nbytes)

        def scatter() -> None:
            self._spoil(slot.data)
            copied = self._memory.scatter(load.rows, slot.data.address)
            self.account.note("calls", began)
            copied.add_done_callback(partial(self._placed, pull, slot, began))

        # The copy is given to the device after UCX has said that the bytes are there: it sees them.
        self._guarded(scatter)

    def _spoil(self, data: DeviceBytes) -> None:
        if self._faults.spoils():
            self._gpu.flip(data.address + data.nbytes // 2)

    def _placed(self, pull: Pulling, slot: Slot, began: float, copied: asyncio.Future[None]) -> None:
        if copied.cancelled():
            return
        self.account.note("scatter", began, slot.data.nbytes)
        self._guarded(copied.result)
        if not self._broken.done():
            self._ring.give(slot)
            self._landed(pull)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (DeviceError, FramingError) as error:
            if not self._broken.done():
                self._broken.set_exception(error)
