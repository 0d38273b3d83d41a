"""The ways from the source's memory to the destination's: pulled over lanes, or copied on one host.

A path pulls a batch of spans and returns when the bytes lie in this node's memory. It promises nothing
about them: they are read back and compared afterwards, by somebody else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from worldmove import messages as m
from worldmove.arming import Armed, Sign
from worldmove.digest import LeafTable
from worldmove.errors import FramingError, WorldMoveError
from worldmove.gate import Pass
from worldmove.gated import GatedPath
from worldmove.hosting.memory import Holding
from worldmove.manifest import DIGEST_BYTES, Extent, LeafMap, Manifest, Span
from worldmove.reading import OnRead, Plan, Reader
from worldmove.rings import BATCH_BYTES
from worldmove.sealing import unsealed
from worldmove.transport.pool import Lane

GPU_BATCH_BYTES = 256 << 20
"""What copy engines bring in less than a millisecond: a batch costs the node about as long as on the host."""
WIDTH = 4
GPU_WIDTH = 32
"""Copy engines are given everything at once, up to 8 GiB: what the node does meanwhile costs them nothing."""
BATCHES_PER_LANE = 2


class Path(Protocol):
    """One open way to the source's bytes."""

    name: str
    width: int
    """How many batches may be under way at once."""
    rate: float | None
    """Bytes per second that a bare transfer brought when it was opened; `None`: nobody has measured."""
    lost: asyncio.Future[WorldMoveError]
    """Completes when the path can bring nothing more."""

    @property
    def batch_bytes(self) -> int:
        """A good size for one batch, at this moment."""

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        """Brings the spans; returns when they lie in memory."""

    def stand(self, seconds: float) -> None:
        """The world stands and has to go on within `seconds`: it goes first."""

    async def release(self) -> None:
        """Ends the path in peace: nothing is under way."""

    def abort(self) -> None:
        """Ends the path at once; never waits."""

    async def quiet(self) -> None:
        """After `abort`: returns when it is certain that nothing writes into memory any more."""


class StagedPath(GatedPath):
    """Pulls over leased lanes, each batch under a grant of the node's gate."""

    def __init__(self, lanes: Sequence[Lane], gate: Pass) -> None:
        super().__init__(lanes, gate)
        self._load = {id(lane): 0 for lane in self._lanes}
        self.width = BATCHES_PER_LANE * len(self._lanes)

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:  # noqa: ARG002 - see `stand`
        """Brings the spans over the lane with the fewest batches under way."""
        nbytes = sum(span.length for span in spans)
        async with self._gate.grant(nbytes):
            lane = min(self._lanes, key=lambda one: self._load[id(one)])
            self._load[id(lane)] += 1
            try:
                await lane.pull(spans)
            finally:
                self._load[id(lane)] -= 1

    async def release(self) -> None:
        """Gives the lanes back to the pool."""
        try:
            await asyncio.gather(*(lane.release() for lane in self._lanes))
        finally:
            self._gate.leave()

    async def quiet(self) -> None:
        """Returns when every lane's process has been reaped."""
        await asyncio.gather(*(lane.gone() for lane in self._lanes))
        self._gate.leave()


