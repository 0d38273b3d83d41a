"""The *staged* path of memory that lanes can't reach: through rings, by executors at both ends.

At the source a lane says which bytes it wants in which slot of its ring; the executors of their devices bring
them there, a few slots ahead of the one that is being sent. At the destination the lane lands each batch in a
slot, and executors bring it from there to its place. So device copies, wire and digests overlap.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from worldmove.errors import ProcessLostError
from worldmove.executor.devices import Pools
from worldmove.executor.messages import CopyPiece
from worldmove.gate import Pass
from worldmove.gated import GatedPath
from worldmove.hosting.memory import Holding
from worldmove.manifest import Span
from worldmove.reading import Reader
from worldmove.rings import SHAPE, Ring, Rings
from worldmove.tasks import each
from worldmove.transport import framing
from worldmove.transport.pool import Lane, LanePool, LaneRegion
from worldmove.transport.slots import Rows, loads
from worldmove.transport.table import Sizes


def needs_ring(memory: Holding) -> bool:
    """Whether some of it lies where lanes can't reach."""
    return any(extent.device != "host" for extent in memory.extents)


class Stage:
    """Copies between a session's memory and rings.

    Args:
        reader: the memory, open.
        pools: the executors.
    """

    def __init__(self, reader: Reader, pools: Pools) -> None:
        self._reader = reader
        self._pools = pools
        self._sizes = Sizes([region.nbytes for region in reader.memory.manifest.regions])

    async def fill(self, ring: Ring, slot: int, rows: Rows) -> None:
        """Brings bytes from memory to a slot; raises as `ExecutorPool.copy`, or `FramingError`."""
        await self._copy(ring, slot, rows, inwards=False)

    async def empty(self, ring: Ring, slot: int, rows: Rows, *, urgent: bool) -> None:
        """Brings bytes from a slot to memory; raises as `fill`."""
        await self._copy(ring, slot, rows, inwards=True, urgent=urgent)

    async def _copy(self, ring: Ring, slot: int, rows: Rows, *, inwards: bool, urgent: bool = True) -> None:
        self._sizes.check(rows)
        pieces: defaultdict[str, list[CopyPiece]] = defaultdict(list)
        for region, offset, length, place in rows.tolist():
            device, key, start = self._reader.locate(region, offset)
            slot_key, there = ring.keys[device], ring.offset(slot) + place
            if inwards:
                pieces[device].append(CopyPiece(slot_key, there, key, start, length))
            else:
                pieces[device].append(CopyPiece(key, start, slot_key, there, length))
        await each([self._pools.of(device).copy(some, urgent=urgent) for device, some in pieces.items()])


class RingLane(NamedTuple):
    """A leased lane and its ring."""

    lane: Lane
    ring: Ring


async def lease(rings: Rings, lanes: LanePool, move_id: str, memory: Holding, *, writable: bool) -> RingLane:
    """A lane for all regions of `memory`, with a ring.

    Raises:
        WorldMoveError: see `LanePool.lease` and `Rings.borrow`; nothing is left then.
    """
    devices = sorted({extent.device for extent in memory.extents})
    regions = [LaneRegion(0, 0, region.nbytes) for region in memory.manifest.regions]
    ring = await rings.borrow(devices)
    try:
        extents = [(ring.fd, ring.nbytes)]
        cpus = rings.cpus(devices)
        lane = await lanes.lease(move_id, extents, regions, writable=writable, ring=SHAPE, cpus=cpus)
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(rings.give(ring)))
        raise
    return RingLane(lane, ring)


class _Line:
    """One lane of a `RingPath`, with the slots that are free."""

    def __init__(self, leased: RingLane) -> None:
        self.lane, self.ring = leased
        self.free = list(range(SHAPE.slots))


class RingPath(GatedPath):
    """Pulls over leased lanes into rings, and brings what has landed to its place.

    Args:
        leased: lanes, connected.
        stage: to this node's memory.
        gate: the move's place at the gate, which grants the bytes of each batch.
        rings: where the rings go back to.
    """

    def __init__(self, leased: Sequence[RingLane], stage: Stage, gate: Pass, rings: Rings) -> None:
        super().__init__([one.lane for one in leased], gate)
        self._lines = [_Line(one) for one in leased]
        self._stage = stage
        self._rings = rings
        self._free = asyncio.Semaphore(SHAPE.slots * len(self._lines))
        self._tasks: set[asyncio.Task[None]] = set()
        self._copying: set[asyncio.Task[None]] = set()
        self._aborted = False
        self.width = SHAPE.slots * len(self._lines)

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        """Brings the spans over the lane with the most free slots; returns when they lie in memory.

        Cancelling it stops the waiting only: what is under way goes on until it is done, or `quiet` returns.
        """
        self._check()
        task = asyncio.get_running_loop().create_task(self._pull(spans, urgent=urgent))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._copying.discard(task)
        if not task.cancelled():
            task.exception()

    async def _pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        async with self._free:
            line = max(self._lines, key=lambda one: len(one.free))
            slot = line.free.pop()
            try:
                async with self._gate.grant(sum(span.length for span in spans)):
                    await line.lane.pull(spans, slot)
                self._check()
                if (task := asyncio.current_task()) is not None:
                    self._copying.add(task)
                for load in loads(framing.plan(framing.pack_spans(spans)), SHAPE.slot_bytes):
                    await self._stage.empty(line.ring, slot, load.rows, urgent=urgent)
            finally:
                line.free.append(slot)

    def _check(self) -> None:
        if self._aborted:
            raise ProcessLostError("the path has ended")

    async def release(self) -> None:
        """Gives lanes and rings back."""
        try:
            await asyncio.gather(*(self._release(line) for line in self._lines))
        finally:
            self._gate.leave()

    async def _release(self, line: _Line) -> None:
        try:
            await line.lane.release()
        finally:
            await self._rings.give(line.ring)

    def abort(self) -> None:
        """Ends the lanes' processes, and starts no further copy."""
        self._aborted = True
        for task in self._tasks - self._copying:
            task.cancel()
        super().abort()

    async def quiet(self) -> None:
        """Returns when every lane has been reaped, and no copy into memory is under way."""
        await asyncio.gather(*(line.lane.gone() for line in self._lines))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._gate.leave()
        lines, self._lines = self._lines, []
        await asyncio.gather(*(self._rings.give(line.ring) for line in lines))
