"""What is made ready before a commit: the record at hand, and room in the log."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from ledger_kit import node_info, session
from starve_kit import full, small_disk

from worldmove.ledger import open_ledger, sqlite, sqlite_file
from worldmove.ledger.records import Claim
from worldmove.ledger.sqlite import SqliteLedger
from worldmove.ledger.sqlite_file import LOG_FRAMES


async def test_warming_changes_nothing_and_never_fails(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", busy_ms=50)
    await ledger.claim(node_info("a"))
    record = await ledger.create(session(Claim("a", 1), "world"))
    position = await ledger.position()
    for name in ("world", "nobody"):
        await ledger.warm(name)
    assert await ledger.position() == position
    assert await ledger.get("world") == record
    await ledger.close()
    await ledger.warm("world")


async def test_commits_find_room_in_the_log_and_do_not_extend_it(tmp_path: Path) -> None:
    """A sync of a file that has grown takes twice as long; the file of the ledger itself stays small."""
    path, log = tmp_path / "ledger.db", tmp_path / "ledger.db-wal"
    ledgers = [await open_ledger(f"sqlite:///{path}") for _ in range(2)]
    room = log.stat().st_size
    assert room >= LOG_FRAMES * 4096
    for number, ledger in enumerate(ledgers):
        await ledger.claim(node_info(f"n{number}"))
        for _ in range(50):
            await ledger.renew()
    assert log.stat().st_size == room
    assert path.stat().st_size < 100_000
    with sqlite3.connect(path) as looking:
        tables = {name for (name,) in looking.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert "room" not in tables
    looking.close()
    for ledger in ledgers:
        await ledger.close()


async def test_a_small_disk_keeps_its_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        ledger = await SqliteLedger.open(disk / "ledger.db")
        await ledger.claim(node_info("a"))
        assert (disk / "ledger.db-wal").stat().st_size < 1 << 20
        await ledger.close()


async def test_a_disk_that_fills_up_while_the_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been taken is given back; the ledger is whole, and as durable as ever."""
    monkeypatch.setattr(sqlite_file, "_SPARE", 0)
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        path = disk / "ledger.db"
        ledger = await SqliteLedger.open(path)
        await ledger.claim(node_info("a"))
        record = await ledger.create(session(Claim("a", 1), "world"))
        assert (disk / "ledger.db-wal").stat().st_size < 1 << 20
        with full(disk):
            again = await SqliteLedger.open(path)
            assert await again.get("world") == record
            await again.close()
        file = sqlite_file.SqliteFile(path, 50)
        connection = file._open()
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        file.close()
        await ledger.close()


async def test_a_thread_that_was_warmed_takes_calls_awake_and_asleep_and_ends_either_way(
    tmp_path: Path,
) -> None:
    for rest_s in (0.0, 0.002, 2 * sqlite._AWAKE_S):
        ledger = await SqliteLedger.open(tmp_path / "ledger.db")
        await ledger.claim(node_info("a"))
        await ledger.warm("world")
        await asyncio.sleep(rest_s)
        await ledger.renew()
        await ledger.warm("world")
        await asyncio.sleep(rest_s)
        await asyncio.wait_for(ledger.close(), 5)


async def test_nobody_looks_for_a_call_that_does_not_come(tmp_path: Path) -> None:
    """Only for as long as a pause may take: it costs no processor time afterwards."""
    ledger = await SqliteLedger.open(tmp_path / "ledger.db")
    await ledger.warm("world")
    await asyncio.sleep(3 * sqlite._AWAKE_S)
    before = time.process_time()
    await asyncio.sleep(0.2)
    assert time.process_time() - before < 0.02
    await ledger.close()
