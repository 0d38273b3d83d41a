"""What became of a move whose node ended before it could write a receipt: the session's record tells.

A note of each move is kept from its admission on, in the place of its receipt: by it a move is known,
whoever is asked, and whatever becomes of its source.
"""

from __future__ import annotations

import asyncio

import structlog
from msgspec.structs import replace

from worldmove.driver import Services
from worldmove.errors import ConflictError, NotFoundError, NotOwnerError, WorldMoveError
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import Claim, MoveRef, SessionRecord, fate
from worldmove.manifest import Manifest
from worldmove.receipts import now_text
from worldmove.source import SourceMove
from worldmove.views import ENDED_STATES, MigrationRequest, MoveState, Receipt

CODE = "node-lost"
"""Why such a move is called aborted."""
NEVER = "the source's node ended before the move had begun; the world stayed"
NOTE_S = 1.0
"""How long whoever asked for a move waits for its note."""
NOTES = 1000
"""How many of the newest receipts are looked through for notes of moves that a node has left."""
log = structlog.get_logger(__name__)


async def note(move: SourceMove) -> None:
    """Keeps in the ledger that a move has been admitted; if that can't be, only its receipt tells of it."""
    session, hello = move.session, move.hello
    begun = left_receipt(
        session.record,
        move.move_id,
        "admitted",
        source=hello.source,
        destination=move.destination,
        manifest=hello.manifest,
    )
    begun = replace(begun, live=hello.live, epoch=hello.epoch, code=None, reason=None)
    try:
        async with asyncio.timeout(NOTE_S):
            await move.services.ledger.put_receipt(begun)
    except (WorldMoveError, TimeoutError) as error:
        log.warning("no note of the move was kept", move=move.move_id, error=str(error))


def standing(left: Receipt, record: SessionRecord | None, *, over: bool) -> Receipt:
    """What a record says of a move of which only the note is left; pure.

    Args:
        left: the note.
        record: of its session.
        over: its source's process has ended, so that a move that has not begun never will.

    Returns:
        The receipt, or the note with another state if it has not ended.
    """
    found = fate(record, left.migration_id) if record is not None else "superseded"
    if record is None or (found == "superseded" and record.epoch <= left.epoch):
        return replace(left, state="aborted", code=CODE, reason=NEVER) if over else left
    if found in ("moving", "committed", "adopted"):
        return replace(left, state="copying" if found == "moving" else found)
    # The world has left the epoch at which the move began, and only this move could take it from there.
    gone = found in ("released", "superseded")
    made = replace(
        left_receipt(
            record,
            left.migration_id,
            "released" if gone else "aborted",
            source=left.source,
            destination=left.destination,
            manifest=None,
        ),
        live=left.live,
        state_bytes=left.state_bytes,
    )
    if found == "superseded":
        made = replace(made, epoch=left.epoch + 1, block=None, source_root=None, destination_root=None)
    return made


async def known(services: Services, left: Receipt) -> Receipt:
    """What the ledger knows now of a move that nobody runs here and of which only the note is left.

    Its source settles what its former incarnation has left open, and keeps what came of it.

    Raises:
        LedgerError: it does not answer.
    """
    ledger, mine = services.ledger, left.source == services.claim.name
    record = await ledger.get(left.session_id)
    if mine and record is not None and fate(record, left.migration_id) == "moving":
        record = await ledger.settle(left.session_id, left.migration_id)
    found = standing(left, record, over=mine)
    if mine and found.state in ENDED_STATES:
        await ledger.put_receipt(found)
    return found


async def notes(ledger: Ledger, mine: Claim) -> list[Receipt]:
    """Notes of moves away from this node, of which no receipt was written.

    Raises:
        LedgerError: it does not answer.
    """
    newest = await ledger.receipts(NOTES)
    return [each for each in newest if each.source == mine.name and each.state not in ENDED_STATES]


async def trace(
    services: Services, request: MigrationRequest, move_id: str, manifest: Manifest | None
) -> Receipt:
    """Settles a move that was asked for earlier, that nobody runs here, and that has left no receipt.

    Only the session's owner can say: a move that has begun stands in the record, and whoever asked for
    one that had not is gone, as its node has only one move of a session and lets it go with its world.

    Args:
        services: of this node.
        request: what was asked for.
        move_id: of the move.
        manifest: of the session, if it is here.

    Raises:
        NotOwnerError: another node has the session, and may run the move.
        ConflictError: the record is not settled yet; asking again helps.
        NotFoundError: the ledger does not know the session any more.
    """
    record = await services.ledger.get(request.session_id)
    if record is None:
        raise NotFoundError(f"migration {move_id!r} is not known")
    found = fate(record, move_id)
    if record.owner != services.claim.name:
        urls = {node.name: node.url for node in await services.ledger.nodes()}
        raise NotOwnerError(
            f"migration {move_id!r} is not of this node; session {record.session_id!r} is on {record.owner}",
            owner=record.owner,
            owner_url=urls.get(record.owner),
        )
    if found in ("moving", "committed", "adopted"):
        raise ConflictError(f"migration {move_id!r} is not settled yet; ask again", retry_after_ms=1000)
    state: MoveState = "released" if found == "released" else "aborted"
    receipt = left_receipt(
        record, move_id, state, source=record.owner, destination=request.destination, manifest=manifest
    )
    await services.ledger.put_receipt(receipt)
    return receipt


async def leave_trace(services: Services, record: SessionRecord, move: MoveRef, manifest: Manifest) -> None:
    """Writes the receipt of a former incarnation's move as source, once its record is settled."""
    gone = record.owner != move.source or fate(record, move.move_id) in ("adopted", "released")
    receipt = left_receipt(
        record,
        move.move_id,
        "released" if gone else "aborted",
        source=move.source,
        destination=move.destination,
        manifest=manifest,
    )
    await services.ledger.put_receipt(receipt)


def left_receipt(
    record: SessionRecord,
    move_id: str,
    state: MoveState,
    *,
    source: str,
    destination: str,
    manifest: Manifest | None,
) -> Receipt:
    """A receipt of what the record knows: no times, no rounds, no bytes that were sent."""
    released = state == "released"
    reason = "the source's node ended before it could write the receipt"
    return Receipt(
        migration_id=move_id,
        session_id=record.session_id,
        source=source,
        destination=destination,
        state=state,
        path=None,
        live=True,
        epoch=record.epoch,
        block=record.block if released else None,
        state_bytes=manifest.nbytes if manifest is not None else 0,
        sent_bytes=0,
        kept_bytes=0,
        rounds=(),
        damaged=(),
        source_root=record.root if released else None,
        destination_root=record.root if released else None,
        pause_ms=None,
        data_ms=None,
        commit_ms=None,
        resume_ms=None,
        total_ms=0.0,
        missed=False,
        lanes=0,
        finished_at=now_text(),
        code=None if released else CODE,
        reason=reason if released else f"{reason}; the world stayed, or stays with a later owner",
    )
