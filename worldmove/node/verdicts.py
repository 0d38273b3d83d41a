"""What a session's record says about a slot that a former incarnation left; pure.

`recovery` asks the ledger and does what is decided here; tests simulate whole nodes on the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from worldmove.ledger import records
from worldmove.ledger.records import Claim, SessionRecord

Verdict = Literal["doubted", "ended", "unfinished", "moved", "wait", "mine"]
"""What becomes of a world: an operator decides (`doubted`), it goes (`ended`, `moved`), its move has to be
settled first (`unfinished`), the record does not say it yet (`wait`), or it is this node's (`mine`)."""
Standing = Literal["wipe", "adopt", "take"]
"""What becomes of a promised standby: it never got the world, the record has to say `adopted` first, or it
says so."""


def of_session(record: SessionRecord | None, epoch: int, mine: Claim) -> Verdict:
    """What to do with a world.

    Args:
        record: that stands.
        epoch: that the world's control page says.
        mine: this node, under its new incarnation.
    """
    if record is None or record.epoch < epoch:
        return "doubted"
    move = record.move
    if move is not None and record.phase in ("moving", "committed") and move.source == mine.name:
        return "unfinished"
    return of_settled(record, mine)


def of_settled(record: SessionRecord, mine: Claim) -> Verdict:
    """What to do with a world whose move from here is settled. A move between others is theirs to settle."""
    if record.phase == "ended":
        return "ended"
    if record.owner != mine.name:
        return "moved"
    return "wait" if record.phase in ("moving", "committed") else "mine"


def superseded(record: SessionRecord, epoch: int, others: Iterable[tuple[int, str | None]]) -> bool:
    """Whether a world that the record would leave here has moved on, within this node.

    Such a move has both its ends here, so owner and incarnation do not tell which of two slots is meant.

    Args:
        record: that stands; it names this node.
        epoch: that the world's control page says.
        others: of the node's other slots that hold this session, or are promised to a move of any: the epoch
            (0 for a standby), and the move.
    """
    for later, move_id in others:
        if epoch < later <= record.epoch:
            return True
        if move_id is not None and records.fate(record, move_id) in ("adopted", "released"):
            return True
    return False


def behind(record: SessionRecord, others: Iterable[tuple[int, str | None]]) -> bool:
    """Whether another slot of the session here is of an epoch that the record does not know yet.

    That one is the world. What it has left is not to go on beside it because the ledger was set back.
    """
    return any(later > record.epoch for later, _ in others)


def of_standby(record: SessionRecord | None, move_id: str, mine: Claim) -> Standing:
    """What to do with a standby that was promised to a move; `record` is of that move, once it is settled."""
    if record is None or record.owner != mine.name:
        return "wipe"
    fate = records.fate(record, move_id)
    if fate == "committed":
        return "adopt"
    return "take" if fate in ("adopted", "released") else "wipe"
