"""The source's memory during a move: offered over a path, read into leaf tables, let go of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import structlog
from msgspec.structs import replace

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.arming import Armed, Sign
from worldmove.digest import LeafTable
from worldmove.directing import DirectServing
from worldmove.driver import Services
from worldmove.errors import PeerError, WorldMoveError
from worldmove.hashing import RegionHashes
from worldmove.hosting.ranks import Pause
from worldmove.hosting.slots import Slot
from worldmove.offering import OnLost, Serving, descriptors_of
from worldmove.pacing import Duty
from worldmove.page.looking import open_to_look
from worldmove.reading import OnRead, Plan, Reader
from worldmove.staging import Stage, needs_ring

LITTLE = 0.5
"""Of a session: lanes that have no more to copy than this leave the GPU time to read the table at once."""
FEW_ARMED = 3
"""Parts of a table, 2 GiB each, that are armed on a device where rings or lanes need it, too."""
LANES_FIRST_S = 0.005
"""So long the digests of a world that stands let direct lanes go first, whose bytes take longer anyway."""


class Outbound:
    """The memory of one session that moves away.

    Args:
        services: of the node.
        slot: the session's. Its memory as it is now stays pinned until `free`.
        hello: what the move is.
        on_lost: called when a lane fails.
        on_direct_lost: called when a lane of the direct path does.
    """

    def __init__(
        self, services: Services, slot: Slot, hello: m.Hello, on_lost: OnLost, on_direct_lost: OnLost
    ) -> None:
        self._services = services
        self._slot = slot
        self._hello = hello
        self._on_lost = on_lost
        self._on_direct_lost = on_direct_lost
        self._log = structlog.get_logger().bind(move=hello.move_id, role="source")
        self._pins = contextlib.ExitStack()
        self._holding = self._pins.enter_context(slot.pinned())
        self._reader = Reader(self._holding, services.executors, slot.seed)
        stage = Stage(self._reader, services.executors) if needs_ring(self._holding) else None
        self._lanes = Serving(services.lanes, services.rings, stage)
        self._direct = DirectServing(services.direct)
        self._token: bytes | None = None
        self._local = False
        self._table: LeafTable | None = None
        self._plan: Plan | None = None
        self._armed: Armed | None = None
        self._hashes: RegionHashes | None = None

    @property
    def table(self) -> LeafTable:
        """What `read` writes into; a peer that wants it before it was offered a path is out of turn."""
        if self._table is None:
            raise PeerError("a table is wanted before the path was opened")
        return self._table

    async def offer(self, action: p.OfferPath) -> m.Begin:
        """Gets everything ready to be read and carried; what the destination is told.

        Raises:
            WorldMoveError: see `LanePool.lease`, `Rings.borrow` and `Reader.open`.
        """
        await self._reader.open()
        self._table = await self._reader.table()
        self._plan = self._reader.plan_read(self._table, self._reader.all_spans(), few=self._hello.live)
        await self._reader.prepare(self._plan)
        self._local = action.path == "local"
        if self._local:
            self._token = secrets.token_bytes(32)
            page = await self._arm()
            door = self._services.door
            door.offer(self._token, (*self._holding.fds, self._looked_at(self._table.fd), *page))
            begin = descriptors_of(self._holding, str(door.path), self._token, page=bool(page))
            return replace(begin, lanes=await self._spare(action.lanes))
        if self._hello.live:
            await self._arm()
        if action.path == "direct":
            spare = await self._serve(action.lanes) if action.lanes else ()
            show = self._direct.show if self._hello.live else self._direct.hold
            show(self._page())
            move_id, host = self._hello.move_id, self._host()
            return await self._direct.begin(move_id, self._holding, host, self._on_direct_lost, spare)
        return m.Begin(lanes=await self._serve(action.lanes))

    async def _spare(self, count: int) -> tuple[m.LaneOffer, ...]:
        """Lanes in case that descriptors are of no use; where none can be had it goes without."""
        try:
            return await self._serve(count) if count else ()
        except WorldMoveError as error:
            self._log.info("no lanes in case the local path fails", reason=error.message)
            await self._release_lanes()
            return ()

    async def _arm(self) -> tuple[int, ...]:
        """Arms the reading of a world that will stand; the page that shows it, for the destination too."""
        plan = self._reader.plan_read(self.table, self._reader.all_spans(), few=not self._local)
        page = self._page() if all(pool.arms for pool, _ in plan.parts) else None
        # Rings are filled by the same executor, whose places armed parts take until their worlds stand.
        if page is None or (not self._local and any(len(parts) > FEW_ARMED for _, parts in plan.parts)):
            return ()
        try:
            await self._reader.prepare(plan)
            sign = await Sign.open(page, [pool for pool, _ in plan.parts])
        except WorldMoveError as error:
            self._log.info("the table is read on the node's word", reason=error.message)
            return ()
        self._armed = Armed(plan, sign)
        return (page,)

    def _page(self) -> int | None:
        """A page that shows when the world stands, where it will and one can be seen."""
        pages = self._slot.pages
        if not self._slot.ranks.attended or pages.leaf is not None:
            return None
        return self._looked_at(pages.fds[0])

    def _looked_at(self, fd: int) -> int:
        """The same memory file for somebody who only reads it; closed with the move."""
        shown = open_to_look(fd)
        self._pins.callback(os.close, shown)
        return shown

    def _host(self) -> str:
        return self._services.lanes.host or urlsplit(self._services.url).hostname or "127.0.0.1"

    async def _serve(self, count: int) -> tuple[m.LaneOffer, ...]:
        hello, terms = self._hello, self._hello.terms or m.Terms()
        deadline_s = hello.deadline_ms / 1000
        nbytes = hello.manifest.nbytes + (terms.dirty_bytes_per_s or 0.0) * deadline_s
        self._lanes.limit(self._services.outlet.join(hello.move_id, int(nbytes), deadline_s))
        return await self._lanes.offer(count, hello.move_id, self._holding, self._host(), self._on_lost)

    async def keep_only(self, path: str | None) -> None:
        """The destination has taken this path: what was offered beside it goes."""
        self._local = path == "local"
        if path == "staged":
            await self._direct.end()
        else:
            await self._release_lanes()

    async def read(self, on_read: OnRead, *, urgent: bool, in_turns: bool, pause: Pause | None) -> None:
        """Reads everything into the table, or takes what was read by itself when the world stopped.

        Args:
            on_read: told (first leaf, count) of what is in the table.
            urgent: the world stands.
            in_turns: beside lanes that copy on the same devices, and need their turns there, the first ones.
            pause: in which the world stands, if it does.

        Raises:
            WorldMoveError: see `Reader.perform`.
        """
        table = self.table
        self._hashes = hashes = RegionHashes(self._reader, table) if pause is not None else None

        def noted(first: int, count: int) -> None:
            on_read(first, count)
            if hashes is not None:
                hashes.note(first, count)

        if self._armed is not None and pause is not None:
            self._armed.go()
            if await self._armed.stood_at(pause.block):
                noted(0, table.count)
                return
        plan, self._plan = self._plan, None
        if plan is None:
            plan = self._reader.plan_read(table, self._reader.all_spans(), few=self._hello.live)
        if in_turns and pause is not None:
            await self._direct.begun(LANES_FIRST_S)
        share = 1.0 if pause is not None else self._services.settings.live_share
        parts = plan.single_parts() if in_turns or share < 1 else [plan]
        seconds = await self._read_parts(parts, Duty(share), noted, urgent=urgent)
        nbytes = self._holding.leaf_map.total
        if pause is None:  # the next one may be that of a world that stands
            self._plan = self._reader.plan_read(table, self._reader.all_spans(), few=True)
        self._services.intake.note_digest("source", self._hello.manifest, nbytes, seconds)

    async def _read_parts(self, parts: Sequence[Plan], duty: Duty, noted: OnRead, *, urgent: bool) -> float:
        """Reads one after another, spaced as `duty` says; returns how long one was under way, in seconds."""
        busy = 0.0
        for some in parts:
            while (delay := duty.delay(time.monotonic())) > 0:  # noqa: ASYNC110 - only time passes
                await asyncio.sleep(delay)
            duty.begin(start := time.monotonic())
            await self._reader.perform(some, urgent=urgent, on_read=noted)
            duty.end(end := time.monotonic())
            busy += end - start
        return busy

    async def last_round(self) -> None:
        """No live round follows: direct lanes wait for the stop with what is pulled from now on.

        Raises:
            WorldMoveError: a lane is gone.
        """
        await self._direct.hold_lanes()

    def expect_stop(self, left_bytes: int) -> None:
        """The world is asked to stop now: what is armed waits for that.

        Args:
            left_bytes: as many are expected to be brought while it stands. Lanes that have much to copy need
                their turns on the GPU: there the table is read once they have begun.
        """
        self._direct.look()
        little = left_bytes <= LITTLE * self._hello.manifest.nbytes
        if self._armed is not None and (self._local or little):
            self._armed.start()

    def stands(self) -> None:
        """The world stands: its bytes go before those of worlds that generate."""
        self._direct.go()
        self._lanes.stand(self._hello.horizon_ms / 1000)

    async def root(self, pause: Pause) -> str:
        """The root of the paused world, from the table and its host states."""
        hashes = self._hashes or RegionHashes(self._reader, self.table)
        return self._sum_up(pause, await hashes.all())

    def root_at_once(self, pause: Pause) -> str | None:
        """The same without waiting, if the table is so small that it is hashed here."""
        digests = self._reader.small_digests(self.table)
        return None if digests is None else self._sum_up(pause, digests)

    def _sum_up(self, pause: Pause, digests: Sequence[bytes]) -> str:
        return self._reader.sum_up(
            digests,
            session_id=self._hello.session_id,
            epoch=self._hello.epoch,
            block=pause.block,
            host_states=pause.host_states,
        )

    def drop(self) -> None:
        """The move is given up: what is armed begins no more."""
        if self._armed is not None:
            self._armed.drop()

    async def end(self) -> None:
        """Ends the lanes' processes, then as `close`: nothing carries the memory any more."""
        await self._lanes.end()
        await self._direct.end()
        await self.close()

    async def close(self) -> None:
        """Takes the offer back; returns when nobody reads the memory for this move."""
        if self._token is not None:
            self._services.door.withdraw(self._token)
        await self._release_lanes()
        await self._direct.release()
        if self._armed is not None:
            await self._armed.close()
        await self._reader.close()

    async def _release_lanes(self) -> None:
        for error in await self._lanes.release():
            self._log.info("lane ended instead of being released", error=str(error))

    def free(self) -> None:
        """The memory is not the move's any more."""
        self._pins.close()
