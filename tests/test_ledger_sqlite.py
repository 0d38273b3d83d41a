"""The SQLite ledger alone: several processes, deaths, full disks, locks, foreign files, cancellation."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ledger_kit import ROOT, move_ref, node_info, receipt, session
from msgspec.structs import replace

from worldmove.errors import ConfigError, LedgerError
from worldmove.ledger import check_url, open_ledger, transactions
from worldmove.ledger.records import Claim, begin, commit, update
from worldmove.ledger.sqlite import SqliteLedger
from worldmove.ledger.sqlite_file import SqliteFile

CHILD = Path(__file__).with_name("ledger_child.py")


@asynccontextmanager
async def child(*words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(CHILD), *map(str, words), stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def finish(process: asyncio.subprocess.Process, said: str = "") -> list[list[str]]:
    out, _ = await process.communicate(said.encode() or None)
    assert process.returncode == 0
    return [words.split() for words in out.decode().splitlines()]


async def race(*children: asyncio.subprocess.Process) -> list[list[list[str]]]:
    for process in children:
        assert await line(process) == "ready"
    return list(await asyncio.gather(*(finish(process, "go\n") for process in children)))


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    opened = await SqliteLedger.open(tmp_path / "ledger.db", busy_ms=50)
    await opened.claim(node_info("a"))
    yield opened
    await opened.close()


async def test_processes_that_open_a_new_file_at_once_and_register_the_same_ids(tmp_path: Path) -> None:
    path, rounds = tmp_path / "ledger.db", 40
    async with (
        child("create", path, "a", rounds) as a,
        child("create", path, "b", rounds) as b,
        child("create", path, "c", rounds) as c,
    ):
        said = await race(a, b, c)
    won = {name: {int(number) for _, number in words} for name, words in zip("abc", said, strict=True)}
    assert sum(map(len, won.values())) == rounds
    ledger = await SqliteLedger.open(path)
    for record in await ledger.sessions():
        assert int(record.session_id.removeprefix("world-")) in won[record.owner]
    await ledger.close()


async def test_processes_that_claim_one_name_get_one_incarnation_each(tmp_path: Path) -> None:
    path, rounds = tmp_path / "ledger.db", 30
    async with child("claim", path, rounds) as a, child("claim", path, rounds) as b:
        said = await race(a, b)
    got = [[int(number) for _, number in words] for words in said]
    assert sorted(got[0] + got[1]) == list(range(1, 2 * rounds + 1))
    assert all(numbers == sorted(numbers) for numbers in got)


async def test_commit_and_abort_of_two_processes_have_one_winner(tmp_path: Path) -> None:
    path, rounds = tmp_path / "ledger.db", 80
    async with child("settle", path, "a", rounds) as a, child("settle", path, "b", rounds) as b:
        for process in (a, b):
            assert await line(process) == "ready"
        source, destination = Claim("a", 1), Claim("b", 1)
        file = SqliteFile(path, 2000)
        for number in range(rounds):
            record = session(source, f"world-{number}")
            with file.transaction(write=True) as tables:
                transactions.create(tables, source, record)
                transactions.swap(tables, source, record, begin(record, move_ref(source, destination)))
        file.close()
        said = await asyncio.gather(finish(a, "go\n"), finish(b, "go\n"))
    aborted, committed = ({int(number) for _, number in words} for words in said)
    assert not aborted & committed
    assert aborted | committed == set(range(rounds))
    ledger = await SqliteLedger.open(path)
    for record in await ledger.sessions():
        number = int(record.session_id.removeprefix("world-"))
        assert (record.phase, record.owner) == (("owned", "a") if number in aborted else ("committed", "b"))
    await ledger.close()


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    for count in (1, 7, 23):
        path.unlink(missing_ok=True)
        async with child("count", path) as process:
            last = 0
            while last < count:
                last = int(await line(process))
            process.kill()
            rest, _ = await process.communicate()
            last = max([last, *map(int, rest.decode().split())])
        ledger = await SqliteLedger.open(path)
        record = await ledger.get("world")
        assert record is not None
        assert record.block in (last, last + 1)
        assert await ledger.claim(node_info("a")) == 2
        await ledger.close()


async def test_a_process_killed_at_any_statement_leaves_whole_records(tmp_path: Path) -> None:
    async with child("killed", tmp_path / "ledger.db") as process:
        said = await finish(process)
    assert said[0][0] == "statements"
    assert int(said[0][1]) > 40


async def test_a_full_disk_is_an_error_and_nothing_is_half_written(tmp_path: Path) -> None:
    async with child("full", tmp_path / "ledger.db") as process:
        said = await finish(process)
    assert said[0][0] == "done"


async def test_a_locked_file_stops_writes_not_reads(ledger: SqliteLedger, tmp_path: Path) -> None:
    record = await ledger.create(session(Claim("a", 1)))
    newer = update(record, block=9, revision=1, endpoint=None)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError) as locked:
        await ledger.swap(record, newer)
    assert locked.value.details["cause"] == "SQLITE_BUSY"
    assert await ledger.get("world") == record
    with pytest.raises(LedgerError):
        await ledger.ping()
    other.execute("ROLLBACK")
    other.close()
    await ledger.swap(record, newer)
    assert await ledger.ping() > 0


async def test_a_replaced_or_deleted_file_stops_the_ledger(ledger: SqliteLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await ledger.create(session(Claim("a", 1)))
    files = [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]
    for file in files:
        file.rename(tmp_path / f"kept-{file.name}")
    with pytest.raises(LedgerError):
        await ledger.renew()
    with pytest.raises(LedgerError):
        await ledger.get("world")
    assert not path.exists()
    other = await SqliteLedger.open(path)
    with pytest.raises(LedgerError, match="replaced"):
        await ledger.renew()
    with pytest.raises(LedgerError, match="replaced"):
        await ledger.get("world")
    assert await other.nodes() == []
    await other.close()
    for file in files:
        (tmp_path / f"kept-{file.name}").rename(file)
    assert await ledger.get("world") is not None
    await ledger.renew()


async def test_a_file_put_in_the_place_of_an_open_one_stops_the_ledger(
    ledger: SqliteLedger, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    await ledger.create(session(Claim("a", 1)))
    other = tmp_path / "other.db"
    await (await SqliteLedger.open(other)).close()
    other.replace(path)
    for _ in range(2):
        with pytest.raises(LedgerError) as replaced:
            await ledger.renew()
        assert replaced.value.details["cause"] == "replaced"
        with pytest.raises(LedgerError):
            await ledger.get("world")


async def test_files_that_are_no_ledger_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(b"something else, longer than a header of SQLite" * 99)
    with pytest.raises(LedgerError):
        await SqliteLedger.open(path)
    assert path.read_bytes().startswith(b"something else")
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(LedgerError, match="something else"):
        await SqliteLedger.open(foreign)
    assert foreign.read_bytes() == before
    with pytest.raises(LedgerError):
        await SqliteLedger.open(tmp_path)
    later = tmp_path / "later.db"
    await (await SqliteLedger.open(later)).close()
    connection = sqlite3.connect(later)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(LedgerError, match="format 99"):
        await SqliteLedger.open(later)


async def test_a_record_of_a_later_version_is_an_error(ledger: SqliteLedger, tmp_path: Path) -> None:
    record = await ledger.create(session(Claim("a", 1)))
    connection = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    connection.execute("UPDATE sessions SET value = json_set(value, '$.colour', 'red')")
    connection.close()
    with pytest.raises(LedgerError, match="version"):
        await ledger.get("world")
    with pytest.raises(LedgerError, match="version"):
        await ledger.swap(record, update(record, block=9, revision=1, endpoint=None))
    assert await ledger.ping() > 0


async def test_calls_outlive_their_callers_and_close_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(path, busy_ms=30_000)
    a, b = Claim("a", await ledger.claim(node_info("a"))), Claim("b", 1)
    record = await ledger.create(session(a))
    moving = begin(record, move_ref(a, b))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    calls = [asyncio.create_task(ledger.swap(record, moving)), asyncio.create_task(ledger.renew())]
    await ledger.position()  # both are queued or running by now
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    closing = asyncio.create_task(ledger.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    other.execute("COMMIT")
    other.close()
    await ledger.close()
    again = await SqliteLedger.open(path)
    assert await again.get("world") == moving
    assert [node.beat for node in await again.nodes()] == [1]
    await again.close()


async def test_an_error_after_a_cancelled_call_goes_nowhere(ledger: SqliteLedger) -> None:
    stale = await ledger.create(session(Claim("a", 1)))
    await ledger.swap(stale, update(stale, block=9, revision=1, endpoint=None))
    call = asyncio.create_task(ledger.swap(stale, update(stale, block=8, revision=1, endpoint=None)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    await ledger.ping()  # any "exception was never retrieved" would fail the test run


async def test_close_ends_threads_and_files(tmp_path: Path) -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ledger-")]

    def files() -> int:
        return sum(
            str(tmp_path) in str(entry.resolve()) or "inotify" in str(entry.readlink())
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink()
        )

    assert (ours(), files()) == ([], 0)
    for _ in range(5):
        ledger = await SqliteLedger.open(tmp_path / "ledger.db")
        await ledger.claim(node_info("a"))
        assert len(ours()) == 3
        await ledger.close()
    assert (ours(), files()) == ([], 0)
    assert not (tmp_path / "ledger.db-wal").exists()


async def test_the_log_is_moved_into_the_file_aside_from_commits(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(path)
    a = Claim("a", await ledger.claim(node_info("a")))
    record = await ledger.create(session(a, block=0))
    for _ in range(4000):
        newer = update(record, block=record.block + 1, revision=1, endpoint=None)
        await ledger.swap(record, newer)
        record = newer
    await ledger.position()
    await ledger.ping()
    assert (tmp_path / "ledger.db-wal").stat().st_size < 32 << 20
    await ledger.close()


async def test_watch_hears_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(path)
    ledger._bell.patience = None  # only the file's bell can wake it
    blocks: list[int] = []
    async with child("count", path) as process:
        async with asyncio.timeout(60):
            async for change in ledger.watch():
                if change.session is not None:
                    blocks.append(change.session.block)
                    if len(blocks) == 20:
                        break
        process.kill()
    assert blocks == sorted(set(blocks))
    await ledger.close()


async def test_watch_works_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldmove.ledger.bell._inotify", lambda _: None)
    one = await SqliteLedger.open(tmp_path / "ledger.db")
    two = await SqliteLedger.open(tmp_path / "ledger.db")
    watch = two.watch()
    told = asyncio.create_task(anext(watch))
    await two.position()
    await one.claim(node_info("a"))
    change = await told
    assert change.node is not None
    await watch.aclose()
    await one.close()
    await two.close()


async def test_receipts_survive_as_they_were(ledger: SqliteLedger, tmp_path: Path) -> None:
    kept = replace(receipt("move-1"), reason="größer als 1 € \U0001f30d", total_ms=0.1 + 0.2)
    await ledger.put_receipt(kept)
    await ledger.close()
    again = await SqliteLedger.open(tmp_path / "ledger.db")
    assert await again.receipt("move-1") == kept
    await again.close()


async def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_url("sqlite:///l.db") == tmp_path / "l.db"
    assert check_url(f"sqlite:///{tmp_path}/a b%20ü.db") == tmp_path / "a b%20ü.db"
    for url in (
        "",
        "l.db",
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite://l.db",
        "sqlite:///:memory:",
        "sqlite:///l.db?mode=ro",
        "sqlite:////nowhere/l.db",
        "sqlite:////tmp/",
        "etcd://host:2379",
        "postgres://x/y",
    ):
        with pytest.raises(ConfigError) as refused:
            await open_ledger(url)
        assert refused.value.details["option"] == "ledger"
    odd = await open_ledger(f"sqlite:///{tmp_path}/a b%20ü.db")
    await odd.claim(node_info("a"))
    await odd.close()
    assert (tmp_path / "a b%20ü.db").exists()


async def test_a_commit_under_a_slow_reader(ledger: SqliteLedger, tmp_path: Path) -> None:
    a = Claim("a", 1)
    record = await ledger.create(session(a))
    reader = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM sessions").fetchall()
    moving = begin(record, move_ref(a, a))
    await ledger.swap(record, moving)
    await ledger.swap(moving, commit(moving, block=5, revision=1, root=ROOT))
    reader.close()
