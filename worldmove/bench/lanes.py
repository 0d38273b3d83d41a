"""The lanes alone: what a move's data path carries when nobody digests what it brings.

One pair of lanes, batches and batches in flight exactly as in a move (`worldmove.paths`), one region.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from worldmove.gate import Gate, Pass
from worldmove.manifest import Span
from worldmove.paths import StagedPath
from worldmove.rings import BATCH_BYTES
from worldmove.transport.pool import LanePool, LaneRegion

CONNECT_TIMEOUT_MS = 10_000
MOVE_ID = "bench-lanes"
WARM_BYTES_PER_S = 1e12
"""More than any path carries: the gate begins with its widest window."""


class LanePair:
    """A connected source lane and destination lane.

    Attributes:
        prepare_ms: what leasing and connecting took; mapping of the memory included.
        batch_ms: of each batch, from its turn until it had landed.
    """

    def __init__(self, path: StagedPath, nbytes: int, prepare_ms: float) -> None:
        self._path = path
        self._nbytes = nbytes
        self.prepare_ms = prepare_ms
        self.batch_ms: list[float] = []

    async def run(self, on_landed: Callable[[Span], Awaitable[None]] | None = None) -> float:
        """Carries all bytes once and returns the seconds it took.

        Args:
            on_landed: awaited for each batch after it has landed; the next one has begun by then.

        Raises:
            TransportError: the lanes lost each other.
        """
        slots = asyncio.Semaphore(self._path.width)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for batch in self._batches():
                await slots.acquire()
                group.create_task(self._pull(batch, slots, on_landed))
        return time.perf_counter() - start

    def _batches(self) -> Iterator[Span]:
        offset = 0
        while offset < self._nbytes:
            batch = Span(0, offset, min(self._path.batch_bytes, self._nbytes - offset))
            offset += batch.length
            yield batch

    async def _pull(
        self, batch: Span, slots: asyncio.Semaphore, on_landed: Callable[[Span], Awaitable[None]] | None
    ) -> None:
        start = time.perf_counter()
        try:
            await self._path.pull([batch], urgent=False)
        finally:
            slots.release()
        self.batch_ms.append((time.perf_counter() - start) * 1000)
        if on_landed is not None:
            await on_landed(batch)


@contextlib.asynccontextmanager
async def lane_pair(
    source_fd: int, destination_fd: int, nbytes: int, one: Pass | None = None, *, inline: bool = False
) -> AsyncIterator[LanePair]:
    """Two pools with one lane each, connected over loopback; everything ends with the block.

    Args:
        source_fd: memory file that is read.
        destination_fd: memory file that is written.
        nbytes: bytes of each.
        one: its place at a gate; its own otherwise.
        inline: the receiving lane digests what lands before it goes on.
    """
    region = LaneRegion(0, 0, nbytes)
    async with contextlib.AsyncExitStack() as stack:
        source_pool, destination_pool = LanePool(spare=1, limit=1), LanePool(spare=1, limit=1, inline=inline)
        for pool in (source_pool, destination_pool):
            stack.push_async_callback(pool.close)
            await pool.start()
        start = time.perf_counter()
        source = await source_pool.lease(MOVE_ID, [(source_fd, nbytes)], [region], writable=False)
        stack.push_async_callback(source.release)
        token = secrets.token_bytes(32)
        await source.serve(token)
        lane = await destination_pool.lease(MOVE_ID, [(destination_fd, nbytes)], [region], writable=True)
        stack.push_async_callback(lane.release)
        await lane.connect("127.0.0.1", source.port, token, CONNECT_TIMEOUT_MS)
        prepare_ms = (time.perf_counter() - start) * 1000
        if one is None:
            gate = Gate(None, BATCH_BYTES)
            gate.pace.warm(WARM_BYTES_PER_S)
            one = gate.join(MOVE_ID, "source")
        yield LanePair(StagedPath([lane], one), nbytes, prepare_ms)
