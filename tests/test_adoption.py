"""The write that adopts, in one with the commit: in order, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from ledger_kit import ROOT, Ledgers, move_ref, session

from worldmove.adoption import Adoption
from worldmove.errors import LostRaceError, NoWorkerError
from worldmove.ledger import records
from worldmove.ledger.records import SessionRecord
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

    async def commit(self, attended: Callable[[], bool] = lambda: True) -> tuple[Adoption, SessionRecord]:
        adoption = Adoption(self.there, attended)
        return adoption, await adoption.commit(self.moving, self.committed, self.adopted)


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


async def test_both_are_written_at_once(case: Case) -> None:
    seen = await case.source.position()
    adoption, stands = await case.commit()
    assert stands == case.adopted == await case.source.get("world")
    assert adoption.stands(stands)
    assert await case.source.position() == seen + 1


async def test_nothing_is_adopted_that_was_not_committed(case: Case) -> None:
    """The source was faster: the commit finds that, and the record stays the source's."""
    claim = case.source.claimed
    assert claim is not None
    aborted = records.abort(case.moving, claim)
    await case.source.swap(case.moving, aborted)
    adoption = Adoption(case.there, lambda: True)
    with pytest.raises(LostRaceError):
        await adoption.commit(case.moving, case.committed, case.adopted)
    assert await case.there.get("world") == aborted
    assert not adoption.stands(case.adopted)


async def test_a_worker_that_has_gone_by_then_leaves_the_world_committed(case: Case) -> None:
    """So that its source may have it back."""
    adoption, stands = await case.commit(lambda: False)
    assert stands == case.committed == await case.source.get("world")
    assert not adoption.stands(stands)
    with pytest.raises(NoWorkerError):
        adoption.check()
    assert case.source.claimed is not None
    await case.source.swap(case.committed, records.reclaim(case.committed, case.source.claimed))


async def test_a_commit_alone_leaves_the_adoption_to_a_later_write(case: Case) -> None:
    adoption = Adoption(case.there, lambda: True)
    assert await adoption.commit(case.moving, case.committed, None) == case.committed
    assert await case.source.get("world") == case.committed
    assert not adoption.stands(case.committed)


async def test_a_worker_is_asked_for_within_the_write(case: Case) -> None:
    """One that goes while the write waits for the file is found gone."""
    asked = []

    def attended() -> bool:
        asked.append(True)
        return len(asked) > 1

    adoption, stands = await case.commit(attended)
    assert (stands, len(asked)) == (case.committed, 1)
    adoption.check()
    await case.there.swap(case.committed, case.adopted)
    assert await case.source.get("world") == case.adopted
