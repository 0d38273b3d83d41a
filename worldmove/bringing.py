"""Bytes that come over a path, batch by batch, each read back where it has landed.

While the world generates, what lands on a GPU is read back in few large pieces: whatever another process
launches there takes a turn on the GPU from a world that lives on it, about 0.4 ms, however little there is to
do (docs/benchmarks/beside.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from worldmove import delta
from worldmove.delta.cutting import MOST_SPANS
from worldmove.digest import LeafTable
from worldmove.directing import DirectPath
from worldmove.manifest import HOST, Span
from worldmove.pacing import Duty
from worldmove.paths import LocalPath, Path
from worldmove.reading import OnRead, Plan, Reader
from worldmove.tasks import each

UNREAD_PER_SLOT = 2
LUMP_BYTES = 1 << 30
"""What is read back at once of a world that generates: a quarter of a millisecond's work."""
LUMPS = 8
"""Copied within a host at once, then: as much as otherwise (`paths.GPU_WIDTH`)."""


class Bringing:
    """Asks the path for batches, with bounded queues between landing and reading.

    Args:
        reader: of the memory that they go to.
        path: which brings them.
        spawn: runs work that the owner waits for.
        urgent: whether the world stands, or what is asked for waits until it does.
        on_landed: told the bytes of each batch that has landed.
        on_read: told the leaves that were read back, where reading is not the path's own matter.

    Attributes:
        duty: which share of the time may be spent on it.
    """

    def __init__(
        self,
        reader: Reader,
        path: Path,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        urgent: Callable[[], bool],
        on_landed: Callable[[int], None],
        on_read: OnRead,
    ) -> None:
        self._reader = reader
        self._path = path
        self._landing = path if isinstance(path, LocalPath) else None
        self._spawn = spawn
        self._urgent = urgent
        self._on_landed = on_landed
        self._on_read = on_read
        self._on_gpus = all(extent.device != HOST for extent in reader.memory.extents)
        self._slots = asyncio.Semaphore(path.width)
        self._unread = asyncio.Semaphore(path.width * UNREAD_PER_SLOT)
        self._lumps = asyncio.Semaphore(LUMPS)
        self._planned: dict[tuple[Span, ...], Plan] = {}
        self._coming = 0
        self._lump: list[Span] = []
        self._lump_bytes = 0
        self._table: LeafTable
        self.duty = Duty(1.0)

    def into(self, table: LeafTable) -> None:
        """Before anything is brought.

        Args:
            table: the leaves of what lies in memory; what is read back goes into it.
        """
        self._table = table

    async def prepare(self, spans: Sequence[Span]) -> None:
        """Plans the reading of spans that a standing world will wait for; raises as `Reader.prepare`."""
        plan_read = self._reader.plan_read
        self._planned = {tuple(batch): plan_read(self._table, batch) for batch in self.batches(spans)}
        await each([self._reader.prepare(plan) for plan in self._planned.values()])

    def batches(self, spans: Sequence[Span], least_bytes: int = 0) -> Iterator[list[Span]]:
        """Cuts spans into what is asked for at once.

        Args:
            spans: leaf-aligned.
            least_bytes: a batch may have so many, whatever the path says.
        """
        cut = delta.long_batches if isinstance(self._path, DirectPath) else delta.batches
        # Asked for each batch: a gate finds out while bytes come how many may be under way.
        return cut(spans, self._reader.memory.leaf_map, lambda: max(self._path.batch_bytes, least_bytes))

    async def bring(self, spans: Sequence[Span], *, ahead: bool = False) -> None:
        """Asks for spans; returns when the last batch was asked for, the rest is spawned.

        Args:
            spans: leaf-aligned.
            ahead: of a world that will stand, as far as the path takes that.
        """
        in_lumps = self._on_gpus and self._landing is not None and not self._urgent()
        slots = self._lumps if in_lumps else self._slots
        self._coming += 1
        try:
            for number, batch in enumerate(self.batches(spans, LUMP_BYTES if in_lumps else 0)):
                await self._unread.acquire()
                await slots.acquire()
                while (delay := self.duty.delay(time.monotonic())) > 0:  # noqa: ASYNC110 - only time passes
                    await asyncio.sleep(delay)
                self.duty.begin(time.monotonic())
                self._coming += 1
                self._spawn(self._bring_batch(batch, slots, ahead=ahead and number < self._path.width))
        finally:
            self._coming -= 1

    async def _bring_batch(self, batch: Sequence[Span], slots: asyncio.Semaphore, *, ahead: bool) -> None:
        try:
            urgent = self._urgent()
            try:
                await self._carry(batch, urgent=urgent, ahead=ahead)
            finally:
                self._coming -= 1
                self.duty.end(time.monotonic())
                slots.release()
            self._on_landed(sum(span.length for span in batch))
            if self._landing is None:
                await self._read_back(batch, urgent=urgent)
        finally:
            self._unread.release()

    async def _carry(self, batch: Sequence[Span], *, urgent: bool, ahead: bool) -> None:
        if self._landing is not None:
            await self._landing.land(batch, self._table, urgent=urgent)
        elif ahead and isinstance(self._path, DirectPath):
            await self._path.pull_ahead(batch)
        else:
            await self._path.pull(batch, urgent=urgent)

    async def _read_back(self, batch: Sequence[Span], *, urgent: bool) -> None:
        if urgent or not self._on_gpus:
            plan = self._planned.pop(tuple(batch), None) or self._reader.plan_read(self._table, batch)
        else:
            self._lump += batch
            self._lump_bytes += sum(span.length for span in batch)
            if self._coming and self._lump_bytes < LUMP_BYTES and len(self._lump) < MOST_SPANS:
                return  # with those that come behind it
            lump, self._lump, self._lump_bytes = self._lump, [], 0
            plan = self._reader.plan_read(self._table, lump, few=True)
        await self._reader.perform(plan, urgent=urgent, on_read=self._on_read)
