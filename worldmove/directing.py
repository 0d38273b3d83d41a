"""The *direct* path: from GPU to GPU by UCX, over one lane for each GPU that the session lies on.

A source lane serves the regions of its own GPU; all of them go to one GPU at the destination, where the other
lane lands them. What lies on the host, or goes from one GPU to several, is left to the staged path.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import structlog

from worldmove import messages as m
from worldmove.config import Settings
from worldmove.errors import SlowPathError, ValidationError, WorldMoveError
from worldmove.executor.messages import Stop
from worldmove.gate import Pass
from worldmove.hosting.memory import Holding
from worldmove.manifest import Manifest, Span
from worldmove.offering import OnLost
from worldmove.page.control import RankState
from worldmove.page.looking import stop_words
from worldmove.paths import StagedPath
from worldmove.tasks import each
from worldmove.transport import lane_messages as said
from worldmove.transport.framing import UNSEEN
from worldmove.transport.lane_messages import Wish
from worldmove.transport.pool import Lane, LanePool, LaneRegion, mint_token

log = structlog.get_logger(__name__)
BATCH_BYTES = 256 << 20
WIDTH = 32
"""Batches under way on a lane: what the rings hold, and enough behind it that no slot waits for the node."""
FAILED_S = 60.0
"""For so long a path that could not be opened is not chosen by itself: a trial may cost its move seconds."""


class DirectRates:
    """What bare transfers from each peer have brought, in 10⁹ bit/s; remembered until the node ends."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}

    def of(self, peer: str, now: float) -> float | None:
        """The last one that was measured; for a while after the path could not be opened 0; `None`: none."""
        failed_at = self._failed_at.get(peer)
        if failed_at is not None and now - failed_at < FAILED_S:
            return 0.0
        return self._rates.get(peer)

    def note(self, peer: str, gbps: float) -> None:
        """Keeps a rate."""
        self._failed_at.pop(peer, None)
        self._rates[peer] = gbps

    def failed(self, peer: str, now: float) -> None:
        """The path could not be opened; what was measured before says nothing any more."""
        self._rates.pop(peer, None)
        self._failed_at[peer] = now


DirectLanes = Mapping[str, LanePool]
"""The direct lanes of a node, by the UUID of their GPU."""


def floor(settings: Settings) -> float:
    """The least that the path must bring, in 10⁹ bit/s."""
    return max(settings.min_gbps, settings.direct_min_gbps)


def wish(settings: Settings) -> Wish:
    """How this node's lanes are to carry what they pull."""
    return Wish(settings.direct_chunk, settings.direct_depth, settings.direct_landing)


def reachable(memory: Holding, lanes: DirectLanes) -> bool:
    """Whether all of it lies on GPUs that have lanes."""
    return all(extent.device in lanes for extent in memory.extents)


async def lease(
    lanes: DirectLanes, move_id: str, memory: Holding, device: str, regions: Sequence[int], *, writable: bool
) -> Lane:
    """A direct lane of `device` for some regions, by their numbers, all of which lie there.

    Raises:
        WorldMoveError: see `LanePool.lease`; nothing is left then.
    """
    numbers = [number for number, extent in enumerate(memory.extents) if extent.device == device]
    extents = [(memory.fds[number], memory.extents[number].nbytes) for number in numbers]
    rows = []
    wanted = set(regions)
    for number, (place, region) in enumerate(zip(memory.places, memory.manifest.regions, strict=True)):
        here = numbers.index(place.extent) if number in wanted else -1
        rows.append(LaneRegion(here, place.offset if number in wanted else 0, region.nbytes))
    return await lanes[device].lease(move_id, extents, rows, writable=writable)


def by_device(memory: Holding) -> dict[str, list[int]]:
    """The numbers of the regions on each device."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(memory.places):
        found[memory.extents[place.extent].device].append(number)
    return dict(found)


def pairs(theirs: Manifest, mine: Holding) -> dict[str, tuple[str, list[int]]]:
    """Where the regions of each of the source's devices go: one device here, and their numbers.

    Raises:
        ValidationError: those of one device go to several.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for number, (region, place) in enumerate(zip(theirs.regions, mine.places, strict=True)):
        device = mine.extents[place.extent].device
        here, numbers = found.setdefault(region.device, (device, []))
        if here != device:
            raise ValidationError(
                f"regions of {region.device!r} go to {here!r} and {device!r}; one is allowed", field="path"
            )
        numbers.append(number)
    return found


