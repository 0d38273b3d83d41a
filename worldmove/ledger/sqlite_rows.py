"""The ledger's rows in SQLite: each one's key and what is searched by, beside the value as msgspec JSON."""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar

import msgspec

from worldmove.errors import LedgerError
from worldmove.ledger.base import Change
from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.ledger.transactions import Key
from worldmove.views import Receipt

SCHEMA = """
CREATE TABLE meta (one INTEGER PRIMARY KEY CHECK (one = 1), ledger TEXT NOT NULL, seq INTEGER NOT NULL);
CREATE TABLE nodes (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, seq INTEGER NOT NULL, ended INTEGER NOT NULL, value BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX sessions_by_seq ON sessions (seq);
CREATE INDEX sessions_standing ON sessions (id) WHERE ended = 0;
CREATE TABLE keys (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT UNIQUE NOT NULL, body_hash TEXT NOT NULL, move_id TEXT NOT NULL
);
CREATE TABLE receipts (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, value BLOB NOT NULL)
"""
R = TypeVar("R", NodeInfo, SessionRecord, Receipt)


def _decode(raw: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise LedgerError(f"a {kind.__name__} in the ledger is not of this version: {error}") from error


class SqliteTables:
    """`transactions.Tables` on one open transaction; `told` says whether watchers have to be rung."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.told = False

    def _one(self, statement: str, *values: Any) -> Any:
        return self._connection.execute(statement, values).fetchone()

    def _all(self, statement: str, *values: Any) -> list[Any]:
        return self._connection.execute(statement, values).fetchall()

    def _count(self) -> None:
        """One more change, whose number is the latest from now on."""
        self.told = True
        self._connection.execute("UPDATE meta SET seq = seq + 1")

    def position(self) -> int:
        """Sequence number of the latest change."""
        return int(self._one("SELECT seq FROM meta")[0])

    def node(self, name: str) -> NodeInfo | None:
        """One node."""
        row = self._one("SELECT value FROM nodes WHERE name = ?", name)
        return None if row is None else _decode(row[0], NodeInfo)

    def nodes(self) -> list[NodeInfo]:
        """All nodes by name."""
        return [_decode(row[0], NodeInfo) for row in self._all("SELECT value FROM nodes ORDER BY name")]

    def put_node(self, node: NodeInfo, *, tell: bool) -> None:
        """Writes a node; an untold write needs one that stands."""
        value = msgspec.json.encode(node)
        if tell:
            self._count()
            self._connection.execute(
                "INSERT OR REPLACE INTO nodes (name, seq, value) VALUES (?, (SELECT seq FROM meta), ?)",
                (node.name, value),
            )
        else:
            self._connection.execute("UPDATE nodes SET value = ? WHERE name = ?", (value, node.name))

    def session(self, session_id: str) -> SessionRecord | None:
        """One session."""
        row = self._one("SELECT value FROM sessions WHERE id = ?", session_id)
        return None if row is None else _decode(row[0], SessionRecord)

    def sessions(self, after: str, limit: int, *, ended: bool) -> list[SessionRecord]:
        """Sessions by id behind `after`."""
        which = "" if ended else "AND ended = 0 "
        statement = f"SELECT value FROM sessions WHERE id > ? {which}ORDER BY id LIMIT ?"  # noqa: S608 - constant
        return [_decode(row[0], SessionRecord) for row in self._all(statement, after, limit)]

    def put_session(self, record: SessionRecord) -> None:
        """Writes a session."""
        self._count()
        row = (record.session_id, record.phase == "ended", msgspec.json.encode(record))
        self._connection.execute(
            "INSERT OR REPLACE INTO sessions (id, seq, ended, value)"
            " VALUES (?, (SELECT seq FROM meta), ?, ?)",
            row,
        )

    def changes(self, after: int, limit: int) -> list[Change]:
        """Sessions and nodes written later than `after`, by sequence number."""
        sessions = "SELECT seq, value FROM sessions WHERE seq > ? ORDER BY seq LIMIT ?"
        nodes = "SELECT seq, value FROM nodes WHERE seq > ? ORDER BY seq LIMIT ?"
        found = [
            Change(seq=seq, session=_decode(raw, SessionRecord))
            for seq, raw in self._all(sessions, after, limit)
        ]
        found += [Change(seq=seq, node=_decode(raw, NodeInfo)) for seq, raw in self._all(nodes, after, limit)]
        return sorted(found, key=lambda change: change.seq)[:limit]

    def key(self, key: str) -> Key | None:
        """One idempotency key."""
        row = self._one("SELECT body_hash, move_id FROM keys WHERE key = ?", key)
        return None if row is None else Key(*row)

    def put_key(self, key: str, value: Key, keep: int) -> None:
        """Adds a key and drops the oldest beyond `keep`."""
        self._connection.execute("INSERT INTO keys (key, body_hash, move_id) VALUES (?, ?, ?)", (key, *value))
        self._connection.execute("DELETE FROM keys WHERE seq <= (SELECT max(seq) FROM keys) - ?", (keep,))

    def drop_key(self, key: str) -> None:
        """Removes a key."""
        self._connection.execute("DELETE FROM keys WHERE key = ?", (key,))

    def receipt(self, move_id: str) -> Receipt | None:
        """One receipt."""
        row = self._one("SELECT value FROM receipts WHERE id = ?", move_id)
        return None if row is None else _decode(row[0], Receipt)

    def receipts(self, limit: int, after: str | None) -> list[Receipt]:
        """Receipts, newest first, behind the one of `after`."""
        statement = (
            "SELECT value FROM receipts"
            " WHERE ?1 IS NULL OR seq < (SELECT seq FROM receipts WHERE id = ?1) ORDER BY seq DESC LIMIT ?2"
        )
        return [_decode(row[0], Receipt) for row in self._all(statement, after, limit)]

    def put_receipt(self, receipt: Receipt) -> None:
        """Writes a receipt; a later one of the same move keeps the first one's place."""
        self._connection.execute(
            "INSERT INTO receipts (id, value) VALUES (?, ?)"
            " ON CONFLICT (id) DO UPDATE SET value = excluded.value",
            (receipt.migration_id, msgspec.json.encode(receipt)),
        )
