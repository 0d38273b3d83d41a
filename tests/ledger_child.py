"""What the ledger's tests run in processes of their own: `python ledger_child.py WHAT PATH ARGUMENTS...`."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from ledger_kit import ROOT, move_ref, node_info, receipt, session

from worldmove.errors import LedgerError, LostRaceError, ProtocolError, SessionExistsError
from worldmove.ledger import transactions
from worldmove.ledger.records import Claim, SessionRecord, abort, adopt, begin, commit, current_move, update
from worldmove.ledger.sqlite import SqliteLedger
from worldmove.ledger.sqlite_file import SqliteFile
from worldmove.ledger.transactions import Key, Tables


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def create(path: Path, name: str, rounds: int) -> None:
    """Registers the same ids as its rivals do; says which ones it got."""
    ledger = await SqliteLedger.open(path, busy_ms=20_000)
    me = Claim(name, await ledger.claim(node_info(name)))
    say("ready")
    sys.stdin.readline()
    for number in range(rounds):
        try:
            await ledger.create(session(me, f"world-{number}"))
        except SessionExistsError:
            continue
        say("won", number)
    await ledger.close()


async def settle(path: Path, name: str, rounds: int) -> None:
    """Ends the moves that it finds, as source by an abort, as destination by a commit; says which it won."""
    ledger = await SqliteLedger.open(path, busy_ms=20_000)
    me = Claim(name, await ledger.claim(node_info(name)))
    say("ready")
    sys.stdin.readline()
    for number in range(rounds):
        record = await ledger.get(f"world-{number}")
        assert record is not None
        try:
            await ledger.swap(record, ending(record, me))
        except (LostRaceError, ProtocolError):
            continue
        say("won", number)
    await ledger.close()


def ending(record: SessionRecord, me: Claim) -> SessionRecord:
    if me.name == current_move(record).source:
        return abort(record, me)
    return commit(record, block=5, revision=1, root=ROOT)


async def claim(path: Path, rounds: int) -> None:
    """Claims one name again and again, and says which incarnations it got."""
    ledger = await SqliteLedger.open(path, busy_ms=20_000)
    say("ready")
    sys.stdin.readline()
    for _ in range(rounds):
        say("got", await ledger.claim(node_info("same")))
    await ledger.close()


async def count(path: Path) -> None:
    """Counts a session's block up, saying each number after its commit, until it is killed."""
    ledger = await SqliteLedger.open(path)
    me = Claim("a", await ledger.claim(node_info("a")))
    record = await ledger.create(session(me, block=0))
    while True:
        newer = update(record, block=record.block + 1, revision=1, endpoint=None)
        await ledger.swap(record, newer)
        record = newer
        say(record.block)


async def full(path: Path) -> None:
    """Meets a full disk (its files may not grow) in the middle of its writes, and goes on once it can."""
    ledger = await SqliteLedger.open(path)
    me = Claim("a", await ledger.claim(node_info("a")))
    record = await ledger.create(session(me, block=0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, resource.RLIM_INFINITY))
    failed = 0
    while not failed:
        newer = update(record, block=record.block + 1, revision=1, endpoint="e" * 4000)
        try:
            await ledger.swap(record, newer)
        except LostRaceError:
            raise
        except LedgerError:
            failed += 1
        else:
            record = newer
    stands = await ledger.get("world")
    assert stands in (record, newer), stands
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await ledger.swap(stands, update(stands, block=stands.block + 2, revision=1, endpoint=None))
    assert await ledger.ping() > 0
    await ledger.close()
    say("done", stands.block)


def killed(path: Path) -> None:
    """Runs the same writes in children, of which the n-th is killed at its n-th SQL statement."""
    say("statements", sum(1 for number in iter(lambda: _one_life(path), None)))


_lives = 0


def _one_life(path: Path) -> int | None:
    global _lives  # noqa: PLW0603 - one counter of a test program
    _lives += 1
    child = os.fork()
    if child == 0:
        _live(path, _lives)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    _examine(path)
    return None if status == 0 else _lives


def _live(path: Path, deadline: int) -> None:
    file = SqliteFile(path, 2000)
    seen = 0

    def on_statement(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == deadline:
            os.kill(os.getpid(), signal.SIGKILL)

    with file.transaction(write=False):
        pass
    connection = file._open()
    connection.set_trace_callback(on_statement)

    def write(change: object) -> object:
        with file.transaction(write=True) as tables:
            return change(tables)  # type: ignore[operator]

    source = write(partial(transactions.claim_name, node=node_info("a")))
    destination = write(partial(transactions.claim_name, node=node_info("b")))
    name = f"world-{deadline}"
    owned = write(partial(transactions.create, claim=source, record=session(source, name)))
    moving = begin(owned, move_ref(source, destination))
    write(partial(transactions.swap, claim=source, old=owned, new=moving))
    committed = commit(moving, block=5, revision=1, root=ROOT)
    write(partial(transactions.swap, claim=destination, old=moving, new=committed))
    write(partial(transactions.settle, claim=source, session_id=name, move_id="move-1"))
    write(partial(_chain, source=source, destination=destination, name=f"chain-{deadline}"))
    write(partial(transactions.reserve_key, claim=source, key=name, wanted=Key("h", name)))
    write(partial(transactions.put_receipt, claim=source, receipt=receipt(name)))
    write(partial(transactions.renew, claim=source))
    write(partial(transactions.resign, claim=source))
    file.checkpoint()


def _chain(tables: Tables, source: Claim, destination: Claim, name: str) -> None:
    """A session that is moved in one go: both its ends write in one transaction."""
    owned = transactions.create(tables, source, session(source, name))
    moving = begin(owned, move_ref(source, destination))
    transactions.swap(tables, source, owned, moving)
    committed = commit(moving, block=5, revision=1, root=ROOT)
    adopted = adopt(committed, destination, endpoint=None)
    assert transactions.swap_then(tables, destination, moving, committed, adopted) is None


def _examine(path: Path) -> None:
    """After a death: the file is sound, and every record is one that a finished transaction wrote."""
    file = SqliteFile(path, 2000)
    with file.transaction(write=False) as tables:
        assert tables._one("PRAGMA integrity_check")[0] == "ok"
        seqs = [change.seq for change in tables.changes(0, 10_000)]
        assert len(seqs) == len(set(seqs))
        assert max(seqs, default=0) == tables.position()
        for record in tables.sessions("", 1000, ended=True):
            if record.session_id.startswith("chain-"):
                assert (record.phase, record.owner, record.epoch) == ("adopted", "b", 2), record
                continue
            assert (record.phase, record.owner, record.epoch) in (
                ("owned", "a", 1),
                ("moving", "a", 1),
                ("committed", "b", 2),
            ), record
    file.close()


if __name__ == "__main__":
    what, path, *rest = sys.argv[1:]
    if what == "killed":
        killed(Path(path))
    elif what in ("create", "settle"):
        asyncio.run({"create": create, "settle": settle}[what](Path(path), rest[0], int(rest[1])))
    elif what == "claim":
        asyncio.run(claim(Path(path), int(rest[0])))
    else:
        asyncio.run({"count": count, "full": full}[what](Path(path)))
