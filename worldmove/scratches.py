"""Memory beside a session's own through which its leaves change places: one for each device that needs it."""

from __future__ import annotations

import os

from worldmove.delta.columns import Move
from worldmove.delta.moving import limits_of
from worldmove.errors import NoMemoryError
from worldmove.executor.devices import Pools
from worldmove.executor.messages import Room
from worldmove.ipc import sealed_memfd
from worldmove.kernels.shifts import MOST_STEPS
from worldmove.manifest import HOST

BOUNCE_BYTES = 64 << 20
"""Of a GPU's scratch, behind what circles take of it: through there copies go that overlap themselves."""


class Scratches:
    """Made when they are first needed, and attached to the executors of their device.

    Args:
        pools: the executors.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._keys: dict[str, int] = {}
        self._full: set[str] = set()

    async def of(self, device: str, *, needed: bool, useful: bool = False) -> int:
        """The key of a device's scratch; -1 where there is none, and none is needed.

        Args:
            device: whose.
            needed: nothing goes without it.
            useful: a GPU would be faster with it, if it has the room.

        Raises:
            NoMemoryError: the device has no room for it, and it is needed.
        """
        wanted = needed or (useful and device != HOST and device not in self._full)
        if device in self._keys or not wanted:
            return self._keys.get(device, -1)
        try:
            self._keys[device] = await self._make(device)
        except NoMemoryError:
            self._full.add(device)
            if needed:
                raise
        return self._keys.get(device, -1)

    def room(self, device: str) -> Room | None:
        """What a GPU may use while it shifts."""
        key = self._keys.get(device)
        if device == HOST or key is None:
            return None
        return Room(key, limits_of(device).scratch_bytes, BOUNCE_BYTES)

    def take(self) -> list[tuple[str, int]]:
        """Device and key of every scratch; they are the caller's to detach."""
        keys, self._keys = list(self._keys.items()), {}
        return keys

    async def _make(self, device: str) -> int:
        pool = self._pools.of(device)
        nbytes = limits_of(device).scratch_bytes
        if device == HOST:
            fd = sealed_memfd("worldmove-scratch", nbytes)
        else:
            nbytes += BOUNCE_BYTES
            fd = await pool.allocate(nbytes)
        try:
            return await pool.attach(fd, nbytes, writable=True, device=device != HOST)
        finally:
            os.close(fd)  # the pool keeps a duplicate


def goes_a_short_way(move: Move) -> bool:
    """Whether a move overlaps itself so much that it takes many steps."""
    way = abs(move.source_offset - move.target_offset)
    return move.source == move.target and move.length > MOST_STEPS * way