class ShownTable:
    """The source's leaf table, read where it lies: the source's executors write it.

    Rows are copied once; nobody looks twice. What is no sealed memory file is refused before it is touched: a
    read of it might wait for whoever answers for the file, and the node's event loop with it.

    Args:
        fd: of the table; it belongs to this, unless it is refused.
        count: of its leaves.

    Raises:
        FramingError: it is no table that can be read at any time.
    """

    def __init__(self, fd: int, count: int) -> None:
        if (wrong := unsealed(fd, max(count, 1) * DIGEST_BYTES)) is not None:
            raise FramingError(f"the source's table of {count} leaves {wrong}")
        self._fd = fd
        self._count = count

    def rows(self, first: int, count: int) -> bytes:
        """The digests of `count` leaves from `first`.

        Raises:
            FramingError: they lie outside the table, or the system doesn't read them.
        """
        if first + count > self._count:
            raise FramingError(f"leaves {first} to {first + count - 1} of a table of {self._count}")
        try:
            found = os.pread(self._fd, count * DIGEST_BYTES, first * DIGEST_BYTES)
        except OSError as error:
            raise FramingError(f"the source's table cannot be read: {error}") from error
        if len(found) != count * DIGEST_BYTES:
            raise FramingError(f"the source's table ends before leaf {first + count}")
        return found

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalPath:
    """Copies between two mappings on one host, in the executors of the devices that it goes to.

    Attributes:
        at_once: whether all of it may be under way at once, so that it can be planned beforehand.
        sign: whereby the target's devices see that the source's world stands, if they can.
        shown: the source's leaf table, if it can be read where it is.
    """

    name = "local"
    rate: float | None = None

    def __init__(self, source: Reader, target: Reader, sign: Sign | None = None) -> None:
        devices = {extent.device for extent in target.memory.extents}
        on_gpus, on_host = devices != {"host"}, "host" in devices
        self.batch_bytes = GPU_BATCH_BYTES if on_gpus else BATCH_BYTES
        self.width = GPU_WIDTH if on_gpus else WIDTH
        self.at_once = not on_host or target.memory.leaf_map.total <= WIDTH * BATCH_BYTES
        self.sign = sign
        self.shown: ShownTable | None = None
        self._armed: Armed | None = None
        self._source = source
        self._target = target
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborted = False
        self.lost: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()

    def stand(self, seconds: float) -> None:
        """Nothing: whoever copies says what is urgent."""

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        """Copies the spans."""
        await self._shielded(self._target.copy_from, self._source, spans, urgent=urgent)

    async def land(self, spans: Sequence[Span], table: LeafTable, *, urgent: bool) -> None:
        """Copies the spans, and digests each where it has landed: what is read lies in memory by then.

        One job does both, so the rate of a round is that of both: admission counts the digest once more.
        """
        await self._shielded(self._target.land, self._source, table, spans, urgent=urgent)

    def plan(self, batches: Iterable[Sequence[Span]], table: LeafTable) -> Plan:
        """What `land` does with each of these batches."""
        return self._target.plan_land(self._source, table, batches)

    async def land_planned(self, plan: Plan, on_read: OnRead, *, urgent: bool) -> None:
        """Does what was planned, as far as the executors' queues reach all at once."""
        await self._shielded(self._target.perform, plan, urgent=urgent, on_read=on_read)

    def arm(self, plan: Plan, sign: Sign, on_read: OnRead | None = None) -> Armed:
        """Has what was planned begin when the world stands; once."""
        self._armed = Armed(plan, sign)
        self._armed.start(on_read)
        return self._armed

    async def _shielded(
        self, work: Callable[..., Coroutine[Any, Any, None]], *what: object, **how: object
    ) -> None:
        if self._aborted:
            raise asyncio.CancelledError
        self._under_way += 1
        self._idle.clear()
        copying = asyncio.ensure_future(work(*what, **how))
        copying.add_done_callback(self._copied)
        await asyncio.shield(copying)

    def _copied(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            task.exception()
        self._under_way -= 1
        if self._under_way == 0:
            self._idle.set()

    async def release(self) -> None:
        """Unmaps the source's memory in the executors."""
        await self._close()

    def abort(self) -> None:
        """Starts no further copy."""
        self._aborted = True
        if self._armed is not None:
            self._armed.drop()

    async def quiet(self) -> None:
        """Returns when the copies that were under way have ended, and the source's memory is unmapped."""
        await self._idle.wait()
        await self._close()

    async def _close(self) -> None:
        if self.shown is not None:
            self.shown.close()
        if self._armed is not None:
            await self._armed.close()
        elif self.sign is not None:
            await self.sign.close()
        await self._source.close()


def foreign_memory(manifest: Manifest, begin: m.Begin, fds: Sequence[int]) -> Holding:
    """The source's memory as seen from here; everything it says about it is checked.

    Raises:
        FramingError: a region has no place, or lies outside its extent.
    """
    regions = manifest.regions
    if len(begin.places) != len(regions):
        raise FramingError(f"begin places {len(begin.places)} regions, the manifest has {len(regions)}")
    for place, region in zip(begin.places, regions, strict=True):
        inside = 0 <= place.extent < len(begin.extent_bytes) and place.offset >= 0
        if not inside or place.offset + region.nbytes > begin.extent_bytes[place.extent]:
            raise FramingError(f"begin places region {region.name!r} outside its extent")
    devices = begin.extent_devices or ("host",) * len(begin.extent_bytes)
    if len(devices) != len(begin.extent_bytes):
        raise FramingError(f"begin names {len(devices)} devices for {len(begin.extent_bytes)} extents")
    extents = tuple(Extent(0, *each) for each in zip(devices, begin.extent_bytes, strict=True))
    counted = (False,) * len(extents)
    return Holding(manifest, extents, tuple(begin.places), tuple(fds), counted, LeafMap(regions))
