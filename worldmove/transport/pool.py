"""The node's side of its lanes: starts them, leases them, ends them. Knows no UCX.

A lane serves one move at a time. `release` is the clean end after which it serves another; every
failure, and `abort`, ends the process, and only once `gone` has returned is the memory quiet.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from worldmove import ipc
from worldmove.errors import ProcessLostError, RejectedError, WorldMoveError
from worldmove.transport.confine import device_address
from worldmove.transport.faults import ARM, lane_faults
from worldmove.transport.lane_messages import Report
from worldmove.transport.lease import START_DEADLINE, Lane
from worldmove.transport.slots import RingShape
from worldmove.transport.table import LaneRegion

__all__ = ["Lane", "LanePool", "LaneRegion", "mint_token"]

GPU_START_DEADLINE = 120.0
"""A direct lane may have to compile a kernel when it is started for the first time."""

Event = Callable[[str, dict[str, Any]], None]
STALE = "a lane that it had exchanged with has gone; ended, as memory of that one stays open in it"
STARTS = 2
"""Lanes that start at once for moves that wait for one: more would all be ready late."""
LINGER_S = 60.0
"""How long lanes that a burst of moves left behind are kept: a start takes most of a core for a second.

Not so direct ones: each holds a ring in the memory of its GPU, a gigabyte that sessions may want."""


def mint_token() -> bytes:
    """A one-time token for one lane of one move."""
    return secrets.token_bytes(32)


class LanePool:
    """All lanes of a node.

    Args:
        spare: idle lanes kept ready, so that a lease doesn't wait for a process to start.
        limit: lanes at once, idle ones included.
        stall_ms: see `worldmove.transport.exchange`.
        device: the only network device through which lanes are reached; empty: all.
        gpu: UUID of the GPU whose *direct* lanes these are; empty: `tcp` lanes of host memory.
        slots: of a direct lane's ring, `packing.SLOT_BYTES` each.
        faults: the node's option; of its names only those that begin with `lane-` count.
        inline: lanes digest what lands where they receive it. For benchmarks: it stalls the wire.
        on_event: called with (`lane-started` | `lane-leased` | `lane-released` | `lane-lost`, facts).
    """

    def __init__(
        self,
        *,
        spare: int = 1,
        limit: int = 16,
        stall_ms: int = 3000,
        device: str = "",
        gpu: str = "",
        slots: int = 4,
        faults: str = "",
        inline: bool = False,
        on_event: Event | None = None,
    ) -> None:
        self._spare = self._ready = spare
        self._limit = limit
        self._stall_ms = stall_ms
        self._device = device
        self._gpu = gpu
        self._slots = slots
        self._faults = lane_faults(faults) or ((ARM,) if faults else ())
        self._armed = ""
        self._inline = inline
        self._tell: Event = on_event or (lambda _name, _facts: None)
        self._lanes: list[Lane] = []
        self._dying: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._starting_for = 0
        self._start_s = 0.0
        self._idle: list[Lane] = []
        self._since: dict[Lane, float] = {}
        self._waiting: deque[asyncio.Future[Lane]] = deque()
        self._thinning: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def lanes(self) -> list[tuple[int, int, str | None]]:
        """(pid, port, move id or `None`) of every living lane."""
        return [(lane.pid, lane.port, lane.move_id) for lane in self._lanes]

    @property
    def host(self) -> str:
        """The address of the device that lanes are kept on; empty: they are reached wherever the node is.

        Raises:
            TransportError: the device is gone, or has no IPv4 address.
        """
        return device_address(self._device) if self._device else ""

    def wait_s(self, count: int) -> float:
        """Until there are so many lanes, in seconds, by how long the last start took."""
        missing = max(count - len(self._lanes), 0)
        return self._start_s * -(-missing // STARTS)

    async def start(self) -> None:
        """Starts the spare lanes; returns when they are ready.

        Raises:
            ProcessLostError: a lane process ends instead of starting.
            TransportError: there is no device of the name that was given, or it has no IPv4 address.
        """
        if self._device:
            device_address(self._device)  # said now rather than at the first move
        for lane in await asyncio.gather(*(self._spawn() for _ in range(self._spare))):
            self._rest(lane)

    def arm(self, fault: str) -> None:
        """The next lane that is leased as a source does this damage, where lanes were started with faults."""
        self._armed = fault

    async def close(self) -> None:
        """Ends every lane; returns when all are gone."""
        self._closed = True
        if self._thinning is not None:
            self._thinning.cancel()
        while (future := self._first_waiting()) is not None:
            future.set_exception(ProcessLostError("the lanes are closed"))
        for lane in tuple(self._lanes):
            lane.abort()
        await asyncio.shield(asyncio.ensure_future(self._ended()))

    async def _ended(self) -> None:
        """What is just being started can't be called back: it is ended as soon as it is there."""
        while self._tasks or self._dying or self._lanes:
            ends = [*self._tasks, *self._dying, *(asyncio.create_task(lane.gone()) for lane in self._lanes)]
            await asyncio.gather(*ends, return_exceptions=True)

    async def lease(
        self,
        move_id: str,
        extents: Sequence[tuple[int, int]],
        regions: Sequence[LaneRegion],
        *,
        writable: bool,
        ring: RingShape | None = None,
        cpus: Sequence[int] = (),
    ) -> Lane:
        """Leases a lane to a move and maps its memory there.

        Args:
            move_id: part of what authenticates the two lanes of a pair: equal on both nodes.
            extents: (descriptor, bytes); the descriptors stay the caller's.
            regions: place of every region, in manifest order.
            writable: true for a destination.
            ring: the one extent is a ring of this shape, through which all regions pass; see `slots`. Then of
                the regions only the sizes matter.
            cpus: the only ones that the lane runs on during the lease; empty: any.

        Raises:
            RejectedError: `limit` lanes are leased.
            TransportError: the memory can't be mapped as described; nothing is leased.
            ProcessLostError: the lane died, or the pool is closed.
        """
        lane = await self._free()
        try:
            await lane.bind(
                move_id, extents, regions, writable=writable or ring is not None, ring=ring, cpus=cpus
            )
        except BaseException:
            lane.abort()
            raise
        if not writable:
            lane.fault, self._armed = self._armed, ""
        self._tell("lane-leased", {"pid": lane.pid, "move_id": move_id})
        return lane

    async def _free(self) -> Lane:
        """An idle lane, or the first that another move is done with or that has started."""
        while self._idle:
            lane = self._idle.pop()
            self._since.pop(lane, None)
            if not lane.lost.done():
                return lane
        if len(self._lanes) + len(self._waiting) - self._starting >= self._limit:
            raise self._full()
        future: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._start_for_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._hand(future.result())
            raise

    def _full(self) -> RejectedError:
        return RejectedError(
            f"all {self._limit} lanes are leased", required=1, available=0, retry_after_ms=1000
        )

    def _first_waiting(self) -> asyncio.Future[Lane] | None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                return future
        return None

    def _hand(self, lane: Lane) -> None:
        """Gives a lane to the first move that waits for one; else it rests, unless it is to end."""
        if lane.stale:
            lane.abort(ProcessLostError(STALE))
            return
        future = self._first_waiting()
        if future is not None and not lane.lost.done():
            future.set_result(lane)
            return
        if future is not None:
            self._waiting.appendleft(future)
            self._start_for_waiting()
            return
        self._rest(lane)
        self._thin()

    def _start_for_waiting(self) -> None:
        for _ in range(min(STARTS, len(self._waiting)) - self._starting_for):
            self._starting_for += 1
            task = asyncio.get_running_loop().create_task(self._start_one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_one(self) -> None:
        try:
            lane = await self._spawn()
        except WorldMoveError as error:
            self._starting_for -= 1
            future = self._first_waiting()
            if future is not None:
                future.set_exception(error)
        else:
            self._starting_for -= 1
            self._hand(lane)
        self._start_for_waiting()

    async def _spawn(self) -> Lane:
        if self._closed:
            raise ProcessLostError("the lanes are closed")
        if len(self._lanes) >= self._limit:
            raise self._full()
        self._starting += 1
        began = asyncio.get_running_loop().time()
        try:
            lane = await self._launch()
        finally:
            self._starting -= 1
        try:
            await lane.ready(GPU_START_DEADLINE if self._gpu else START_DEADLINE)
        except BaseException:
            lane.abort()
            raise
        self._start_s = asyncio.get_running_loop().time() - began
        self._tell("lane-started", {"pid": lane.pid, "port": lane.port})
        return lane

    async def _launch(self) -> Lane:
        mine, theirs = ipc.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worldmove.transport.lane",
                *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
                *("--stall-ms", str(self._stall_ms), "--faults", ",".join(self._faults)),
                *("--device", self._device, "--gpu", self._gpu, "--slots", str(self._slots)),
                *(["--inline"] if self._inline else []),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # UCX writes its log to stdout, which belongs to the node's own output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            mine.close()
            raise ProcessLostError(f"a lane can't be started: {error}") from error
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        lane = Lane(process, ipc.Channel(mine, Report), self._stall_ms / 1000)
        lane.on_released, lane.on_stale = self._released, self._stale
        self._lanes.append(lane)
        lane.lost.add_done_callback(lambda done: self._lost(lane, done.result()))
        if self._closed:
            lane.abort()
        return lane

    def _released(self, lane: Lane) -> None:
        if lane.lost.done() or self._closed:
            return
        self._tell("lane-released", {"pid": lane.pid, **({"account": lane.account} if lane.account else {})})
        self._hand(lane)
        self._top_up()

    def _stale(self, lane: Lane) -> None:
        """Ends it if it is idle, else when it is released. From then on one is always ready here.

        Who has moved sessions by direct lanes will do so again, and a start takes seconds.
        """
        self._ready = max(self._ready, 1)
        if lane in self._idle:
            lane.abort(ProcessLostError(STALE))

    def _rest(self, lane: Lane) -> None:
        self._idle.append(lane)
        self._since[lane] = asyncio.get_running_loop().time()

    def _thin(self) -> None:
        """Ends lanes that nobody has needed for a while, all but twice the spare ones.

        As many again are kept: else every lease would start a process and every release end one.
        """
        if self._thinning is not None:
            self._thinning.cancel()
            self._thinning = None
        loop = asyncio.get_running_loop()
        # A direct lane is not started before it is wanted, and then stays: that takes seconds.
        keep = max(2 * self._spare, 1 if self._gpu else 0)
        lingering = self._idle[: max(len(self._idle) - keep, 0)]
        for lane in lingering:
            left = self._since[lane] + LINGER_S - loop.time()
            if left > 0 and not self._gpu:  # those behind it came later
                self._thinning = loop.call_later(left, self._thin)
                return
            self._idle.remove(lane)
            del self._since[lane]
            lane.abort()

    def _lost(self, lane: Lane, error: WorldMoveError) -> None:
        self._lanes.remove(lane)
        if lane in self._idle:
            self._idle.remove(lane)
        self._since.pop(lane, None)
        self._tell("lane-lost", {"pid": lane.pid, "move_id": lane.move_id, "reason": error.message})
        dying = asyncio.get_running_loop().create_task(lane.gone())
        self._dying.add(dying)
        dying.add_done_callback(self._dying.discard)
        # One that never came up would only be followed by others like it.
        if lane.port:
            self._top_up()

    def _top_up(self) -> None:
        """Starts what is missing of the spare lanes, in the background.

        Not while a lane is leased: a start takes most of a core for most of a second.
        """
        if self._closed or any(lane.move_id is not None for lane in self._lanes):
            return
        missing = self._ready - len(self._idle) - len(self._tasks)
        room = self._limit - len(self._lanes) - self._starting
        for _ in range(min(missing, room)):
            task = asyncio.get_running_loop().create_task(self._replenish())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replenish(self) -> None:
        try:
            lane = await self._spawn()
        except WorldMoveError as error:
            self._tell("lane-lost", {"pid": None, "move_id": None, "reason": error.message})
            return
        if len(self._idle) < self._ready and not self._closed:
            self._rest(lane)
        else:
            lane.abort()
