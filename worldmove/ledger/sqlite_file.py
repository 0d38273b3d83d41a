"""One connection to a ledger in a SQLite file, used by one thread.

The format of the file is version `_VERSION` (`PRAGMA user_version`); a file of another version, or one that
is no ledger, is refused. Commits are durable: write-ahead log, `synchronous=FULL`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from worldmove.errors import LedgerError
from worldmove.ledger.sqlite_rows import SCHEMA, SqliteTables

_APPLICATION = 0x574D4C31
_VERSION = 1
_RETRY_S = 0.01
LOG_FRAMES = 512
"""Room of the log from the start: a sync of a file that has grown, too, takes twice as long."""
_LOG_BYTES = 32 + LOG_FRAMES * (4096 + 24)
_SPARE = 8
"""The log gets its room only where this many times as much is free."""


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _extend(log: Path) -> None:
    """Appends zeros to the log, or nothing: what comes after the last frame that is valid means nothing.

    Closing the file here costs SQLite none of its locks: those are on other files than the log.
    """
    fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        try:
            while (end := os.fstat(fd).st_size) < _LOG_BYTES:
                os.pwrite(fd, bytes(_LOG_BYTES - end), end)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


class SqliteFile:
    """Opens the file when it is first needed and again after an error; never another file than the first."""

    def __init__(self, path: Path, busy_ms: int) -> None:
        self._path = path
        self._busy_s = busy_ms / 1e3
        self._connection: sqlite3.Connection | None = None
        self._ledger: str | None = None
        self._inode: tuple[int, int] | None = None
        self._closed = False

    @contextlib.contextmanager
    def transaction(self, *, write: bool) -> Iterator[SqliteTables]:
        """One transaction: committed at the end, rolled back on any error.

        Raises:
            LedgerError: SQLite failed (locked for longer than the busy time, disk full, file damaged,
                ...); from a commit, whether it was written is then unknown.
        """
        with self._translated():
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield SqliteTables(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def checkpoint(self) -> int:
        """Moves what it can from the log into the file, waiting for nobody; returns the log's pages."""
        with self._translated():
            _busy, pages, _moved = self._open().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(pages)

    def close(self) -> None:
        """Closes the connection for good; what is under way in a transaction is rolled back."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not _is_busy(error):
                self._drop()
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            raise LedgerError(f"SQLite ledger {self._path}: {error}", cause=name) from error
        except OSError as error:
            self._drop()
            raise LedgerError(f"SQLite ledger {self._path}: {error}", cause="OSError") from error

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise LedgerError("the ledger is closed", cause="closed")
        if self._connection is None:
            self._connection = self._connect()
        stat = self._path.stat()
        inode = (stat.st_dev, stat.st_ino)
        if self._inode not in (None, inode):
            self._drop()
            # Going on in a file that others no longer see, or in a new one, could make two owners.
            raise LedgerError(f"SQLite ledger {self._path} was replaced by another file", cause="replaced")
        self._inode = inode
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                return self._connect_once()
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() >= deadline:
                    raise
            # SQLite itself does not wait while another process changes the journal's mode or recovers it.
            time.sleep(_RETRY_S)

    def _connect_once(self) -> sqlite3.Connection:
        mode = "rwc" if self._ledger is None else "rw"
        uri = f"file:{quote(str(self._path))}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=self._busy_s, isolation_level=None)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # In a transaction, as another process may be making the file just now; before anything is changed.
        connection.execute("BEGIN")
        self._check_format(connection)
        connection.execute("COMMIT")
        journal = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if journal != "wal":
            raise LedgerError(f"the file system of {self._path} does not carry a write-ahead log")
        connection.execute("PRAGMA synchronous=FULL")
        # Checkpoints run on a connection of their own: one in a commit would take milliseconds of a pause.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("BEGIN IMMEDIATE")
        if self._check_format(connection):
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta (one, ledger, seq) VALUES (1, ?, 0)", (uuid.uuid4().hex,))
            connection.execute(f"PRAGMA application_id={_APPLICATION}")
            connection.execute(f"PRAGMA user_version={_VERSION}")
        ledger = connection.execute("SELECT ledger FROM meta").fetchone()[0]
        connection.execute("COMMIT")
        if self._ledger not in (None, ledger):
            raise LedgerError(f"SQLite ledger {self._path} was replaced by another one", cause="replaced")
        self._ledger = ledger
        self._grow_log(connection)

    def _grow_log(self, connection: sqlite3.Connection) -> None:
        """Gives the log its room once, so that later commits overwrite it and no longer extend it.

        Nothing depends on it: without it a commit takes longer. So it is left out where the disk is small,
        and a failure leaves the ledger as it was.
        """
        log = self._path.with_name(f"{self._path.name}-wal")
        with contextlib.suppress(OSError, sqlite3.OperationalError):
            if shutil.disk_usage(log.parent).free >= _SPARE * _LOG_BYTES:
                connection.execute("BEGIN IMMEDIATE")  # as long as this lasts, nobody else writes to the log
                try:
                    _extend(log)
                finally:
                    connection.execute("ROLLBACK")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _check_format(self, connection: sqlite3.Connection) -> bool:
        """Whether the file is still empty; raises LedgerError if it is neither that nor a ledger."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) == (_APPLICATION, _VERSION):
            return False
        if application == _APPLICATION:
            raise LedgerError(f"{self._path} is a ledger of format {version}; this version reads {_VERSION}")
        if application or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise LedgerError(f"{self._path} is a database of something else")
        return True
