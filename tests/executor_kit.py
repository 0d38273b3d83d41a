"""Memory attached to a pool of executors, what a pool reports, and the digests that it should compute."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import xxhash

from worldmove.executor.pool import ExecutorPool
from worldmove.ipc import map_shared
from worldmove.memory.arena import create_arena

MB = 1024 * 1024


@asynccontextmanager
async def executors(count: int) -> AsyncIterator[ExecutorPool]:
    """A pool that has started, as eager as the test itself; closed afterwards."""
    pool = ExecutorPool(count, nice=0)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


class Arena:
    """Attached memory and a view of it."""

    def __init__(self, nbytes: int, name: str = "test-arena") -> None:
        self.nbytes = nbytes
        self.fd = create_arena(nbytes, name)
        self.map = map_shared(self.fd, nbytes)
        self.key = 0

    async def attach(self, pool: ExecutorPool, *, writable: bool = True) -> Arena:
        self.key = await pool.attach(self.fd, self.nbytes, writable=writable)
        return self

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class Events:
    """What a pool reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._news = asyncio.Event()

    def __call__(self, name: str, details: Mapping[str, object]) -> None:
        assert isinstance(details["pid"], int)
        self.names.append(name)
        self._news.set()

    async def wait(self, name: str, count: int) -> None:
        async with asyncio.timeout(30):
            while self.names.count(name) < count:
                self._news.clear()
                await self._news.wait()


def expected(data: bytes, leaf: int, seed: int) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[i : i + leaf], seed) for i in range(0, len(data), leaf))
