"""Opening a path at the destination: connecting lanes, or fetching descriptors, as the source has offered."""

from __future__ import annotations

import asyncio
import time

import structlog

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.arming import Sign
from worldmove.descriptors import fetch
from worldmove.directing import DirectPath, connect, floor, wish
from worldmove.driver import Services
from worldmove.errors import FramingError, SlowPathError, ValidationError, WorldMoveError
from worldmove.gate import Gate, Pass
from worldmove.hosting.memory import Holding
from worldmove.ipc import close_all
from worldmove.offering import regions_of
from worldmove.paths import LocalPath, Path, ShownTable, StagedPath, foreign_memory
from worldmove.placement import travelled
from worldmove.reading import Reader
from worldmove.sessions import Way
from worldmove.staging import RingLane, RingPath, Stage, lease, needs_ring

log = structlog.get_logger(__name__)


class Opening:
    """What the source has offered, and how it is taken up.

    Args:
        services: of the node.
        hello: the move.
        begin: the offer.
    """

    def __init__(self, services: Services, hello: m.Hello, begin: m.Begin) -> None:
        self._services = services
        self._hello = hello
        self._begin = begin
        self._timeout_ms = int(services.settings.peer_timeout_ms)

    async def open(self, way: Way, target: Reader) -> tuple[Path, p.PathReady]:
        """Opens the path that was admitted, or the staged one where that fails and lanes were offered, too.

        Returns:
            The path, and what there is to say about it.

        Raises:
            WorldMoveError: as `local`, `direct` and `staged`.
        """
        why = way.reason
        try:
            if way.path == "local":
                return await self.local(target), p.PathReady(path=way.path)
            if way.path == "direct":
                direct = await self.direct(target)
                return direct, p.PathReady(path=way.path, gbps=direct.gbps, reason=why[: m.MAX_TEXT])
        except WorldMoveError as error:
            if not self._begin.lanes:
                raise
            log.warning("another path is taken", move=self._hello.move_id, reason=error.message)
            why = f"{why}; {error.message}" if why else error.message
        return await self.staged(target), p.PathReady(path="staged", reason=why[: m.MAX_TEXT])

    async def direct(self, target: Reader) -> DirectPath:
        """Connects lanes of this node's GPUs to those of the source's, and remembers what they bring.

        Raises:
            SlowPathError: it is too slow; the lanes are idle again.
            WorldMoveError: a lane can't be had or connected; none is left then.
        """
        services, begin = self._services, self._begin
        peer, rates = self._hello.source, services.direct_rates
        try:
            if not begin.direct:
                raise FramingError(begin.reason or "begin offers no direct lanes")
            path = await connect(
                services.direct,
                self._hello,
                begin.direct,
                target.memory,
                lambda: self._pass(services.intake.fabric),
                floor_gbps=floor(services.settings),
                timeout_ms=self._timeout_ms,
                wish=wish(services.settings),
            )
        except SlowPathError as error:
            rates.note(peer, error.details["gbps"])
            raise
        except WorldMoveError:
            rates.failed(peer, time.monotonic())
            raise
        rates.note(peer, path.gbps)
        path.ahead = (
            services.intake.fabric is not services.intake.gate
        )  # a line that is shared grants all of it
        return path

    async def local(self, target: Reader) -> Path:
        """Maps the source's memory beside `target`'s.

        Raises:
            FramingError: nothing of the kind was offered, or a table or page that may not be read.
            WorldMoveError: the descriptors can't be had or mapped.
        """
        begin = self._begin
        if begin.socket is None or begin.token is None:
            raise FramingError("begin names no socket for descriptors, the local path needs one")
        fds = await fetch(begin.socket, begin.token, begin.descriptors, self._timeout_ms)
        try:
            extents = len(begin.extent_bytes)
            holding = foreign_memory(self._hello.manifest, begin, fds[:extents])
            shown = ShownTable(fds[extents], holding.leaf_map.count) if begin.table else None
            source = Reader(holding, self._services.executors, self._hello.seed)
            await self._map(source, target.memory)
            try:
                sign = await self._sign(target, fds[-1]) if begin.page else None
            except BaseException:
                await source.close()
                raise
            path = LocalPath(source, target, sign)
            if shown is not None:
                path.shown = shown
                del fds[extents]  # the path closes it
        finally:
            close_all(fds)
        return path

    async def _map(self, source: Reader, target: Holding) -> None:
        """Opens `source` towards `target`; what came of it is remembered of these GPUs."""
        reaches, pairs = self._services.reaches, travelled(self._hello.manifest, target.manifest)
        try:
            await source.open(writable=False, towards=target)
        except ValidationError as error:
            if not reaches.refused(pairs, error.message, time.monotonic()):
                raise
            why = reaches.why_not(pairs, time.monotonic())
            raise ValidationError(f"path 'local' cannot be had: {why}", field="path") from error
        reaches.mapped(pairs)

    async def _sign(self, target: Reader, page: int) -> Sign | None:
        """Shows the source's page to the devices of `target`, if all of them can look."""
        devices = {extent.device for extent in target.memory.extents}
        pools = [self._services.executors.of(device) for device in sorted(devices)]
        return await Sign.open(page, pools) if all(pool.arms for pool in pools) else None

    async def staged(self, target: Reader) -> Path:
        """Leases lanes into `target`'s memory and connects them to the source's.

        Raises:
            FramingError: no lane was offered.
            WorldMoveError: a lane can't be had or connected; none is left then.
        """
        if not self._begin.lanes:
            raise FramingError("begin offers no lanes, the staged path needs one")
        if needs_ring(target.memory):
            return await self._through_rings(target)
        services, memory, lanes = self._services, target.memory, []
        extents = [(fd, extent.nbytes) for fd, extent in zip(memory.fds, memory.extents, strict=True)]
        try:
            for offer in self._begin.lanes[: services.settings.lanes]:
                lane = await services.lanes.lease(
                    self._hello.move_id, extents, regions_of(memory), writable=True
                )
                lanes.append(lane)
                await lane.connect(offer.host, offer.port, offer.token, self._timeout_ms)
        except BaseException:
            for lane in lanes:
                lane.abort()
            raise
        return StagedPath(lanes, self._pass(services.intake.gate))

    def _pass(self, gate: Gate) -> Pass:
        hello = self._hello
        return gate.join(hello.move_id, hello.source, self._services.intake.due_s(hello.move_id))

    async def _through_rings(self, target: Reader) -> Path:
        services = self._services
        leased: list[RingLane] = []
        stage = Stage(target, services.executors)
        try:
            for offer in self._begin.lanes[: services.settings.lanes]:
                one = await lease(
                    services.rings, services.lanes, self._hello.move_id, target.memory, writable=True
                )
                leased.append(one)
                await one.lane.connect(offer.host, offer.port, offer.token, self._timeout_ms)
        except BaseException:
            path = RingPath(leased, stage, self._pass(services.intake.gate), services.rings)
            path.abort()
            await asyncio.shield(asyncio.ensure_future(path.quiet()))
            raise
        return RingPath(leased, stage, self._pass(services.intake.gate), services.rings)
