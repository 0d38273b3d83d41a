"""The write that adopts, handed over behind the commit: in order, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from ledger_kit import ROOT, Ledgers, move_ref, session

from worldmove.adoption import Adoption
from worldmove.errors import LostRaceError, NoWorkerError
from worldmove.ledger import records
from worldmove.ledger.records import Claim, SessionRecord
from worldmove.ledger.transactional import TransactionalLedger


class Case:
    """A move that is about to be committed, by both nodes' ledgers."""

    def __init__(
        self, source: TransactionalLedger, there: TransactionalLedger, moving: SessionRecord
    ) -> None:
        self.source = source
        self.there = there
        self.moving = moving
        self.committed = records.commit(moving, block=5, revision=1, root=ROOT)
        claim = there.claimed
        assert claim is not None
        self.adopted = records.adopt(self.committed, claim, endpoint="ws://b")

    def adoption(self, attended: Callable[[], bool] = lambda: True) -> Adoption:
        """Already asked for, behind a commit that is not."""
        adoption = Adoption(self.there, attended)
        adoption.follow(self.committed, self.adopted)
        assert adoption.under_way
        return adoption


@pytest.fixture(params=["sqlite", "memory"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    ledgers = Ledgers(request.param, tmp_path)
    source, a = await ledgers.node("a")
    there, b = await ledgers.node("b")
    owned = await source.create(session(a))
    moving = records.begin(owned, move_ref(a, b))
    await source.swap(owned, moving)
    yield Case(source, there, moving)
    await ledgers.close()


async def test_both_are_written_in_order(case: Case) -> None:
    seen = await case.source.position()
    adoption = case.adoption()
    await case.there.swap(case.moving, case.committed)
    await adoption.write(case.committed, case.adopted)
    assert await case.source.get("world") == case.adopted
    assert await case.source.position() == seen + 2
    assert not adoption.under_way


async def test_nothing_is_adopted_that_was_not_committed(case: Case) -> None:
    """The source was faster: what follows the commit finds that, and the record stays the source's."""
    claim = case.source.claimed
    assert claim is not None
    aborted = records.abort(case.moving, claim)
    await case.source.swap(case.moving, aborted)
    adoption = case.adoption()
    with pytest.raises(LostRaceError):
        await case.there.swap(case.moving, case.committed)
    with pytest.raises(LostRaceError):
        await adoption.write(case.committed, case.adopted)
    assert await case.there.get("world") == aborted


async def test_a_worker_that_has_gone_by_then_leaves_the_world_committed(case: Case) -> None:
    """So that its source may have it back."""
    adoption = case.adoption(lambda: False)
    await case.there.swap(case.moving, case.committed)
    with pytest.raises(NoWorkerError):
        await adoption.write(case.committed, case.adopted)
    assert await case.source.get("world") == case.committed
    assert case.source.claimed is not None
    await case.source.swap(case.committed, records.reclaim(case.committed, case.source.claimed))


async def test_without_a_write_ahead_and_after_one_that_failed_it_is_written_then(case: Case) -> None:
    adoption = case.adoption(lambda: False)
    await case.there.swap(case.moving, case.committed)
    with pytest.raises(NoWorkerError):
        await adoption.write(case.committed, case.adopted)
    await adoption.write(case.committed, case.adopted)
    assert await case.source.get("world") == case.adopted


async def test_what_was_asked_for_ahead_is_not_taken_for_another_record(case: Case) -> None:
    adoption = case.adoption(lambda: False)
    await case.there.swap(case.moving, case.committed)
    elsewhere = records.adopt(case.committed, Claim("b", 1), endpoint="ws://elsewhere")
    await adoption.write(case.committed, elsewhere)
    assert await case.source.get("world") == elsewhere
