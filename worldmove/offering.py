"""What a source offers: lanes that serve a session's memory, if need be through rings, or its descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worldmove import messages as m
from worldmove.errors import WorldMoveError
from worldmove.hosting.memory import Holding
from worldmove.outlet import Leaves
from worldmove.rings import Ring, Rings
from worldmove.staging import RingLane, Stage, lease
from worldmove.transport.pool import Lane, LanePool, LaneRegion, mint_token
from worldmove.transport.slots import unpack_rows

OnLost = Callable[[asyncio.Future[WorldMoveError]], None]


class Filling:
    """Fills the slots of one source lane as it wants them, until the lane is released or gone."""

    def __init__(self, leased: RingLane, stage: Stage, leaves: Leaves | None) -> None:
        self._lane, self._ring = leased
        self._stage = stage
        self._leaves = leaves
        self._tasks: set[asyncio.Task[None]] = set()
        self._lane.on_wanted = self._wanted

    async def quiet(self) -> None:
        """Once the lane is released or gone: returns when no copy is under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _wanted(self, number: int, slot: int, rows: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._fill(number, slot, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fill(self, number: int, slot: int, rows: bytes) -> None:
        try:
            found = unpack_rows(rows)
            if self._leaves is not None:
                await self._leaves.take(int(found["length"].sum()))
            await self._stage.fill(self._ring, slot, found)
            await self._lane.staged(number)
        except WorldMoveError as error:
            self._lane.abort(error)


class Letting:
    """Lets one source lane send, piece by piece, as the node's egress has room."""

    def __init__(self, lane: Lane, leaves: Leaves) -> None:
        self._lane = lane
        self._leaves = leaves
        self._tasks: set[asyncio.Task[None]] = set()
        lane.on_leave = self._wanted

    def _wanted(self, number: int, nbytes: int) -> None:
        task = asyncio.get_running_loop().create_task(self._let(number, nbytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let(self, number: int, nbytes: int) -> None:
        try:
            await self._leaves.take(nbytes)
            await self._lane.staged(number)
        except WorldMoveError as error:
            if self._lane.on_leave == self._wanted:  # it is still this move's
                self._lane.abort(error)


class Serving:
    """The source's lanes of one move, with rings where its memory needs them.

    Args:
        lanes, rings: of the node.
        stage: from the session's memory, where it needs rings; else `None`.
    """

    def __init__(self, lanes: LanePool, rings: Rings, stage: Stage | None) -> None:
        self._leaves: Leaves | None = None
        self._pool = lanes
        self._rings = rings
        self._stage = stage
        self._lanes: list[Lane] = []
        self._filling: list[Filling] = []
        self._borrowed: list[Ring] = []

    async def lease(self, move_id: str, memory: Holding) -> Lane:
        """One more lane; `release` or `abort` gives it back.

        Raises:
            WorldMoveError: see `LanePool.lease` and `Rings.borrow`.
        """
        if self._stage is None:
            extents = [(fd, extent.nbytes) for fd, extent in zip(memory.fds, memory.extents, strict=True)]
            lane = await self._pool.lease(move_id, extents, regions_of(memory), writable=False)
            if self._leaves is not None:
                Letting(lane, self._leaves)
        else:
            leased = await lease(self._rings, self._pool, move_id, memory, writable=False)
            self._borrowed.append(leased.ring)
            self._filling.append(Filling(leased, self._stage, self._leaves))
            lane = leased.lane
        self._lanes.append(lane)
        return lane

    async def offer(
        self, count: int, move_id: str, memory: Holding, host: str, on_lost: OnLost
    ) -> tuple[m.LaneOffer, ...]:
        """Leases so many lanes and has them serve.

        Args:
            count: of lanes.
            move_id: of the move.
            memory: of the session.
            host: where the other node reaches this one's lanes.
            on_lost: called when one of them fails.

        Raises:
            WorldMoveError: one can't be had; those that there are stay until `end`.
        """
        offers = []
        for _ in range(count):
            lane = await self.lease(move_id, memory)
            lane.lost.add_done_callback(on_lost)
            token = mint_token()
            await lane.serve(token)
            offers.append(m.LaneOffer(host, lane.port, token))
        return tuple(offers)

    def limit(self, leaves: Leaves | None) -> None:
        """Before the first lane: what the move may send passes through `leaves`; `None`: no limit."""
        self._leaves = leaves

    def stand(self, seconds: float) -> None:
        """The world stands and has to go on within `seconds`: its bytes go first."""
        if self._leaves is not None:
            self._leaves.stand(seconds)

    async def end(self) -> None:
        """Ends the lanes' processes; returns when nothing of them reads memory any more."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.abort()
        await asyncio.gather(*(lane.gone() for lane in lanes))
        await self._give_back()

    async def release(self) -> list[WorldMoveError]:
        """Ends the leases cleanly; returns what went wrong with lanes that had to be ended instead."""
        lanes, self._lanes = self._lanes, []
        outcomes = await asyncio.gather(*(lane.release() for lane in lanes), return_exceptions=True)
        await self._give_back()
        errors = []
        for outcome in outcomes:
            if isinstance(outcome, WorldMoveError):
                errors.append(outcome)
            elif outcome is not None:
                raise outcome
        return errors

    async def _give_back(self) -> None:
        if self._leaves is not None:
            self._leaves.over()
        filling, self._filling = self._filling, []
        for one in filling:
            await one.quiet()
        rings, self._borrowed = self._borrowed, []
        for ring in rings:
            await self._rings.give(ring)


def regions_of(memory: Holding) -> list[LaneRegion]:
    """Where the regions lie, for a lane that maps the extents themselves."""
    return [
        LaneRegion(place.extent, place.offset, region.nbytes)
        for place, region in zip(memory.places, memory.manifest.regions, strict=True)
    ]


def descriptors_of(memory: Holding, socket: str, token: bytes, *, page: bool) -> m.Begin:
    """What the *local* path begins with: descriptors at `socket` for `token`, of memory and leaf table.

    `page`: the control page's, too.
    """
    return m.Begin(
        socket=socket,
        token=token,
        extent_bytes=tuple(extent.nbytes for extent in memory.extents),
        extent_devices=tuple(extent.device for extent in memory.extents),
        places=memory.places,
        table=True,
        page=page,
    )
