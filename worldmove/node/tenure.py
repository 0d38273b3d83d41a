"""One incarnation of a node at a time: before memory is lent out, nothing of a former one can write any more.

The ledger fences a former incarnation, but lanes and executors do not ask the ledger. One that was stopped in
the middle of a move may yet write into a standby that its successor has wiped and lent to another move. So
every incarnation locks a file in the run directory for its whole life; a successor waits until the locks of
all former ones are free and their processes reaped, and ends what does not go by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import structlog

from worldmove.errors import ConfigError

GRACE_S = 3.0
"""How long a former incarnation may take to notice that it is fenced, and to go."""
LOOK_S = 0.1
_WRITERS = (b"worldmove.executor.", b"worldmove.transport.lane")

log = structlog.get_logger(__name__)


class Tenure:
    """This incarnation's lock, and what it knows of those before.

    Args:
        run_dir: of the node.
        incarnation: as claimed in the ledger.

    Raises:
        ConfigError: no file can be made there.
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        self._waiting: asyncio.Future[None] | None = None
        # The number alone would come again if the ledger was lost.
        self._path = run_dir / f"node-{incarnation}-{secrets.token_hex(4)}.lock"
        self._others = [path for path in run_dir.glob("node-*.lock") if path != self._path]
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._fd, 0)
            os.write(self._fd, str(os.getpid()).encode())
        except OSError as error:
            raise ConfigError(
                f"no lock at {self._path}: {error}; run_dir must be a writable directory",
                option="run_dir",
                value=str(run_dir),
            ) from error

    async def alone(self) -> None:
        """Returns when nothing of a former incarnation can write any more."""
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._outlive_all())
        await asyncio.shield(self._waiting)

    async def _outlive_all(self) -> None:
        await asyncio.gather(*(_outlive(path) for path in self._others))

    async def end(self) -> None:
        """Gives the lock back, and removes its file."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108 - no wait: one entry of a folder that lies in memory
        os.close(self._fd)


async def _outlive(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        text = os.pread(fd, 32, 0).decode(errors="replace")
        pid = int(text) if text.isdigit() else 0
        if not _locked(fd):
            if pid and _holds(pid, path):
                log.warning("a former incarnation lives; it is given time to go", pid=pid)
                await _ended(pid)
            await _free(fd)
        for writer in _writers(pid) if pid else ():
            await _ended(writer)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - no wait: one entry of a folder that lies in memory
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Whether the lock is this process's now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _free(fd: int) -> None:
    """Returns when the lock is this process's. In another container its holder is not seen, nor ended."""
    while not _locked(fd):  # noqa: ASYNC110 - no event tells of a lock that is given back
        await asyncio.sleep(LOOK_S)


def _holds(pid: int, path: Path) -> bool:
    """Whether the process has the lock's file open: a pid alone may have become somebody else's."""
    wanted = path.stat()
    for entry in Path(f"/proc/{pid}/fd").iterdir() if Path(f"/proc/{pid}/fd").is_dir() else ():
        with contextlib.suppress(OSError):
            found = entry.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _writers(parent: int) -> Iterator[int]:
    """Lanes and executors that a node has started; those of a dead node are about to die with it."""
    sign = f"--parent\0{parent}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() + b"\0"
            if sign in command and any(name in command for name in _WRITERS):
                yield int(entry.name)


async def _ended(pid: int) -> None:
    """Returns when a process is gone; it is ended if it does not go within `GRACE_S`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        try:
            async with asyncio.timeout(GRACE_S):
                await gone.wait()
        except TimeoutError:
            log.warning("a process of a former incarnation is ended", pid=pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
