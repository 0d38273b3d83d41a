"""Tells watchers that something may have changed: inside this process, and across processes of one host."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os

_IN_ATTRIB = 0x4
_SAFETY_S = 1.0
_POLL_S = 0.1


class Bell:
    """Wakes every waiter at each ring; rings that come while nobody waits are counted, not lost.

    `patience` in seconds bounds a wait, for rings that can get lost (their ringer was killed in between).
    """

    def __init__(self, patience: float | None = None) -> None:
        self.patience = patience
        self.rings = 0
        self.closed = False
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wakes all waiters."""
        self.rings += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Wakes all waiters for good."""
        self.closed = True
        self.ring()

    async def wait(self, rings: int) -> None:
        """Returns when the count of rings differs from `rings`, the bell is closed, or patience ends."""
        if self.closed or self.rings != rings:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.patience):
                    await future
        finally:
            self._waiting.discard(future)


class FileBell:
    """Rings a `Bell` whenever any process has called `pull` on the same file, from `listen` on.

    `pull` sets the file's times, and inotify (man 7 inotify, IN_ATTRIB) reports it; so a pull costs
    microseconds, and waiting for one costs nothing. Watching the store's own writes would not do: they are
    reported before the commit can be seen. A safety look each second covers a process that was
    killed between its commit and its pull; without inotify (no instance left for this user) it is frequent.
    """

    def __init__(self, path: str, bell: Bell) -> None:
        self._path = path
        self._bell = bell
        self._fd: int | None = None
        self._listens = False

    def listen(self) -> None:
        """Hears of every pull from now on: before, each would wake a process where nobody waits for one."""
        if self._listens:
            return
        self._listens = True
        self._fd = _inotify(self._path)
        self._bell.patience = _POLL_S if self._fd is None else _SAFETY_S
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._heard)

    def pull(self) -> None:
        """Tells all processes that a commit can be seen; callable from any thread. Never fails the commit."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def _heard(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 65536)
        self._bell.ring()

    def close(self) -> None:
        """Stops listening and closes the bell."""
        self._listens = True
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._bell.close()


def _inotify(path: str) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_ATTRIB) < 0:
        os.close(fd)
        return None
    return fd
