"""How moves are shown: while they run, from either side, and from their receipt."""

from __future__ import annotations

import time

from worldmove.destination import DestinationMove
from worldmove.receipts import move_state
from worldmove.source import SourceMove
from worldmove.views import ENDED_STATES, MigrationView, Receipt


def of_source(move: SourceMove) -> MigrationView:
    """A move away from this node; once there is a receipt, in its figures."""
    facts, account = move.machine.facts, move.account
    receipt = account.receipt
    return MigrationView(
        id=move.move_id,
        session_id=move.session_id,
        source=move.hello.source,
        destination=move.destination,
        state=move_state(move.visible),
        live=move.hello.live,
        path=account.path,
        round=facts.round,
        state_bytes=move.state_bytes,
        sent_bytes=receipt.sent_bytes if receipt else account.landed,
        created_at=account.created_at,
        elapsed_ms=receipt.total_ms if receipt else account.elapsed_ms,
        code=facts.code,
        reason=facts.message,
        receipt=receipt,
    )


def of_destination(move: DestinationMove, node: str) -> MigrationView:
    """A move towards this node; the receipt is the source's."""
    facts = move.machine.facts
    return MigrationView(
        id=move.move_id,
        session_id=move.session_id,
        source=move.hello.source,
        destination=node,
        state=move_state(move.visible),
        live=move.hello.live,
        path=move.path_name,
        round=facts.round,
        state_bytes=move.state_bytes,
        sent_bytes=move.landed,
        created_at=move.created_at,
        elapsed_ms=(time.monotonic() - move.started) * 1000,
        code=facts.code,
        reason=facts.message,
    )


def of_receipt(receipt: Receipt) -> MigrationView:
    """A move of which only the receipt is left, or the note of its beginning."""
    return MigrationView(
        id=receipt.migration_id,
        session_id=receipt.session_id,
        source=receipt.source,
        destination=receipt.destination,
        state=receipt.state,
        live=receipt.live,
        path=receipt.path,
        round=len(receipt.rounds),
        state_bytes=receipt.state_bytes,
        sent_bytes=receipt.sent_bytes,
        created_at=receipt.finished_at,
        elapsed_ms=receipt.total_ms,
        code=receipt.code,
        reason=receipt.reason,
        receipt=receipt if receipt.state in ENDED_STATES else None,
    )
