"""What every ledger must do besides sessions: nodes, idempotency keys, receipts, watching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ledger_kit import Ledgers, receipt, session

from worldmove.errors import (
    IdempotencyMismatchError,
    NotFoundError,
    ValidationError,
)
from worldmove.ledger import transactions
from worldmove.ledger.base import Change
from worldmove.ledger.records import (
    end,
)


@pytest.fixture(params=["sqlite", "memory"])
async def ledgers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledgers]:
    world = Ledgers(request.param, tmp_path)
    yield world
    await world.close()


async def test_nodes_and_beats(ledgers: Ledgers) -> None:
    one, _ = await ledgers.node("b")
    two, _ = await ledgers.node("a")
    await one.renew()
    await one.ping()
    assert [(node.name, node.incarnation, node.beat) for node in await two.nodes()] == [
        ("a", 1, 0),
        ("b", 1, 2),
    ]
    await ledgers.node("b")
    assert [(node.name, node.incarnation, node.beat) for node in await two.nodes()] == [
        ("a", 1, 0),
        ("b", 2, 0),
    ]


async def test_idempotency_keys(ledgers: Ledgers) -> None:
    one, _ = await ledgers.node("a")
    two, _ = await ledgers.node("b")
    assert await one.idempotent("key", "hash", "move-1") is None
    assert await two.idempotent("key", "hash", "move-2") == "move-1"
    with pytest.raises(IdempotencyMismatchError):
        await two.idempotent("key", "other", "move-2")
    await two.forget("key", "move-2")
    assert await two.idempotent("key", "hash", "move-2") == "move-1"
    await one.forget("key", "move-1")
    assert await two.idempotent("key", "other", "move-2") is None


async def test_idempotency_keys_are_bounded(ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_KEYS", 10)
    ledger, _ = await ledgers.node("a")
    for number in range(25):
        assert await ledger.idempotent(f"key-{number}", "hash", f"move-{number}") is None
    assert await ledger.idempotent("key-15", "hash", "x") == "move-15"
    assert await ledger.idempotent("key-14", "hash", "x") is None


async def test_the_first_final_receipt_stays(ledgers: Ledgers) -> None:
    ledger, _ = await ledgers.node("a")
    for number in range(5):
        await ledger.put_receipt(receipt(f"move-{number}", "committed"))
    await ledger.put_receipt(receipt("move-1", "released"))
    await ledger.put_receipt(receipt("move-1", "aborted", "late"))
    kept = await ledger.receipt("move-1")
    assert kept == receipt("move-1", "released")
    first = await ledger.receipts(2)
    assert [entry.migration_id for entry in first] == ["move-4", "move-3"]
    rest = await ledger.receipts(10, "move-3")
    assert [entry.migration_id for entry in rest] == ["move-2", "move-1", "move-0"]
    with pytest.raises(NotFoundError):
        await ledger.receipts(10, "move-9")
    with pytest.raises(ValidationError):
        await ledger.put_receipt(receipt("big", reason="x" * (1 << 20)))


async def take(watch: AsyncIterator[Change], count: int) -> list[Change]:
    async with asyncio.timeout(20):
        return [await anext(watch) for _ in range(count)]


async def test_watch_tells_what_stands_and_what_changes(ledgers: Ledgers) -> None:
    one, a = await ledgers.node("a")
    record = await one.create(session(a))
    two = await ledgers.open()
    watch = two.watch()
    told = await take(watch, 2)
    assert [change.node and change.node.name for change in told] == ["a", None]
    assert told[1].session == record
    ended = end(record)
    pending = asyncio.create_task(take(watch, 1))
    await one.renew()
    await one.swap(record, ended)
    assert [change.session for change in await pending] == [ended]
    await one.resign()
    last = await take(watch, 1)
    assert last[0].node is not None
    assert last[0].node.resigned
    assert last[0].seq == await two.position()


async def test_watch_from_a_position_and_by_several(ledgers: Ledgers) -> None:
    ledger, a = await ledgers.node("a")
    other = await ledgers.open()
    since = await other.position()
    watches = [one.watch(since) for one in (ledger, ledger, other)]
    tasks = [asyncio.create_task(take(watch, 600)) for watch in watches]
    for number in range(600):
        await ledger.create(session(a, f"world-{number:03d}"))
    for told in await asyncio.gather(*tasks):
        assert [change.session.session_id for change in told if change.session] == [
            f"world-{number:03d}" for number in range(600)
        ]


async def test_watch_ends_with_the_ledger_and_can_be_cancelled(ledgers: Ledgers) -> None:
    ledger, _ = await ledgers.node("a")

    async def follow() -> list[Change]:
        return [change async for change in ledger.watch()]

    watching = asyncio.create_task(follow())
    dropped = asyncio.create_task(follow())
    await ledger.position()
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    await ledger.close()
    assert len(await watching) <= 1