def fits(theirs: Manifest, mine: Holding, lanes: DirectLanes) -> bool:
    """Whether direct lanes can bring all of a session to this memory."""
    try:
        pairs(theirs, mine)
    except ValidationError:
        return False
    return reachable(mine, lanes)


class DirectPath(StagedPath):
    """Pulls over one lane for each GPU of the source, under grants of the node's gate.

    Args:
        lanes: connected. of_region: which of them brings each region.
        gate: see `StagedPath`.
        gbps: what the slowest of them brought when it was opened.

    Attributes:
        ahead: whether bytes may be asked for before the world stands; they come under no grant.
        began: when a lane heard that the world stands; monotonic seconds.
    """

    name = "direct"
    ahead = False

    def __init__(self, lanes: Sequence[Lane], of_region: Mapping[int, Lane], gate: Pass, gbps: float) -> None:
        super().__init__(lanes, gate)
        self._of_region = dict(of_region)
        self.gbps, self.rate = gbps, gbps * 1.25e8
        self.width = WIDTH * len(lanes)
        self.began: float | None = None
        self._seen: set[int] = set()
        for lane in lanes:
            lane.on_stood = self._on_stood

    @property
    def batch_bytes(self) -> int:
        """What a grant should have at this moment."""
        return self._gate.batch_bytes(BATCH_BYTES, len(self._lanes))

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:  # noqa: ARG002 - see `stand`
        """Brings the spans, each over the lane of its region."""
        async with self._gate.grant(sum(span.length for span in spans)):
            await self._pulled(spans, ahead=False)

    async def pull_ahead(self, spans: Sequence[Span]) -> None:
        """Asks for spans of a world that will stand: the source's lanes send them as soon as it does.

        A grant would be out all the while; what comes at once is bounded by the lanes' rings.
        """
        await self._pulled(spans, ahead=True)

    async def _pulled(self, spans: Sequence[Span], *, ahead: bool) -> None:
        groups: defaultdict[Lane, list[Span]] = defaultdict(list)
        for span in spans:
            groups[self._of_region[span.region]].append(span)
        await each([_pull(lane, some, ahead=ahead) for lane, some in groups.items()])

    def go(self) -> None:
        """The world stands, the source's node says so: what was asked for ahead is due."""
        for lane in self._lanes:
            lane.tell(said.Go())

    async def release(self) -> None:
        """See `StagedPath.release`; when it began is told by the clock of the nodes' `steps`."""
        await super().release()
        if self.began is not None:
            log.info("direct-began", at_ms=round(self.began * 1000, 3), blocks=sorted(self._seen - {UNSEEN}))

    async def ended(self) -> None:
        """Nothing begins by itself here: whoever has asked waits for it."""

    async def stood_at(self, block: int) -> bool:
        """Whether every lane that saw the world stand by itself saw it at this block."""
        return self._seen <= {block, UNSEEN}

    def _on_stood(self, block: int) -> None:
        self.began = self.began or time.monotonic()
        self._seen.add(block)


async def _pull(lane: Lane, spans: Sequence[Span], *, ahead: bool) -> None:
    await lane.pull(spans, ahead=ahead)


