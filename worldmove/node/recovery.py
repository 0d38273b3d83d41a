"""What a new incarnation does with the slots that the former one left with the keeper.

Every slot comes back *fenced*: its worker generates on if it was generating, and stands still if it
stood. Only the session's record says what happens next, so the ledger is asked until it answers. A record
that can't be true, because the ledger was lost or is older than the world, is left to an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from worldmove.driver import Services
from worldmove.errors import LedgerError, LostRaceError, WorldMoveError
from worldmove.hosting.host import Host
from worldmove.hosting.slots import Slot
from worldmove.ledger import records
from worldmove.ledger.records import MoveRef, SessionRecord
from worldmove.node import verdicts
from worldmove.node.traces import leave_trace, notes, standing
from worldmove.page.messages import Ended, Moved
from worldmove.reading import Reader
from worldmove.sessions import SessionBook
from worldmove.views import ENDED_STATES, Receipt

RETRY_S = 0.2
AWAY_TIMES = 10
"""How long a standby's worker may take to find the node again, in times that a peer may be silent."""
OPERATOR_S = 2.0
"""How often a record is looked at again that only an operator can settle."""
SETTLING = 8
"""Sessions that are settled at once: the lease and everybody else want the ledger, too."""
LOST_TOLD = 100
"""How many lost sessions are named in the log."""
log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Unsettled:
    """A slot that waits for its record.

    Attributes:
        reason: why the record does not settle it, where only an operator can.
        look: set when the record has changed. settled: when the slot is decided.
    """

    slot: Slot
    reason: str | None = None
    look: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Recovery:
    """Settles the slots of a former incarnation, each by its session's record.

    Args:
        services: of the node.
        host: has the slots.
        book: gets the sessions.
        alone: returns when nothing of a former incarnation can write into memory any more.

    Attributes:
        unsettled: slots that still wait, by the id of their session or standby.
    """

    def __init__(
        self, services: Services, host: Host, book: SessionBook, alone: Callable[[], Awaitable[None]]
    ) -> None:
        self.unsettled: dict[str, Unsettled] = {}
        self._services = services
        self._host = host
        self._book = book
        self._alone = alone
        self._turns = asyncio.Semaphore(SETTLING)
        self._notes: list[Receipt] | None = None

    async def settle(self, slot: Slot) -> None:
        """Decides one slot; returns when it is a session or standby of this node again, or gone."""
        # Of a move within this node both ends may be called after the session.
        name = slot.key if slot.id in self.unsettled else slot.id
        waiting = self.unsettled[name] = Unsettled(slot)
        try:
            while not await self._tried(waiting):
                waiting.look.clear()
                try:
                    async with asyncio.timeout(OPERATOR_S if waiting.reason else RETRY_S):
                        await waiting.look.wait()
                except TimeoutError:
                    continue
        finally:
            del self.unsettled[name]
            waiting.settled.set()
        if self._host.standbys.get(slot.id) is slot:
            await self._await_worker(slot)

    def fenced(self, session_id: str) -> Slot | None:
        """The slot of a session that no record has settled yet; one that has only to be let go is none."""
        waiting = self.unsettled.get(session_id)
        return waiting.slot if waiting is not None and waiting.slot.ranks.state == "fenced" else None

    async def gone(self, session_id: str, timeout_s: float) -> None:
        """Waits until a slot that a former incarnation left is decided, and a worker that it has knows.

        Workers look for their node about twice a second. Nothing is raised after `timeout_s`.
        """
        waiting = self.unsettled.get(session_id)
        if waiting is not None and waiting.reason is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiting.settled.wait()

    async def _await_worker(self, slot: Slot) -> None:
        """Forgets a standby to which no worker comes back: it is of no use to anybody else.

        Its worker died with the former incarnation, or never had its tickets.
        """
        await asyncio.sleep(AWAY_TIMES * self._services.settings.peer_timeout_ms / 1000)
        if self._host.standbys.get(slot.id) is slot and not slot.ranks.attended and slot.bound is None:
            log.warning("the standby's worker has not come back", standby=slot.id)
            self._host.close_slot(slot, Ended("its worker has not come back to its node"))

    async def _tried(self, waiting: Unsettled) -> bool:
        slot = waiting.slot
        try:
            if slot.session_id is None:
                return await self._standby(slot)
            async with self._turns:
                return await self._session(waiting)
        except LostRaceError:
            waiting.look.set()
        except LedgerError as error:
            log.warning("ledger does not answer; the slot stays fenced", slot=slot.id, error=str(error))
        return False

    async def _session(self, waiting: Unsettled) -> bool:
        slot, claim = waiting.slot, self._services.claim
        record = await self._services.ledger.get(slot.id)
        found = verdicts.of_session(record, slot.ranks.page.epoch, claim)
        if record is None or found == "doubted":
            return self._doubted(waiting, record)
        if found == "unfinished":
            # It may take the peer's time; the others need not wait for it.
            self._turns.release()
            try:
                record = await self._unfinished(slot, record)
            finally:
                await self._turns.acquire()
            found = verdicts.of_settled(record, claim)
        if found == "ended":
            return self._dismissed(slot, Ended("the session has ended"))
        others = self._others(slot) if found == "mine" else []
        if found == "moved" or verdicts.superseded(record, slot.ranks.page.epoch, others):
            return self._dismissed(slot, Moved(record.owner, record.endpoint))
        if found == "wait":
            return False
        if verdicts.behind(record, others):
            return self._doubted(waiting, record)
        await self._close_notes(record)
        record = await self._retaken(record)
        slot.ranks.page.epoch = record.epoch
        self._book.add(slot, record)
        slot.ranks.unfence()
        return True

    async def _close_notes(self, record: SessionRecord) -> None:
        """Before a world can move again: moves that a former incarnation noted and that never began."""
        ledger, claim = self._services.ledger, self._services.claim
        if self._notes is None:
            self._notes = await notes(ledger, claim)
        for left in self._notes:
            if left.session_id == record.session_id:
                found = standing(left, record, over=True)
                if found.state in ENDED_STATES:
                    await ledger.put_receipt(found)

    def _others(self, slot: Slot) -> list[tuple[int, str | None]]:
        """The slots that may have taken a session over within this node, for `verdicts`.

        Of a session's own the latest is enough, which the host knows: all slots are looked through by nobody,
        as there may be thousands, and each is asked for.
        """
        latest = self._host.sessions.get(slot.id, slot)
        return [
            *([(latest.ranks.page.epoch, latest.bound)] if latest is not slot else []),
            *((0, standby.bound) for standby in self._host.standbys.values() if standby.bound is not None),
        ]

    def _dismissed(self, slot: Slot, answer: Moved | Ended) -> bool:
        """Ends a slot here; not before its workers have come and heard it, who may still generate."""
        slot.ranks.finish(answer)
        if any(slot.pages.occupied(rank) for rank in range(slot.pages.page.ranks)):
            return False
        self._host.close_slot(slot, answer)
        return True

    def _doubted(self, waiting: Unsettled, record: SessionRecord | None) -> bool:
        """A record that is older than the world: the world stays as it is until an operator has decided."""
        slot = waiting.slot
        known = self._host.latest_epoch(slot)
        if record is None and known == 0:
            self._host.close_slot(slot, Ended("the session was never registered"))
            return True
        found = "knows nothing of it" if record is None else f"has it at epoch {record.epoch}"
        reason = f"the ledger {found}, its memory is of epoch {known}: the ledger was lost or set back"
        if waiting.reason != reason:
            log.error(
                "session stays fenced; see `worldmove sessions resolve`", session=slot.id, reason=reason
            )
        waiting.reason = reason
        return False

    async def _unfinished(self, slot: Slot, record: SessionRecord) -> SessionRecord:
        """A move of the former incarnation: aborted if it can be, reclaimed if nobody adopts."""
        move = record.move
        if move is None:
            return record
        record = await self._decided(slot, move)
        await leave_trace(self._services, record, move, slot.manifest)
        return record

    async def _decided(self, slot: Slot, move: MoveRef) -> SessionRecord:
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
        """The record in this incarnation's name, out of the move that brought the world here."""
        claim, ledger = self._services.claim, self._services.ledger
        if record.incarnation != claim.incarnation:
            mine = records.retake(record, claim)
            await ledger.swap(record, mine)
            record = mine
        if record.phase == "adopted":
            closed = records.release(record, claim)
            await ledger.swap(record, closed)
            record = closed
        return record

    async def _standby(self, slot: Slot) -> bool:
        """A standby that was promised to a move is wiped, unless the move was committed to it."""
        # Lanes and executors of a stopped incarnation would write into what is wiped and lent out again.
        await self._alone()
        if slot.bound is None:
            slot.ranks.unfence()
            return True
        record = await self._of_move(slot.bound)
        if record is not None:
            record = await self._services.ledger.settle(record.session_id, slot.bound)
        move_id, mine = slot.bound, self._services.claim
        standing = verdicts.of_standby(record, move_id, mine)
        if record is not None and standing != "wipe":
            if standing == "adopt":
                adopted = records.adopt(record, mine, endpoint=slot.manifest.endpoint)
                await self._services.ledger.swap(record, adopted)
                record = adopted
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

    async def found(self) -> list[Slot]:
        """What the keeper holds; each slot is then to be settled, beside the others."""
        try:
            return await self._host.recover()
        except WorldMoveError as error:
            log.warning("the keeper's slots cannot be taken over", error=str(error))
            return []

    async def lost(self) -> set[str]:
        """Sessions that the ledger says are this node's, and whose memory nobody here holds any more.

        The host was started again, or all on it has ended; or only a worker is left, who will hand it back.
        """
        missing: set[str] = set()
        try:
            missing = await self._missing()
        except LedgerError as error:
            log.warning("lost sessions are not known", error=str(error))
        for name in sorted(missing)[:LOST_TOLD]:
            log.error("session is lost: nobody holds its memory, unless a worker hands it back", session=name)
        return missing

    async def _missing(self) -> set[str]:
        missing: set[str] = set()
        after: str | None = None
        while True:
            page = await self._services.ledger.sessions(after)
            missing |= {record.session_id for record in page if self.is_lost(record)}
            if not page:
                return missing
            after = page[-1].session_id

    def is_lost(self, record: SessionRecord) -> bool:
        """Whether the record says that this node has the session, and nobody here holds its memory."""
        if record.owner != self._services.claim.name or record.session_id in self._host.sessions:
            return False
        moves = {record.last_move_id, record.move.move_id if record.move else None}
        bound = {waiting.slot.bound for waiting in self.unsettled.values()} - {None}
        return not moves & bound
