"""What every ledger must do with sessions, whatever it stores in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ledger_kit import ROOT, Ledgers, move_ref, node_info, receipt, session
from msgspec.structs import replace

from worldmove.errors import (
    FencedError,
    LedgerError,
    LostRaceError,
    NotFoundError,
    ProtocolError,
    SessionExistsError,
    ValidationError,
)
from worldmove.ledger.base import MAX_PAGE, Ledger
from worldmove.ledger.records import (
    Claim,
    SessionRecord,
    abort,
    adopt,
    begin,
    commit,
    end,
    fate,
    reclaim,
    release,
    resolve,
    retake,
    update,
)


@pytest.fixture(params=["sqlite", "memory"])
async def ledgers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledgers]:
    world = Ledgers(request.param, tmp_path)
    yield world
    await world.close()


async def moving(ledgers: Ledgers) -> tuple[Ledger, Claim, Ledger, Claim, SessionRecord]:
    source, a = await ledgers.node("a")
    destination, b = await ledgers.node("b")
    owned = await source.create(session(a))
    record = begin(owned, move_ref(a, b))
    await source.swap(owned, record)
    return source, a, destination, b, record


async def test_a_whole_move(ledgers: Ledgers) -> None:
    source, _a, destination, b, record = await moving(ledgers)
    committed = commit(record, block=5, revision=1, root=ROOT)
    await destination.swap(record, committed)
    adopted = adopt(committed, b, endpoint="ws://b")
    await destination.swap(committed, adopted)
    released = release(adopted, b)
    await destination.swap(adopted, released)
    stands = await source.get("world")
    assert stands == released
    assert (stands.owner, stands.epoch, stands.block, stands.endpoint) == ("b", 2, 5, "ws://b")
    assert fate(stands, "move-1") == "released"


async def test_commit_and_abort_race_has_one_winner(ledgers: Ledgers) -> None:
    source, a, destination, _b, record = await moving(ledgers)
    outcomes = await asyncio.gather(
        source.swap(record, abort(record, a)),
        destination.swap(record, commit(record, block=5, revision=1, root=ROOT)),
        return_exceptions=True,
    )
    lost = [outcome for outcome in outcomes if outcome is not None]
    assert len(lost) == 1
    assert isinstance(lost[0], LostRaceError)
    assert lost[0].details["record"] == await source.get("world")


async def test_a_repeated_swap_gives_the_same_answer(ledgers: Ledgers) -> None:
    _source, _a, destination, b, record = await moving(ledgers)
    committed = commit(record, block=5, revision=1, root=ROOT)
    await destination.swap(record, committed)
    await destination.swap(record, committed)
    adopted = adopt(committed, b, endpoint=None)
    await destination.swap(committed, adopted)
    with pytest.raises(LostRaceError):
        await destination.swap(record, committed)


async def test_settle_writes_aborted_and_a_late_commit_loses(ledgers: Ledgers) -> None:
    source, a, destination, b, record = await moving(ledgers)
    settled = await destination.settle("world", "move-1")
    assert settled == abort(record, b)
    assert settled.holder == a
    assert fate(settled, "move-1") == "aborted"
    with pytest.raises(LostRaceError) as lost:
        await destination.swap(record, commit(record, block=5, revision=1, root=ROOT))
    assert lost.value.details["record"] == settled
    assert await source.settle("world", "move-1") == settled


async def test_settle_after_the_commit_only_reads(ledgers: Ledgers) -> None:
    source, a, destination, b, record = await moving(ledgers)
    committed = commit(record, block=5, revision=1, root=ROOT)
    await destination.swap(record, committed)
    assert await source.settle("world", "move-1") == committed
    back = reclaim(committed, a)
    await source.swap(committed, back)
    assert back.epoch == record.epoch + 2
    assert fate(await destination.settle("world", "move-1"), "move-1") == "reclaimed"
    with pytest.raises(LostRaceError):
        await destination.swap(committed, adopt(committed, b, endpoint=None))


async def test_settle_leaves_a_later_move_alone(ledgers: Ledgers) -> None:
    source, a, destination, b, _record = await moving(ledgers)
    aborted = await source.settle("world", "move-1")
    second = begin(aborted, move_ref(a, b, "move-2"))
    await source.swap(aborted, second)
    assert await destination.settle("world", "move-1") == second
    third = await source.settle("world", "move-2")
    await source.swap(third, begin(third, move_ref(a, b, "move-3")))
    assert fate(await destination.settle("world", "move-1"), "move-1") == "superseded"


async def test_settle_before_the_beginning_and_a_late_beginning_loses(ledgers: Ledgers) -> None:
    source, a = await ledgers.node("a")
    destination, b = await ledgers.node("b")
    record = await source.create(session(a))
    assert await source.settle("world", "move-1") == await destination.settle("world", "move-1") == record
    settled = await source.settle("world", "move-1", record)
    assert fate(settled, "move-1") == "aborted"
    assert settled == replace(record, outcome="aborted", last_move_id="move-1")
    assert await source.settle("world", "move-1", record) == settled
    with pytest.raises(LostRaceError):
        await source.swap(record, begin(record, move_ref(a, b)))
    with pytest.raises(ProtocolError, match="used before"):
        await source.swap(settled, begin(settled, move_ref(a, b)))
    await source.swap(settled, begin(settled, move_ref(a, b, "move-2")))


@pytest.mark.parametrize(
    "stale",
    [
        {"block": 4},
        {"revision": 2},
        {"endpoint": "ws://elsewhere"},
        {"outcome": "aborted", "last_move_id": "move-0"},
        {"root": ROOT},
    ],
    ids=["block", "revision", "endpoint", "outcome", "root"],
)
async def test_a_record_that_differs_in_one_field_is_another_record(
    ledgers: Ledgers, stale: dict[str, Any]
) -> None:
    """Whoever compares with what he saw before writes nothing, though owner, epoch and phase are the same."""
    source, a = await ledgers.node("a")
    record = await source.create(session(a))
    seen = replace(record, **stale)
    with pytest.raises(LostRaceError):
        await source.swap(seen, update(seen, block=9, revision=seen.revision, endpoint=None))
    with pytest.raises(LostRaceError):
        await source.resolve(seen, resolve(seen, a, least_epoch=1))
    assert await source.settle("world", "move-1", seen) == record
    assert await source.get("world") == record


async def test_settle_is_for_the_move_s_nodes(ledgers: Ledgers) -> None:
    await moving(ledgers)
    third, _ = await ledgers.node("c")
    with pytest.raises(ProtocolError):
        await third.settle("world", "move-1")
    with pytest.raises(NotFoundError):
        await third.settle("nobody", "move-1")


async def test_an_old_incarnation_writes_nothing(ledgers: Ledgers) -> None:
    old, a, _destination, b, record = await moving(ledgers)
    new, again = await ledgers.node("a")
    assert again == Claim("a", 2)
    calls = [
        old.swap(record, abort(record, a)),
        old.settle("world", "move-1"),
        old.create(session(a, "other")),
        old.renew(),
        old.resign(),
        old.ping(),
        old.idempotent("key", "hash", "move-9"),
        old.forget("key", "move-9"),
        old.put_receipt(receipt("move-9")),
    ]
    for call in calls:
        with pytest.raises(FencedError) as fenced:
            await call
        assert fenced.value.details == {"incarnation": 1, "claimed": 2}
    assert await old.get("world") == record
    aborted = await new.settle("world", "move-1")
    assert aborted.holder == again
    assert aborted == abort(record, again)
    assert await old.receipt("move-9") is None
    assert b.incarnation == 1


async def test_before_claim_and_after_resign_nothing_is_written(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    assert ledger.claimed is None
    with pytest.raises(FencedError):
        await ledger.renew()
    assert await ledger.ping() >= 0
    await ledger.claim(node_info("a"))
    assert ledger.claimed == Claim("a", 1)
    await ledger.resign()
    assert await ledger.nodes() == []
    with pytest.raises(FencedError):
        await ledger.create(session(Claim("a", 1)))
    assert await ledger.claim(node_info("a")) == 2


async def test_retake_after_a_restart(ledgers: Ledgers) -> None:
    first, a = await ledgers.node("a")
    owned = await first.create(session(a))
    second, later = await ledgers.node("a")
    with pytest.raises(ProtocolError):
        await second.swap(owned, update(owned, block=4, revision=1, endpoint=None))
    mine = retake(owned, later)
    await second.swap(owned, mine)
    newer = update(mine, block=9, revision=2, endpoint="ws://a")
    await second.swap(mine, newer)
    assert await first.get("world") == newer


async def test_create_refuses_what_exists_and_continues_the_epoch(ledgers: Ledgers) -> None:
    one, a = await ledgers.node("a")
    two, b = await ledgers.node("b")
    record = await one.create(session(a))
    with pytest.raises(SessionExistsError) as exists:
        await two.create(session(b))
    assert exists.value.details["owner"] == "a"
    moved = replace(record, epoch=7)
    with pytest.raises(ProtocolError):
        await one.swap(record, moved)
    await one.swap(record, end(record))
    again = await two.create(session(b))
    assert (again.epoch, again.owner) == (2, "b")
    await two.swap(again, end(again))
    assert (await one.create(session(a, epoch=9))).epoch == 9


async def test_concurrent_creates_have_one_winner(ledgers: Ledgers) -> None:
    nodes = [await ledgers.node(name) for name in "abcd"]
    outcomes = await asyncio.gather(
        *(ledger.create(session(claim)) for ledger, claim in nodes), return_exceptions=True
    )
    winners = [outcome for outcome in outcomes if isinstance(outcome, SessionRecord)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, SessionExistsError) for outcome in outcomes) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", ""),
        ("session_id", "x" * 513),
        ("session_id", "\ud800"),
        ("session_id", "a\0b"),
        ("epoch", 0),
        ("epoch", 1 << 63),
        ("incarnation", 2),
        ("owner", "b"),
        ("block", -2),
        ("revision", -1),
        ("phase", "moving"),
        ("phase", "ended"),
        ("outcome", "aborted"),
        ("last_move_id", "m"),
        ("endpoint", "e" * 5000),
    ],
)
async def test_malformed_records_are_refused(ledgers: Ledgers, field: str, value: object) -> None:
    ledger, a = await ledgers.node("a")
    with pytest.raises(ValidationError) as refused:
        await ledger.create(replace(session(a), **{field: value}))
    assert "field" in refused.value.details
    assert await ledger.sessions() == []


async def test_odd_texts_in_reads_are_refused_not_passed_on(ledgers: Ledgers) -> None:
    ledger, _ = await ledgers.node("a")
    for text in ("\ud800", "", "x" * 600):
        for call in (
            ledger.get(text),
            ledger.settle(text, "m"),
            ledger.receipt(text),
            ledger.sessions(text),
            ledger.forget(text, "m"),
            ledger.idempotent(text, "h", "m"),
            ledger.receipts(5, text),
        ):
            with pytest.raises(ValidationError):
                await call
    for limit in (0, -1, MAX_PAGE + 1):
        with pytest.raises(ValidationError):
            await ledger.sessions(limit=limit)


async def test_sessions_are_paged_in_code_point_order(ledgers: Ledgers) -> None:
    ledger, a = await ledgers.node("a")
    names = ["Ä", "a", "b", "Z", "0", "日本", "\U0001f30d", "￿"]
    for name in names:
        await ledger.create(session(a, name))
    gone = await ledger.get("b")
    assert gone is not None
    await ledger.swap(gone, end(gone))
    found: list[str] = []
    while page := await ledger.sessions(found[-1] if found else None, limit=3):
        found += [record.session_id for record in page]
    assert found == sorted(set(names) - {"b"})
    assert [record.session_id for record in await ledger.sessions(ended=True)] == sorted(names)


async def test_close_is_final_and_may_be_repeated(ledgers: Ledgers) -> None:
    ledger, _ = await ledgers.node("a")
    await ledger.close()
    await ledger.close()
    for call in (ledger.get("x"), ledger.renew(), ledger.ping(), ledger.sessions()):
        with pytest.raises(LedgerError, match="closed"):
            await call


async def test_a_cancelled_caller_loses_nothing(ledgers: Ledgers) -> None:
    source, _a, destination, _b, record = await moving(ledgers)
    committed = commit(record, block=5, revision=1, root=ROOT)
    call = asyncio.create_task(destination.swap(record, committed))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    # What was handed over before the cancellation is in the queue before this settle.
    assert fate(await destination.settle("world", "move-1"), "move-1") == "committed"
    assert await source.get("world") == committed
