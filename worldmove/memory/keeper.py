"""The keeper: a process without logic that holds descriptors, so that memory outlives whoever made it.

`python -m worldmove.memory.keeper SOCKET_PATH` listens, leaves the keeper behind in a session of its own
and ends: status 0 when it listens, 3 when another one already does. It serves its own user only, and ends by
itself when nobody is connected and either nothing is held, or its socket is gone from the file system (so
that nobody could ever fetch what it holds).

`… keeper --stay SOCKET_PATH` is for a container of the keeper's own: it makes the folder (mode 0700), stays
in the foreground, and waits for its node also while it holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvloop

from worldmove.errors import ConnectionLostError, FramingError
from worldmove.ipc import Channel, close_all
from worldmove.listening import Acceptor
from worldmove.memory.keeping import LISTENING, OTHER_KEEPER, Answer, Claim, Drop, Get, List, Put, Request
from worldmove.memory.limits import free_descriptors, raise_descriptor_limit

GRACE_S = 1.0
"""How long an empty keeper waits for the next connection."""
FIRST_GRACE_S = 10.0
"""How long for the first one: whoever has started it may have much to do."""

RESERVE = 300
"""Descriptors for one message (253), connections and this process: a truncated message would be lost."""

_IN_DELETE_SELF = 0x400
_IN_ATTRIB = 0x4


class _Holding:
    """What is held: key to meta and descriptors. `term` counts claims: only the latest claimant writes."""

    def __init__(self) -> None:
        self.term = 0
        self._held: dict[str, tuple[bytes, list[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    async def perform(self, request: Request, fds: list[int], term: int) -> tuple[Answer, list[int]]:
        """Does what a client of `term` asked; returns the answer and the descriptors to send with it."""
        pid = os.getpid()
        if term < self.term and isinstance(request, Put | Drop):
            if isinstance(request, Put):
                close_all(fds)
            return Answer(request.call, pid, fenced=True), []
        match request:
            case Claim():
                self.term = term
            case Put(key=key) if key not in self._held and (left := _left()) <= 0:
                close_all(fds)
                return Answer(request.call, pid, required=len(fds), available=max(left + len(fds), 0)), []
            case Put(key=key, meta=meta):
                old, self._held[key] = self._held.get(key), (meta, fds)
                await self._close(old)
            case Drop(key=key):
                await self._close(self._held.pop(key, None))
            case Get(key=key):
                if key not in self._held:
                    return Answer(request.call, pid, found=False), []
                meta, held = self._held[key]
                return Answer(request.call, pid, meta=meta), held
            case List():
                return Answer(request.call, pid, keys=tuple(sorted(self._held))), []
        return Answer(request.call, pid), []

    async def _close(self, entry: tuple[bytes, list[int]] | None) -> None:
        if entry is not None:
            # The last close of a large arena takes its time; other connections need not wait for it.
            await asyncio.to_thread(close_all, entry[1])


class _Service:
    """Accepts connections until there is nothing left to live for."""

    def __init__(self, listener: socket.socket, path: Path, *, stay: bool) -> None:
        self._listener = listener
        self._path = path
        self._stay = stay
        self._inode = path.stat().st_ino
        self._holding = _Holding()
        self._clients: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._grace_s = FIRST_GRACE_S
        self._grace: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listener, self._welcome)
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serves until nobody is connected and nothing (reachable) is held."""
        watch = _watch_removal(self._path)
        self._acceptor.start()
        self._loop.add_reader(watch, self._touched, watch)
        try:
            self._consider()
            await self._ended
        finally:
            self._loop.remove_reader(watch)
            os.close(watch)

    def _welcome(self, sock: socket.socket) -> None:
        self._grace_s = GRACE_S
        task = self._loop.create_task(self._serve(Channel(sock, Request)))
        self._clients.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._clients.discard(task)
        self._consider()

    def _touched(self, watch: int) -> None:
        os.read(watch, 4096)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                return
        self._reachable = False
        self._consider()

    def _consider(self) -> None:
        """Starts, or stops, the wait for the end."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if not self._clients and not (self._reachable and (self._holding or self._stay)):
            self._grace = self._loop.call_later(self._grace_s, self._end)

    def _end(self) -> None:
        with _starting(self._path):
            # Whoever connected meanwhile is served; whoever comes later finds no socket and starts a keeper.
            self._acceptor.accept()
            if self._clients:
                return
            self._acceptor.stop()
            if self._reachable:
                self._path.unlink(missing_ok=True)
            self._listener.close()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _serve(self, channel: Channel[Request]) -> None:
        try:
            if channel.peer_credentials()[1] != os.getuid():
                return
            term = 0
            while True:
                request, fds = await channel.receive()
                if isinstance(request, Claim):
                    term = self._holding.term + 1
                answer, held = await self._holding.perform(request, fds, term)
                if not isinstance(request, Put):
                    close_all(fds)
                await channel.send(answer, held)
        except (ConnectionLostError, FramingError):
            # The client is gone, or speaks another language; what it put stays.
            return
        finally:
            channel.close()


def _left() -> int:
    """How many descriptors may still be held, beside those that the next message may bring."""
    return free_descriptors() - RESERVE


def _watch_removal(path: Path) -> int:
    """An inotify(7) descriptor that becomes readable when the socket's name may have gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(path), _IN_DELETE_SELF | _IN_ATTRIB) < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    return fd


@contextlib.contextmanager
def _starting(path: Path) -> Iterator[None]:
    """Only one process at a time begins or ceases to listen at `path`."""
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        # The whole directory is gone: nobody else can begin there.
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _listen(path: Path) -> socket.socket | None:
    """The listening socket; `None` if a living keeper listens at `path` already."""
    with _starting(path):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            except BlockingIOError:
                # Its queue is full, so it lives.
                sock.close()
                return None
            else:
                sock.close()
                return None
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        return sock


def _leave_behind() -> bool:
    """Forks; true in the child, which belongs to no terminal, no session and no pipe of its starter."""
    if os.fork():
        return False
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    # SIGTERM still ends it: an operator who names this process means it.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return True


async def _run(listener: socket.socket, path: Path, *, stay: bool) -> None:
    await _Service(listener, path, stay=stay).run()


def main(argv: list[str]) -> int:
    """Starts a keeper at the socket path `argv[-1]`; returns the exit status of module's description."""
    path = Path(argv[-1]).absolute()
    stay = argv[0] == "--stay"
    if stay:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    raise_descriptor_limit()
    listener = _listen(path)
    if listener is None:
        return OTHER_KEEPER
    if stay or _leave_behind():
        uvloop.run(_run(listener, path, stay=stay))
    return LISTENING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
