"""Opening a path at the destination: connecting lanes, or fetching descriptors, as the source has offered."""

from __future__ import annotations

from worldmove import messages as m
from worldmove.descriptors import fetch
from worldmove.driver import Services
from worldmove.errors import FramingError
from worldmove.hosting.memory import Holding
from worldmove.ipc import close_all
from worldmove.paths import LocalPath, Path, StagedPath, foreign_memory
from worldmove.reading import Reader
from worldmove.transport.pool import LaneRegion


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

    async def local(self, target: Reader) -> Path:
        """Maps the source's memory beside `target`'s.

        Raises:
            FramingError: nothing of the kind was offered.
            WorldMoveError: the descriptors can't be had or mapped.
        """
        begin = self._begin
        if begin.socket is None or begin.token is None:
            raise FramingError("begin names no socket for descriptors, the local path needs one")
        fds = await fetch(begin.socket, begin.token, len(begin.extent_bytes), self._timeout_ms)
        try:
            holding = foreign_memory(self._hello.manifest, begin, fds)
            source = Reader(holding, self._services.executors, self._hello.seed)
            await source.open(writable=False, towards=target.memory)
        finally:
            close_all(fds)
        return LocalPath(source, target)

    async def staged(self, memory: Holding) -> Path:
        """Leases lanes into `memory` and connects them to the source's.

        Raises:
            FramingError: no lane was offered.
            WorldMoveError: a lane can't be had or connected; none is left then.
        """
        services, lanes = self._services, []
        extents = [(fd, extent.nbytes) for fd, extent in zip(memory.fds, memory.extents, strict=True)]
        regions = [
            LaneRegion(place.extent, place.offset, region.nbytes)
            for place, region in zip(memory.places, memory.manifest.regions, strict=True)
        ]
        if not self._begin.lanes:
            raise FramingError("begin offers no lanes, the staged path needs one")
        try:
            for offer in self._begin.lanes[: services.settings.lanes]:
                lane = await services.lanes.lease(self._hello.move_id, extents, regions, writable=True)
                lanes.append(lane)
                await lane.connect(offer.host, offer.port, offer.token, self._timeout_ms)
        except BaseException:
            for lane in lanes:
                lane.abort()
            raise
        return StagedPath(lanes, services.gate)
