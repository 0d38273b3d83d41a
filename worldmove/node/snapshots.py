"""Boundary snapshots: a spare copy of a session's state, for the death of a worker inside a block.

The world stands at a boundary while the executors copy its memory: that is the price, paid every
`snapshot_every` blocks by those sessions that asked for it. When the workers of such a session have died and
left torn memory, it is brought back to the boundary of the copy, and another worker can take it up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from worldmove.driver import Services
from worldmove.errors import NoMemoryError, ProcessLostError, WorldMoveError
from worldmove.hosting.host import Host
from worldmove.hosting.slots import Slot
from worldmove.hosting.spare import Spare
from worldmove.reading import Reader
from worldmove.sessions import Session, SessionBook
from worldmove.tasks import Tasks

LOOK_S = 0.02, 1.0
"""How often a session's block is looked at, at most and at least: no event tells of it."""
AGAIN_S = 1.0
NO_MEMORY_S = 10.0
log = structlog.get_logger(__name__)


class Snapshots:
    """Takes the snapshots of a node's sessions, and brings torn worlds back.

    Args:
        services: of the node.
        host: has the slots.
        alone: returns when nothing of a former incarnation can write into memory any more.
        on_taken: told how many milliseconds a world stood for a snapshot.
    """

    def __init__(
        self,
        services: Services,
        host: Host,
        alone: Callable[[], Awaitable[None]],
        on_taken: Callable[[float], None],
    ) -> None:
        self._services = services
        self._host = host
        self._alone = alone
        self._on_taken = on_taken
        self._tasks = Tasks(lambda error: log.error("snapshots ended", exc_info=error))

    def watch(self, book: SessionBook, session: Session) -> None:
        """Looks after a session from now on, if it asked for that."""
        if session.slot.manifest.snapshot_every:
            self._tasks.spawn(self._keep(book, session), name=f"snapshots {session.id}")

    async def reserve(self, slot: Slot) -> None:
        """Allocates the spare copy that a session asks for, so that it is refused where there is no memory.

        Raises:
            NoMemoryError: it does not fit.
            ProcessLostError: nobody can hold it.
        """
        if slot.manifest.snapshot_every and (slot.spare is None or not slot.spare.fits(slot.manifest)):
            # What does not fit any more is of no use, and in the way of what would.
            slot.give_spare(None, self._host.arenas)
            slot.give_spare(await Spare.make(slot.manifest, self._host.arenas), self._host.arenas)
            await self._host.keep(slot)

    async def close(self) -> None:
        """Ends; copies that are being made count as none."""
        await self._tasks.cancel()

    async def _keep(self, book: SessionBook, session: Session) -> None:
        while book.get(session.id) is session:
            try:
                await self.mend(session)
                pause_s = self._left_s(session)
                if pause_s == 0.0:
                    await self._take(session)
            except NoMemoryError as error:
                log.warning("no memory for a snapshot", session=session.id, reason=error.message)
                pause_s = NO_MEMORY_S
            except WorldMoveError as error:
                log.info("no snapshot now", session=session.id, code=error.code, reason=error.message)
                pause_s = AGAIN_S
            await asyncio.sleep(pause_s)

    def _left_s(self, session: Session) -> float:
        """0 when a snapshot is due; otherwise for how long it is not."""
        slot, (least, most) = session.slot, LOOK_S
        if session.move is not None or session.state != "live":
            return most
        spare = slot.spare
        if spare is None or spare.block is None or not spare.fits(slot.manifest):
            return 0.0
        left = spare.block + slot.manifest.snapshot_every - slot.ranks.block - 1
        return 0.0 if left <= 0 else min(max(left * slot.manifest.block_ms / 2000, least), most)

    async def _take(self, session: Session) -> None:
        slot = session.slot
        await self.reserve(slot)
        spare = slot.spare
        if spare is None:
            return
        async with spare.turn:
            with slot.pinned() as holding:
                world = Reader(holding, self._services.executors, slot.seed)
                copy = Reader(spare.holding, self._services.executors, slot.seed)
                try:
                    await world.open(writable=False, towards=spare.holding)
                    await copy.open()
                    await self._copy(session, world, copy, spare)
                finally:
                    await world.close()
                    await copy.close()

    async def _copy(self, session: Session, world: Reader, copy: Reader, spare: Spare) -> None:
        slot = session.slot
        pause = await slot.ranks.pause(max(5.0, 3 * slot.manifest.block_ms / 1000))
        try:
            if slot.holding is not world.memory or slot.spare is not spare:
                return
            spare.begin()
            await copy.copy_from(world, world.all_spans(), urgent=True)
            if pause.held:
                spare.commit(pause.block, pause.host_states)
                self._on_taken((time.monotonic() - pause.stopped_at) * 1000)
        finally:
            pause.resume()

    async def mend(self, session: Session) -> None:
        """Brings a world back to its snapshot, if its workers have died and left it torn.

        Raises:
            ProcessLostError: the executors died meanwhile; the snapshot is still there.
        """
        slot, spare = session.slot, session.slot.spare
        if spare is None or not self._torn(slot):
            return
        await self._alone()
        async with spare.turn:
            if spare.block is None or slot.spare is not spare or not self._torn(slot):
                return
            with slot.pinned() as holding:
                copy = Reader(spare.holding, self._services.executors, slot.seed)
                world = Reader(holding, self._services.executors, slot.seed)
                try:
                    await copy.open(writable=False, towards=holding)
                    await world.open()
                    await world.copy_from(copy, copy.all_spans(), urgent=True)
                finally:
                    await copy.close()
                    await world.close()
            slot.pages.go_back(spare.block, spare.host_states())
        log.warning("torn world brought back to its snapshot", session=session.id, block=spare.block)
        try:
            await self._host.keep(slot)
        except ProcessLostError as error:
            log.warning("the keeper does not know yet", session=session.id, reason=error.message)

    def _torn(self, slot: Slot) -> bool:
        ranks, spare = slot.ranks, slot.spare
        if spare is None or not spare.fits(slot.manifest) or ranks.state != "unattended":
            return False
        everybody = range(ranks.page.ranks)
        left = len(ranks.vacant) == len(everybody) and not any(map(slot.pages.occupied, everybody))
        return left and not ranks.consistent
