"""Two swaps in one write: both, or the first alone, or nothing, whatever the ledger stores in."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ledger_kit import ROOT, Ledgers, move_ref, node_info, session

from worldmove.errors import (
    FencedError,
    LostRaceError,
    NoWorkerError,
    ProtocolError,
    ValidationError,
    WorldMoveError,
)
from worldmove.ledger import transactions
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import (
    Claim,
    SessionRecord,
    abort,
    adopt,
    begin,
    commit,
    fate,
    reclaim,
    release,
    update,
)
from worldmove.ledger.transactional import TransactionalLedger


class Case(NamedTuple):
    source: TransactionalLedger
    there: TransactionalLedger
    a: Claim
    b: Claim
    moving: SessionRecord
    committed: SessionRecord
    adopted: SessionRecord

    async def both(self, *, attended: bool = True) -> WorldMoveError | None:
        def check() -> None:
            if not attended:
                raise NoWorkerError("nobody is there")

        return await self.there.swap_then(self.moving, self.committed, self.adopted, provided=check)


@pytest.fixture(params=["sqlite", "memory"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    ledgers = Ledgers(request.param, tmp_path)
    source, a = await ledgers.node("a")
    there, b = await ledgers.node("b")
    owned = await source.create(session(a))
    moving = begin(owned, move_ref(a, b))
    await source.swap(owned, moving)
    committed = commit(moving, block=5, revision=1, root=ROOT)
    yield Case(source, there, a, b, moving, committed, adopt(committed, b, endpoint="ws://b"))
    await ledgers.close()


async def test_both_stand_after_one_change(case: Case) -> None:
    seen = await case.source.position()
    assert await case.both() is None
    assert await case.source.get("world") == case.adopted
    watch = case.source.watch(seen)
    change = await anext(watch)
    await watch.aclose()
    assert (change.seq, change.session) == (seen + 1, case.adopted)
    released = release(case.adopted, case.b)
    await case.there.swap(case.adopted, released)
    assert fate(released, "move-1") == "released"


async def test_where_the_second_is_refused_the_first_stands(case: Case) -> None:
    seen = await case.source.position()
    assert isinstance(await case.both(attended=False), NoWorkerError)
    assert await case.source.get("world") == case.committed
    assert await case.source.position() == seen + 1
    await case.source.swap(case.committed, reclaim(case.committed, case.a))
    with pytest.raises(LostRaceError):
        await case.both()


async def test_a_second_that_no_rule_allows_is_refused_alone(case: Case) -> None:
    refused = await case.there.swap_then(case.moving, case.committed, case.moving)
    assert isinstance(refused, ProtocolError)
    assert await case.source.get("world") == case.committed


async def test_a_first_that_lost_its_race_writes_nothing(case: Case) -> None:
    aborted = abort(case.moving, case.a)
    await case.source.swap(case.moving, aborted)
    seen = await case.source.position()
    with pytest.raises(LostRaceError) as lost:
        await case.both()
    assert lost.value.details["record"] == aborted == await case.there.get("world")
    assert await case.source.position() == seen


async def test_a_first_that_no_rule_allows_writes_nothing(case: Case) -> None:
    with pytest.raises(ProtocolError):
        await case.source.swap_then(case.moving, case.committed, case.adopted)
    with pytest.raises(ProtocolError):
        await case.there.swap_then(case.moving, case.adopted, release(case.adopted, case.b))
    assert await case.source.get("world") == case.moving


async def test_the_fenced_write_nothing(case: Case) -> None:
    await case.source.claim(node_info("b"))
    with pytest.raises(FencedError):
        await case.both()
    assert await case.source.get("world") == case.moving


async def test_an_error_of_another_kind_writes_nothing(case: Case) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    seen = await case.source.position()
    with pytest.raises(ZeroDivisionError):
        await case.there.swap_then(case.moving, case.committed, case.adopted, provided=broken)
    assert await case.source.get("world") == case.moving
    assert await case.source.position() == seen


async def test_a_repetition_takes_no_step_back(case: Case) -> None:
    """Its reply was lost: it is told the same, also where its half of it had been refused before."""
    assert isinstance(await case.both(attended=False), NoWorkerError)
    assert isinstance(await case.both(attended=False), NoWorkerError)
    assert await case.source.get("world") == case.committed
    assert await case.both() is None
    seen = await case.source.position()
    assert await case.both(attended=False) is None
    assert await case.source.get("world") == case.adopted
    assert await case.source.position() == seen
    newer = update(case.adopted, block=9, revision=1, endpoint=None)
    await case.there.swap(case.adopted, newer)
    with pytest.raises(LostRaceError):
        await case.both()
    assert await case.source.get("world") == newer


async def test_it_and_an_abort_race_has_one_winner(case: Case) -> None:
    outcomes = await asyncio.gather(
        case.source.settle("world", "move-1"), case.both(), return_exceptions=True
    )
    stands = await case.source.get("world")
    assert stands in (abort(case.moving, case.a), case.adopted)
    assert isinstance(outcomes[1], LostRaceError) == (stands != case.adopted)


async def test_a_reader_never_sees_the_record_between(case: Case) -> None:
    seen = set()

    async def look() -> None:
        while True:
            record = await case.source.get("world")
            assert record is not None
            seen.add(record.phase)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await asyncio.sleep(0.01)
    await case.both()
    await asyncio.sleep(0.01)
    looking.cancel()
    await asyncio.wait([looking])
    assert seen == {"moving", "adopted"}


async def test_a_caller_that_is_cancelled_loses_nothing(case: Case) -> None:
    call = asyncio.create_task(case.both())
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    # What was handed over before the cancellation is in the queue before this settle.
    assert fate(await case.there.settle("world", "move-1"), "move-1") == "adopted"


def test_it_does_what_two_swaps_would_do() -> None:
    """Over every three records of some lives, whatever stands, and whoever writes."""
    a, b = Claim("a", 1), Claim("b", 1)
    owned = session(a)
    moving = begin(owned, move_ref(a, b))
    committed = commit(moving, block=5, revision=1, root=ROOT)
    adopted = adopt(committed, b, endpoint=None)
    released = release(adopted, b)
    lives = [owned, moving, abort(moving, a), committed, reclaim(committed, a), adopted, released]
    lives.append(update(released, block=9, revision=1, endpoint=None))
    written = 0
    for stands, old, new, then in itertools.product(lives, repeat=4):
        if stands == then and then not in (old, new):
            continue  # a repetition, which two swaps would refuse: see above
        for by in (a, b):
            one, two = store(stands), store(stands)
            assert at_once(one, by, old, new, then) == in_turn(two, by, old, new, then)
            assert one.session("world") == two.session("world")
            written += one.session("world") != stands
    assert written > 50


def store(record: SessionRecord) -> MemoryStore:
    made = MemoryStore()
    for name in "ab":
        transactions.claim_name(made, node_info(name))
    made.put_session(record)
    return made


Answer = tuple[type[Exception] | None, type[Exception] | None]
REFUSALS = (LostRaceError, ProtocolError, ValidationError)


def at_once(
    made: MemoryStore, by: Claim, old: SessionRecord, new: SessionRecord, then: SessionRecord
) -> Answer:
    try:
        refused = transactions.swap_then(made, by, old, new, then)
    except REFUSALS as error:
        return type(error), None
    return None, None if refused is None else type(refused)


def in_turn(
    made: MemoryStore, by: Claim, old: SessionRecord, new: SessionRecord, then: SessionRecord
) -> Answer:
    try:
        transactions.swap(made, by, old, new)
    except REFUSALS as error:
        return type(error), None
    try:
        transactions.swap(made, by, new, then)
    except REFUSALS as error:
        return None, type(error)
    return None, None
