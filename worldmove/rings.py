"""Rings: host memory through which lanes carry what they can't reach themselves, as a GPU's memory.

A ring is one memory file, mapped by one lane at a time and by the executors of the devices whose bytes pass
through it (a GPU's executor registers it with the driver, so that copy engines use it at full speed). Making
and registering one takes milliseconds, so rings are kept for the next move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from worldmove.errors import WorldMoveError
from worldmove.executor.devices import Pools
from worldmove.memory.arena import free_arenas
from worldmove.transport.slots import ALIGN, RingShape

BATCH_BYTES = 16 << 20
SHAPE = RingShape(slots=4, slot_bytes=BATCH_BYTES + 256 * ALIGN)
"""Four batches of 16 MiB: one on the wire, one behind it, and two between ring and device.

A batch has fewer than 256 messages, each of which may leave a gap.
"""


class Allocator(Protocol):
    """Who gives host memory (`hosting.memory.Arenas`)."""

    async def allocate(self, sizes: Sequence[int], name: str, *, cpus: Collection[int] = ()) -> list[int]:
        """Makes arenas of host memory, all or none; `NoMemoryError` if they do not fit."""

    def release(self, nbytes: int) -> None:
        """Takes back what was counted."""


class Ring:
    """One ring.

    Attributes:
        fd: its memory. nbytes: all of it.
        cpus: near to which it lies; empty: anywhere.
        keys: under which the executors of each device know it.
    """

    def __init__(self, fd: int, nbytes: int, cpus: tuple[int, ...]) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.cpus = cpus
        self.keys: dict[str, int] = {}

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return slot * SHAPE.slot_bytes


class Rings:
    """All rings of a node.

    Args:
        pools: the executors.
        memory: where rings come from.
        keep: as many are kept for the next move; more are freed after use.
        cpus: which processors are near to a device; none: no difference is known.
    """

    def __init__(
        self,
        pools: Pools,
        memory: Allocator,
        *,
        keep: int,
        cpus: Callable[[str], tuple[int, ...]] = lambda _: (),
    ) -> None:
        self._pools = pools
        self._memory = memory
        self._keep = keep
        self._cpus = cpus
        self._idle: list[Ring] = []
        self._out: set[Ring] = set()
        self._closed = False

    def cpus(self, devices: Collection[str]) -> tuple[int, ...]:
        """Where a lane between these devices and the network should run; empty: anywhere."""
        near = {self._cpus(device) for device in devices if device != "host"}
        return near.pop() if len(near) == 1 else ()

    async def borrow(self, devices: Collection[str]) -> Ring:
        """A ring that the executors of `devices` can use; nobody else uses it until `give`.

        Raises:
            NoMemoryError: there is no room for another one.
            WorldMoveError: a device can't use it; nothing is left of it then.
        """
        cpus = self.cpus(devices)
        near = [ring for ring in self._idle if ring.cpus == cpus]
        known = [ring for ring in near if ring.keys.keys() >= set(devices)]
        if near:
            ring = (known or near)[-1]
            self._idle.remove(ring)
        else:
            ring = await self._make(cpus)
        self._out.add(ring)
        try:
            for device in devices:
                if device not in ring.keys:
                    pool = self._pools.of(device)
                    ring.keys[device] = await pool.attach(ring.fd, ring.nbytes, writable=True)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._free(ring)))
            raise
        return ring

    async def give(self, ring: Ring) -> None:
        """Takes a ring back that no lane has mapped any more; waits until no executor touches it either."""
        if ring not in self._out:
            return
        for device, key in ring.keys.items():
            await self._pools.of(device).settle(key)
        if self._closed or len(self._idle) >= self._keep:
            await self._free(ring)
        else:
            self._out.discard(ring)
            self._idle.append(ring)

    async def close(self) -> None:
        """Frees every ring; those that are still out, too: no lane and no executor may be alive any more."""
        self._closed = True
        for ring in [*self._idle, *self._out]:
            await self._free(ring)
        self._idle.clear()

    async def _make(self, cpus: tuple[int, ...]) -> Ring:
        nbytes = SHAPE.slots * SHAPE.slot_bytes
        fd = (await self._memory.allocate([nbytes], "worldmove-ring", cpus=cpus))[0]
        return Ring(fd, nbytes, cpus)

    async def _free(self, ring: Ring) -> None:
        self._out.discard(ring)
        keys, ring.keys = ring.keys, {}
        try:
            for device, key in keys.items():
                await self._detach(device, key)
        finally:
            await free_arenas([ring.fd])
            self._memory.release(ring.nbytes)

    async def _detach(self, device: str, key: int) -> None:
        try:
            await self._pools.of(device).detach(key)
        except WorldMoveError:
            # Executors that are gone have nothing mapped.
            return