class DirectServing:
    """The source's direct lanes of one move.

    Args:
        lanes: of the node.
    """

    def __init__(self, lanes: DirectLanes) -> None:
        self._pools = lanes
        self.lanes: list[Lane] = []
        self._held = self._live = False
        self._page: int | None = None
        self._begun: list[asyncio.Future[None]] = []

    def hold(self, page: int | None) -> None:
        """Before `begin`: nothing is read before the world stands, as `page` shows, or `go` says."""
        self._held, self._page = True, page

    def show(self, page: int | None) -> None:
        """Before `begin`, of a world that is copied live: where `hold_lanes` lets lanes look."""
        self._live, self._page = True, page

    async def hold_lanes(self) -> None:
        """After the last live round: nothing more is read before the world stands, as `hold`.

        Raises:
            WorldMoveError: a lane is gone.
        """
        await each([lane.hold() for lane in self.lanes])
        self._held = True

    def look(self) -> None:
        """The world is asked to stop: lanes that have a page look at it from now on."""
        if self._page is not None:
            self._tell(said.Look())

    def go(self) -> None:
        """The world stands."""
        if self._held:
            self._tell(said.Go())

    def _tell(self, command: said.Look | said.Go) -> None:
        for lane in tuple(self.lanes):
            lane.tell(command)

    async def begun(self, seconds: float) -> None:
        """Returns when held lanes have their first messages on their way, or `seconds` later."""
        if self._begun:
            await asyncio.wait(self._begun, timeout=seconds)

    async def begin(
        self, move_id: str, memory: Holding, host: str, on_lost: OnLost, spare: tuple[m.LaneOffer, ...]
    ) -> m.Begin:
        """What the destination is offered; with `spare` lanes of another path that alone if need be, and why.

        Raises:
            WorldMoveError: as `offer`, where there is no other path.
        """
        try:
            return m.Begin(direct=await self.offer(move_id, memory, host, on_lost), lanes=spare)
        except WorldMoveError as error:
            if not spare:
                raise
            return m.Begin(lanes=spare, reason=error.message[: m.MAX_TEXT])

    async def offer(
        self,
        move_id: str,
        memory: Holding,
        host: str,
        on_lost: OnLost,
    ) -> tuple[m.LaneOffer, ...]:
        """A lane for each device of the memory, serving; `release` or `end` gives them back.

        Args:
            move_id: of the move.
            memory: of the session.
            host: where the other node reaches this one's lanes.
            on_lost: called when one of them fails.

        Raises:
            WorldMoveError: one can't be had; those that there are stay until `end`.
        """
        offers = []
        for device, regions in by_device(memory).items():
            lane = await lease(self._pools, move_id, memory, device, regions, writable=False)
            self.lanes.append(lane)
            lane.lost.add_done_callback(on_lost)
            token = mint_token()
            if self._held:
                await self._hold(lane)
            elif self._live:
                await self._watched(lane)
            await lane.serve(token, held=self._held)
            offers.append(m.LaneOffer(host, lane.port, token, device))
        return tuple(offers)

    async def _hold(self, lane: Lane) -> None:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun.append(begun)

        def stood(_block: int) -> None:
            if not begun.done():
                begun.set_result(None)

        lane.on_stood = stood
        await self._watched(lane)

    async def _watched(self, lane: Lane) -> None:
        if self._page is not None:
            words = stop_words(self._page)
            stop = Stop(0, words.pause_at, words.ranks, RankState.STOPPED)
            await lane.watch(self._page, words.nbytes, stop)

    async def end(self) -> None:
        """Ends the lanes' processes; returns when nothing of them reads memory any more."""
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            lane.abort()
        await asyncio.gather(*(lane.gone() for lane in lanes))

    async def release(self) -> None:
        """Ends the leases cleanly; lanes that don't end so are ended."""
        lanes, self.lanes = self.lanes, []
        await asyncio.gather(*(lane.release() for lane in lanes))


async def connect(
    lanes: DirectLanes,
    hello: m.Hello,
    offers: Sequence[m.LaneOffer],
    memory: Holding,
    gate: Callable[[], Pass],
    *,
    floor_gbps: float,
    timeout_ms: float,
    wish: Wish,
) -> DirectPath:
    """Connects this node's lanes to those that were offered, and measures.

    Raises:
        SlowPathError: a lane brings less than `floor_gbps`; the lanes at both ends are idle again.
        WorldMoveError: a lane can't be had or connected; none is left then.
    """
    wanted = pairs(hello.manifest, memory)
    by_name = {offer.device: offer for offer in offers}
    lacking = sorted(wanted.keys() - by_name.keys())
    if lacking or not reachable(memory, lanes):
        raise ValidationError(
            f"there are no direct lanes for {lacking or 'the devices that it goes to'}", field="path"
        )
    made: list[Lane] = []
    of_region: dict[int, Lane] = {}
    slowest = float("inf")
    try:
        for theirs, (device, regions) in wanted.items():
            offer = by_name[theirs]
            lane = await lease(lanes, hello.move_id, memory, device, regions, writable=True)
            made.append(lane)
            slowest = min(slowest, await lane.connect(offer.host, offer.port, offer.token, timeout_ms, wish))
            of_region.update(dict.fromkeys(regions, lane))
    except BaseException:
        for lane in made:
            lane.abort()
        raise
    if slowest < floor_gbps:
        await asyncio.gather(*(lane.release() for lane in made))
        raise SlowPathError(
            f"path direct brought {slowest:.2f} Gb/s between lanes, and {floor_gbps:g} is the least that is "
            "taken; UCX has found neither NVLink nor RDMA from GPU to GPU",
            gbps=slowest,
        )
    return DirectPath(made, of_region, gate(), slowest)
