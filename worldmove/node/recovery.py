"""What a new incarnation does with the slots that the former one left with the keeper.

Every slot comes back *fenced*: its worker generates on if it was generating, and stands still if it
stood. Only the session's record says what happens next, so the ledger is asked until it answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from worldmove.driver import Services
from worldmove.errors import LedgerError, LostRaceError, WorldMoveError
from worldmove.hosting.host import Host
from worldmove.hosting.slots import Slot
from worldmove.ledger import records
from worldmove.ledger.records import SessionRecord
from worldmove.page.messages import Ended, Moved
from worldmove.reading import Reader
from worldmove.sessions import SessionBook

RETRY_S = 0.2
log = structlog.get_logger(__name__)


class Recovery:
    """Settles the slots of a former incarnation, each by its session's record."""

    def __init__(self, services: Services, host: Host, book: SessionBook) -> None:
        self._services = services
        self._host = host
        self._book = book

    async def settle(self, slot: Slot) -> None:
        """Decides one slot; returns when it is a session or standby of this node again, or gone."""
        while True:
            try:
                done = await (self._standby(slot) if slot.session_id is None else self._session(slot))
            except LostRaceError:
                continue
            except LedgerError as error:
                log.warning("ledger does not answer; the slot stays fenced", slot=slot.id, error=str(error))
                done = False
            if done:
                return
            await asyncio.sleep(RETRY_S)

    async def _session(self, slot: Slot) -> bool:
        ledger, claim = self._services.ledger, self._services.claim
        record = await ledger.get(slot.id)
        if record is None or record.phase == "ended":
            self._host.close_slot(slot, Ended("the session has ended"))
            return True
        if record.move is not None and record.phase in ("moving", "committed"):
            record = await self._unfinished(slot, record)
        if record.owner != claim.name or record.epoch < slot.ranks.page.epoch:
            self._host.close_slot(slot, Moved(record.owner, record.endpoint))
            return True
        if record.phase == "committed":
            return False
        record = await self._retaken(record)
        slot.ranks.page.epoch = record.epoch
        self._book.add(slot, record)
        slot.ranks.unfence()
        return True

    async def _unfinished(self, slot: Slot, record: SessionRecord) -> SessionRecord:
        """A move of the former incarnation: aborted if it can be, reclaimed if nobody adopts."""
        move = record.move
        if move is None:
            return record
        ledger, claim = self._services.ledger, self._services.claim
        record = await ledger.settle(slot.id, move.move_id)
        deadline = time.monotonic() + self._services.settings.peer_timeout_ms / 1000
        while record.phase == "committed" and move.source == claim.name:
            if time.monotonic() >= deadline:
                back = records.reclaim(record, claim)
                await ledger.swap(record, back)
                return back
            await asyncio.sleep(RETRY_S)
            record = await ledger.get(slot.id) or record
        return record

    async def _retaken(self, record: SessionRecord) -> SessionRecord:
        claim = self._services.claim
        if record.incarnation == claim.incarnation:
            return record
        mine = records.retake(record, claim)
        await self._services.ledger.swap(record, mine)
        return mine

    async def _standby(self, slot: Slot) -> bool:
        """A standby that was promised to a move is wiped, unless the move was committed to it."""
        if slot.bound is None:
            slot.ranks.unfence()
            return True
        record = await self._of_move(slot.bound)
        if record is not None:
            record = await self._services.ledger.settle(record.session_id, slot.bound)
        move_id, mine = slot.bound, self._services.claim
        if record is not None and record.owner == mine.name:
            fate = records.fate(record, move_id)
            if fate == "committed":
                adopted = records.adopt(record, mine, endpoint=slot.manifest.endpoint)
                await self._services.ledger.swap(record, adopted)
                record, fate = adopted, "adopted"
            if fate in ("adopted", "released"):
                await self._adopt(slot, record)
                return True
        await self._wipe(slot)
        self._host.unbind(slot, move_id)
        slot.ranks.unfence()
        return True

    async def _adopt(self, slot: Slot, record: SessionRecord) -> None:
        record = await self._retaken(record)
        self._host.adopt(slot, record.session_id, record.epoch, slot.manifest, slot.seed)
        self._book.add(slot, record)
        slot.ranks.unfence()

    async def _of_move(self, move_id: str) -> SessionRecord | None:
        after: str | None = None
        while True:
            page = await self._services.ledger.sessions(after)
            for record in page:
                if move_id in (record.last_move_id, record.move.move_id if record.move else None):
                    return record
            if not page:
                return None
            after = page[-1].session_id

    async def _wipe(self, slot: Slot) -> None:
        with slot.pinned() as holding:
            reader = Reader(holding, self._services.executors, slot.seed)
            await reader.open()
            try:
                await reader.fill(0)
            finally:
                await reader.close()


async def recover(
    services: Services, host: Host, book: SessionBook, spawn: Callable[[str, Recovery, Slot], None]
) -> int:
    """Takes over what the keeper holds; each slot is then settled beside the others. Returns how many."""
    recovery = Recovery(services, host, book)
    try:
        slots = await host.recover()
    except WorldMoveError as error:
        log.warning("the keeper's slots cannot be taken over", error=str(error))
        return 0
    for slot in slots:
        spawn(slot.id, recovery, slot)
    return len(slots)
