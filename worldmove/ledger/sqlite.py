"""The ledger of one host: a SQLite file shared by its nodes.

All SQL runs in three threads of its own, which write, read and check the log in: no slow reader and no
checkpoint stands before a commit, no locked writer and no checkpoint before an answer. A call under way
outlives its caller: cancelling an await cancels nothing in the database and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from worldmove.errors import LedgerError
from worldmove.ledger.bell import FileBell
from worldmove.ledger.sqlite_file import SqliteFile
from worldmove.ledger.transactional import TransactionalLedger
from worldmove.ledger.transactions import Tables

T = TypeVar("T")
BUSY_MS = 2000
"""How long a call waits for another process's lock on the file, milliseconds."""
_CHECKPOINT_EVERY = 128
_LOG_PAGES = 4096
_AWAKE_S, _LOOK_S = 0.02, 20e-6


class _Thread:
    """Runs jobs on one connection in one thread, in order.

    Worlds stand while a commit is on its way here and back. So there is no executor in between, whose
    futures of two kinds take the loop several turns to pass an answer on.
    """

    def __init__(self, file: SqliteFile, name: str) -> None:
        self.file = file
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._awake_until = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            with contextlib.suppress(Exception):  # whoever wants to hear of it uses `run`
                job()

    def _next(self) -> Callable[[], object] | None:
        while time.monotonic() < self._awake_until:
            with contextlib.suppress(Empty):
                return self._jobs.get_nowait()
            time.sleep(_LOOK_S)
        return self._jobs.get()

    def stay_awake(self) -> None:
        """From within a job: looks for the next one by itself for a while, as to be woken takes longer."""
        self._awake_until = time.monotonic() + _AWAKE_S

    async def run(self, job: Callable[[], T], afterwards: Callable[[], None] | None = None) -> T:
        """The job's result; a cancelled caller leaves the job running.

        `afterwards` is called in the thread when a job that has raised nothing was answered.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def attempt() -> None:
            # The error travels as a value: nobody may be left to take it from the future.
            answer: tuple[T | None, BaseException | None]
            try:
                answer = job(), None
            except BaseException as error:  # noqa: BLE001 - carried over to the caller
                answer = None, error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, answered, answer)
            if answer[1] is None and afterwards is not None:
                afterwards()

        self._jobs.put(attempt)
        result, error = await answered
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # set wherever error isn't

    def submit(self, job: Callable[[], object]) -> None:
        """Runs a job that nobody waits for."""
        self._jobs.put(job)

    async def close(self) -> None:
        """Finishes what is queued, closes the connection, ends the thread."""
        try:
            await self.run(self.file.close)
        finally:
            self._jobs.put(None)
            self._thread.join()


def _answer(answered: asyncio.Future[T], answer: T) -> None:
    if not answered.done():  # the caller was cancelled
        answered.set_result(answer)


class SqliteLedger(TransactionalLedger):
    """`base.Ledger` in a SQLite file; made by `open`, belongs to the event loop it was opened in."""

    def __init__(self, path: Path, busy_ms: int) -> None:
        super().__init__()
        path = path.absolute()
        self._writer = _Thread(SqliteFile(path, busy_ms), "ledger-write")
        self._reader = _Thread(SqliteFile(path, busy_ms), "ledger-read")
        self._checker = _Thread(SqliteFile(path, busy_ms), "ledger-check")
        self._path = path
        self._ringer: FileBell | None = None
        self._closing: asyncio.Task[None] | None = None
        self._commits = 0

    @classmethod
    async def open(cls, path: Path, *, busy_ms: int = BUSY_MS) -> SqliteLedger:
        """Opens the ledger, and makes it if the file is absent or empty.

        Raises:
            LedgerError: the file cannot be opened, is locked, is no ledger, or is one of another version.
        """
        ledger = cls(path, busy_ms)
        try:
            await ledger._write(lambda tables: tables.position())
            await ledger.position()
            await ledger._checker.run(ledger._checker.file.checkpoint)
        except BaseException:
            await ledger.close()
            raise
        ledger._ringer = FileBell(str(ledger._path), ledger._bell)
        return ledger

    async def _write(self, change: Callable[[Tables], T]) -> T:
        self._check_open()
        told = False

        def job() -> T:
            nonlocal told
            with self._writer.file.transaction(write=True) as tables:
                result = change(tables)
            told = tables.told
            return result

        def ring() -> None:
            if told and self._ringer is not None:
                self._ringer.pull()
            self._count_commit()

        # The writer hears of it before the watchers do: a world may stand until then.
        return await self._writer.run(job, afterwards=ring)

    def _listen(self) -> None:
        if self._ringer is not None:
            self._ringer.listen()

    async def _read(self, look: Callable[[Tables], T]) -> T:
        self._check_open()

        def job() -> T:
            with self._reader.file.transaction(write=False) as tables:
                return look(tables)

        return await self._reader.run(job)

    async def warm(self, session_id: str) -> None:
        """See `base.Ledger.warm`: another process's writes have emptied the writing connection's cache.

        A thread that had gone to sleep began with a commit 0.4 ms later on a host with many idle cores.
        """
        name = self._claimed.name if self._claimed is not None else ""

        def job() -> None:
            with self._writer.file.transaction(write=False) as tables:
                tables.node(name)
                tables.session(session_id)
                tables.position()
            self._writer.stay_awake()

        with contextlib.suppress(LedgerError):
            self._check_open()
            await self._writer.run(job)

    def _count_commit(self) -> None:
        self._commits += 1
        if self._commits % _CHECKPOINT_EVERY == 0 and self._closing is None:
            self._checker.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        if self._checker.file.checkpoint() > _LOG_PAGES:
            # Commits came too fast for it to catch up, and only a log that was caught up with starts anew.
            self._writer.submit(self._writer.file.checkpoint)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise LedgerError("the ledger is closed", cause="closed")

    async def close(self) -> None:
        """See `base.Ledger.close`; may be called again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut())
        await asyncio.shield(self._closing)

    async def _shut(self) -> None:
        if self._ringer is None:
            self._bell.close()
        else:
            self._ringer.close()
        async with contextlib.AsyncExitStack() as closing:
            # The writer first: it hands work to the checker.
            for thread in (self._reader, self._checker, self._writer):
                closing.push_async_callback(thread.close)
