"""Small buffers through which pieces pass that are gathered into one message."""

from __future__ import annotations

import asyncio

from worldmove.transport.framing import BOUNCE, DEPTH


class Bounces:
    """The few buffers through which small pieces pass; made when needed, as most leases need none."""

    def __init__(self) -> None:
        self._free: asyncio.Queue[memoryview] = asyncio.Queue()
        self._made = 0

    async def take(self) -> memoryview:
        """A buffer of `BOUNCE` bytes, when one is free."""
        if self._free.empty() and self._made < DEPTH:
            self._made += 1
            return memoryview(bytearray(BOUNCE))
        return await self._free.get()

    def give(self, buffer: memoryview) -> None:
        """Takes a buffer back."""
        self._free.put_nowait(buffer)
