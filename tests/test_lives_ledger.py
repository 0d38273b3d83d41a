"""What only an operator may write into the ledger; pure."""

from __future__ import annotations

import pytest
from ledger_kit import ROOT, move_ref, session
from msgspec.structs import replace

from worldmove.errors import ProtocolError, WorldMoveError
from worldmove.ledger.records import Claim, begin, commit, resolve, write_off
from worldmove.ledger.rules import check_resolve

A, B, C = Claim("a", 1), Claim("b", 1), Claim("c", 1)
OWNED = session(A)
MOVING = begin(OWNED, move_ref(A, B))
COMMITTED = commit(MOVING, block=5, revision=1, root=ROOT)


def test_an_operator_may_take_or_write_off_any_record_that_has_not_ended() -> None:
    for old in (None, OWNED, MOVING, COMMITTED):
        base = old or replace(OWNED, owner=C.name, incarnation=C.incarnation)
        kept = resolve(base, C, least_epoch=7)
        assert (kept.phase, kept.holder, kept.epoch, kept.move) == ("owned", C, 8, None)
        check_resolve(old, kept, C)
        gone = write_off(base, least_epoch=7)
        assert (gone.phase, gone.epoch, gone.move) == ("ended", 7, None)
        check_resolve(old, gone, C)
    assert resolve(MOVING, C, least_epoch=1).outcome == "aborted"
    assert resolve(COMMITTED, C, least_epoch=1).outcome == "reclaimed"


def test_resolving_changes_nothing_else() -> None:
    kept = resolve(COMMITTED, C, least_epoch=1)
    for wrong in (
        replace(kept, epoch=COMMITTED.epoch),
        replace(kept, owner="B"),
        replace(kept, incarnation=C.incarnation + 1),
        replace(kept, model="another"),
        replace(kept, block=kept.block + 1),
        replace(kept, outcome="released"),
        replace(write_off(COMMITTED), epoch=COMMITTED.epoch - 1),
        COMMITTED,
    ):
        with pytest.raises(WorldMoveError):
            check_resolve(COMMITTED, wrong, C)
    with pytest.raises(ProtocolError, match="has ended"):
        check_resolve(write_off(OWNED), kept, C)
