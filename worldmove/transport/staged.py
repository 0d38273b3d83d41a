"""The two sides of a lane whose regions lie where it can't reach: it sends from slots, and lands in them.

On the wire nothing is different, so either side may stage without the other knowing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from worldmove.errors import FramingError
from worldmove.transport import framing
from worldmove.transport.base import Connection, Incoming
from worldmove.transport.exchange import ChunkPuller, Server
from worldmove.transport.faults import Faults
from worldmove.transport.framing import Chunk, Spans
from worldmove.transport.pulling import Pulling
from worldmove.transport.slots import Load, Rows, SlotTable, loads

Stage = Callable[[int, Rows], asyncio.Future[None]]
"""Asks for the bytes of rows in a slot; completes when they are there."""


class StagedSource(Server):
    """Has slots filled, several ahead of the one that it sends from.

    Args:
        connection, table, stall_s, faults: see `Server`.
        stage: fills slots, one after the other.
    """

    def __init__(
        self, connection: Connection, table: SlotTable, stall_s: float, faults: Faults, stage: Stage
    ) -> None:
        super().__init__(connection, table, stall_s, faults)
        self._ring = table
        self._stage = stage
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(table.shape.slots):
            self._free.put_nowait(slot)
        self._staged: asyncio.Queue[tuple[Load, int, asyncio.Future[None]]] = asyncio.Queue()

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._forward()]

    async def _serve(self) -> None:
        while True:
            chunks = framing.plan(await self._pulls.get())
            for load in loads(chunks, self._ring.shape.slot_bytes):
                slot = await self._free.get()
                self._staged.put_nowait((load, slot, self._stage(slot, load.rows)))

    async def _forward(self) -> None:
        while True:
            load, slot, staged = await self._staged.get()
            await staged
            self._faults.spoil(self._ring.message(slot, *load.messages[0]))
            shipped = self._countdown(slot, len(load.messages))
            for place, nbytes in load.messages:
                await self._turn()
                self._ship(self._ring.message(slot, place, nbytes), shipped)

    def _countdown(self, slot: int, count: int) -> Callable[[], None]:
        """To be called for each message that has been sent from a slot: after the last one it is free."""
        left = count

        def shipped() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._free.put_nowait(slot)

        return shipped


class StagedDestination(ChunkPuller):
    """Lands each pull in the slot that was named with it; whoever named it empties it.

    Args:
        connection, table, stall_s: see `Puller`.
        faults: damage to do to what has landed.
    """

    def __init__(self, connection: Connection, table: SlotTable, stall_s: float, faults: Faults) -> None:
        super().__init__(connection, table, stall_s)
        self._ring = table
        self._faults = faults
        self._places: deque[tuple[int, int]] = deque()
        self._loads: dict[Pulling, Load] = {}

    def pull_into(self, spans: Spans, slot: int) -> asyncio.Future[int]:
        """Asks for spans, to be landed in `slot` as `slots.loads` lays them out; see `Puller.pull`.

        Raises:
            FramingError: as `pull`, or there is no such slot, or they don't fit it.
        """
        shape = self._ring.shape
        self._table.check(spans)
        fitted = list(loads(framing.plan(spans), shape.slot_bytes))
        if len(fitted) > 1 or not 0 <= slot < shape.slots:
            raise FramingError(
                f"a pull does not fit slot {slot} of {shape.slots}, {shape.slot_bytes} bytes each"
            )
        pull = self._ask(spans)
        for load in fitted:
            self._places.extend((slot, place) for place, _ in load.messages)
            self._loads[pull] = load
        return pull.landed

    async def _land(self, pull: Pulling, chunk: Chunk, incoming: Incoming) -> None:
        slot, place = self._places.popleft()

        def landed(future: asyncio.Future[None]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            if pull.left == 1:
                self._faults.spoil(self._ring.message(slot, *self._loads.pop(pull).messages[0]))
            self._landed(pull)

        incoming.into(self._ring.message(slot, place, chunk.nbytes)).add_done_callback(landed)
