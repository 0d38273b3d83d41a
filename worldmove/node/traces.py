"""What became of a move whose node ended before it could write a receipt: the session's record tells."""

from __future__ import annotations

from worldmove.driver import Services
from worldmove.errors import ConflictError, NotFoundError, NotOwnerError
from worldmove.ledger.records import MoveRef, SessionRecord, fate
from worldmove.manifest import Manifest
from worldmove.receipts import now_text
from worldmove.views import MigrationRequest, MoveState, Receipt

CODE = "node-lost"
"""Why such a move is called aborted."""


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
