"""The operator's ways out of what no record settles: sessions that stay fenced, and lost ones."""

from __future__ import annotations

import asyncio
from typing import Literal

import structlog

from worldmove.driver import Services
from worldmove.errors import ConflictError, DeadlineError, NotFoundError, NotOwnerError
from worldmove.hosting.host import Host
from worldmove.ledger import records
from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.node.recovery import Recovery
from worldmove.sessions import SessionBook

Decision = Literal["keep", "end"]
WATCH_S = 3.0
"""How long another node's lease is watched before a session of it may be written off."""
SETTLE_S = 10.0
log = structlog.get_logger(__name__)


class Resolver:
    """Writes what an operator has decided about one session, and only where nothing else decides."""

    def __init__(self, services: Services, host: Host, book: SessionBook, recovery: Recovery) -> None:
        self._services = services
        self._host = host
        self._book = book
        self._recovery = recovery

    async def resolve(self, session_id: str, decision: Decision) -> None:
        """`keep`: the world is what this node holds. `end`: nobody holds it any more.

        Raises:
            NotFoundError: neither this node nor the ledger knows the session.
            ConflictError: it needs no operator, or `keep` finds nothing here to keep.
            NotOwnerError: the node that owns it lives.
            LedgerError: the ledger does not answer, without which nothing can be decided.
        """
        if self._book.get(session_id) is not None:
            raise ConflictError(f"session {session_id!r} is this node's: there is nothing to resolve")
        record = await self._services.ledger.get(session_id)
        waiting = self._recovery.unsettled.get(session_id)
        if waiting is None:
            await self._unheld(session_id, record, decision)
            return
        if waiting.reason is None:
            raise ConflictError(
                f"session {session_id!r} waits for its record, which will settle it; see the node's log"
            )
        claim, slot = self._services.claim, waiting.slot
        known = self._host.latest_epoch(slot)
        base = record or SessionRecord(
            session_id=session_id,
            epoch=known,
            owner=claim.name,
            incarnation=claim.incarnation,
            model=slot.manifest.model,
            revision=slot.manifest.revision,
            endpoint=slot.manifest.endpoint,
        )
        if decision == "keep":
            new = records.resolve(base, claim, least_epoch=known)
        else:
            new = records.write_off(base, least_epoch=known)
        log.warning("resolved by an operator", session=session_id, decision=decision, epoch=new.epoch)
        await self._services.ledger.resolve(record, new)
        waiting.look.set()
        if decision == "end":
            # Its workers hear it when they come; a stopped one may never.
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await waiting.settled.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the record of {session_id!r} is written, the session is not settled by it yet"
            ) from None

    async def _unheld(self, session_id: str, record: SessionRecord | None, decision: Decision) -> None:
        if record is None or record.phase == "ended":
            raise NotFoundError(f"session {session_id!r} is not known")
        if decision == "keep":
            raise ConflictError(
                f"this node holds no memory of session {session_id!r}, which node {record.owner} owns",
                owner=record.owner,
            )
        if record.owner != self._services.claim.name:
            await self._check_gone(record)
        log.warning("written off by an operator", session=session_id, owner=record.owner)
        await self._services.ledger.resolve(record, records.write_off(record))

    async def _check_gone(self, record: SessionRecord) -> None:
        before = await self._node(record.owner)
        if before is None:
            return
        await asyncio.sleep(WATCH_S)
        after = await self._node(record.owner)
        if after is not None and after != before:
            raise NotOwnerError(
                f"node {record.owner}, which owns session {record.session_id!r}, lives: ask it",
                owner=record.owner,
                owner_url=after.url,
            )

    async def _node(self, name: str) -> NodeInfo | None:
        nodes = {node.name: node for node in await self._services.ledger.nodes()}
        return nodes.get(name)

    async def end_lost(self, session_id: str) -> bool:
        """Ends a session of this node whose memory nobody holds any more; whether there was one.

        Raises:
            ConflictError: it is fenced, or in a move that its source may still take back.
        """
        if self._recovery.fenced(session_id) is not None:
            raise ConflictError(f"session {session_id!r} is fenced: `worldmove sessions resolve` decides")
        ledger, claim = self._services.ledger, self._services.claim
        record = await ledger.get(session_id)
        if record is None or record.phase == "ended" or not self._recovery.is_lost(record):
            return False
        if record.move is not None and record.phase == "moving":
            record = await ledger.settle(session_id, record.move.move_id)
        if record.phase == "committed":
            raise ConflictError(f"session {session_id!r} is committed to this node; its source takes it back")
        steps = [records.retake(record, claim)]
        if record.phase == "adopted":
            steps.append(records.release(steps[-1], claim))
        for step in (*steps, records.end(steps[-1])):
            if step != record:
                await ledger.swap(record, step)
            record = step
        return True
