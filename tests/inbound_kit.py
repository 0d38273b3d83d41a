"""Two memories with the same manifest, real executors, and a path that copies within this process."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from worldmove.digest import LeafTable
from worldmove.errors import WorldMoveError
from worldmove.executor.devices import Pools
from worldmove.hosting.memory import Arenas, Holding, take
from worldmove.inbound import Inbound, World
from worldmove.ipc import close_all, map_shared
from worldmove.manifest import Manifest, Region, Span
from worldmove.memory.arena import MemoryBudget
from worldmove.messages import MAX_PART_LEAVES, TablePart
from worldmove.reading import Reader

KIB = 1024
SEED = 0x5EED
Bytes = npt.NDArray[np.uint8]
Hook = Callable[[list[Span]], Awaitable[None]]

REGIONS = (
    Region("k", "bfloat16", (3, 100_003), stride_bytes=200_006),
    Region("empty", "float32", (0, 7)),
    Region("one", "uint8", (1,)),
    Region("v", "float32", (96, 1024), stride_bytes=32 * KIB),
    Region("odd", "uint8", (64 * KIB * 3 + 17,)),
)


def manifest(regions: tuple[Region, ...] = REGIONS) -> Manifest:
    return Manifest(model="toy", regions=regions, block_ms=50.0, horizon_ms=100.0)


class Memory:
    """One node's memory of a session, seen as plain bytes."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        maps = [
            map_shared(fd, extent.nbytes) for fd, extent in zip(holding.fds, holding.extents, strict=True)
        ]
        self._maps: list[mmap.mmap] = maps
        self.extents: list[Bytes] = [np.frombuffer(one, dtype=np.uint8) for one in maps]
        self.regions: list[Bytes] = [
            self.extents[place.extent][place.offset : place.offset + region.nbytes]
            for place, region in zip(holding.places, holding.manifest.regions, strict=True)
        ]

    def fill(self, rng: np.random.Generator) -> None:
        """Random bytes everywhere, also between and behind the regions."""
        for extent in self.extents:
            extent[:] = rng.integers(0, 256, extent.size, dtype=np.uint8)

    def span(self, span: Span) -> Bytes:
        return self.regions[span.region][span.offset : span.offset + span.length]

    def gaps(self) -> bytes:
        """What lies in the extents but in no region: nobody may touch it."""
        outside = [np.ones(extent.size, dtype=np.bool_) for extent in self.extents]
        for place, region in zip(self.holding.places, self.holding.manifest.regions, strict=True):
            outside[place.extent][place.offset : place.offset + region.nbytes] = False
        return b"".join(extent[mask].tobytes() for extent, mask in zip(self.extents, outside, strict=True))

    def close(self) -> None:
        close_all(self.holding.fds)


def equal(mine: Memory, theirs: Memory) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(mine.regions, theirs.regions, strict=True))


class DirectPath:
    """A `paths.Path` that copies here; `hook` is awaited with every batch after its bytes have landed."""

    name = "direct"

    def __init__(self, source: Memory, target: Memory, *, batch_bytes: int, width: int) -> None:
        self.batch_bytes = batch_bytes
        self.width = width
        self.lost: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
        self.pulls: list[list[Span]] = []
        self.urgent: list[bool] = []
        self.under_way = 0
        self.most = 0
        self.hook: Hook | None = None
        self._source = source
        self._target = target

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            for span in spans:
                self._target.span(span)[:] = self._source.span(span)
            self.pulls.append(list(spans))
            self.urgent.append(urgent)
            if self.hook is not None:
                await self.hook(list(spans))
        finally:
            self.under_way -= 1

    def stand(self, seconds: float) -> None:
        return

    async def release(self) -> None:
        return

    def abort(self) -> None:
        return

    async def quiet(self) -> None:
        return

    def pulled(self) -> int:
        """Bytes since the last call."""
        total = sum(span.length for spans in self.pulls for span in spans)
        self.pulls.clear()
        return total


class Bench:
    """Source and destination around one `Inbound`; `errors` are those that its tasks ended with."""

    def __init__(self, pool: Pools, source: Memory, target: Memory, path: DirectPath) -> None:
        self.pool = pool
        self.source = source
        self.target = target
        self.path = path
        self.errors: list[BaseException] = []
        self.landed = 0
        self.theirs = Reader(source.holding, pool, SEED)
        self.mine = Reader(target.holding, pool, SEED)
        self.inbound = Inbound(self.mine, path, self.errors.append, self._on_landed)
        self.table: LeafTable

    def _on_landed(self, nbytes: int) -> None:
        self.landed += nbytes

    async def open(self) -> None:
        await self.theirs.open(writable=False)
        self.table = await self.theirs.table()
        await self.mine.open()
        await self.inbound.open()

    async def parts(self, number: int) -> list[TablePart]:
        """The source's table as it is now, in parts."""
        await self.theirs.read(self.table, self.theirs.all_spans(), urgent=False)
        step = min(MAX_PART_LEAVES, 5)
        return [
            TablePart(
                number=number,
                first=first,
                digests=self.table.slice(first, min(step, self.table.count - first)),
            )
            for first in range(0, self.table.count, step)
        ]

    async def round(self, number: int, *, final: bool, table: bool = True) -> tuple[int, int]:
        """A whole round; leaves and bytes that it asked for."""
        self.inbound.start_round(number, final=final)
        if table:
            for part in await self.parts(number):
                self.inbound.plan(part)
        count = await self.inbound.close_round()
        return count.leaves, count.bytes

    async def roots(self) -> tuple[str, str]:
        """Of the source and of the destination, each of what lies in its memory and tables."""
        world = World("world", 3, 12, (b"state", b""))
        return await self.root(world), await self.inbound.root(world)

    async def root(self, world: World) -> str:
        """Of the source, of what lies in its memory and table."""
        digests = await self.theirs.region_digests(self.table)
        return self.theirs.sum_up(digests, **world._asdict())


@asynccontextmanager
async def bench(
    pool: Pools,
    regions: tuple[Region, ...] = REGIONS,
    *,
    batch_bytes: int = 300 * KIB,
    width: int = 2,
    arenas: Arenas | None = None,
) -> AsyncIterator[Bench]:
    """Two memories, full of different random bytes; everything is closed afterwards."""
    budget = arenas or MemoryBudget()
    memories = [Memory(await take(manifest(regions), budget, name)) for name in ("from", "to")]
    rng = np.random.default_rng(7)
    for memory in memories:
        memory.fill(rng)
    made = Bench(pool, *memories, DirectPath(*memories, batch_bytes=batch_bytes, width=width))
    try:
        await made.open()
        yield made
    finally:
        await made.inbound.stop()
        await made.theirs.close()
        await made.mine.close()
        for memory in memories:
            memory.close()
