"""What a session tells of how fast it is dirtied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from worldmove.hosting.slots import Slot
from worldmove.ledger.records import SessionRecord
from worldmove.sessions import Session, SessionBook


def test_a_session_that_nobody_generates_is_not_dirtied() -> None:
    """Else an idle one would be promised the line that a whole state in each block asks for."""
    ranks = SimpleNamespace(attended=True)
    slot = cast("Slot", SimpleNamespace(ranks=ranks))
    record = SessionRecord(session_id="w", epoch=1, owner="A", incarnation=1, model="m")
    session = Session(slot, record, cast("SessionBook", None))
    assert session.dirty_rate is None
    session.dirty_rate = 5e6
    assert session.dirty_rate == 5e6
    ranks.attended = False
    assert session.dirty_rate == 0.0
