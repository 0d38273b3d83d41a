"""Descriptors from node to node on one host: the door of the *local* path.

The source leaves its extents' descriptors behind a one-time token; the destination connects to the
source's Unix socket, shows the token that the control channel brought, and gets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, UnauthorizedError
from worldmove.ipc import MAX_FDS, Channel, close_all
from worldmove.listening import Acceptor
from worldmove.tasks import Tasks

BACKLOG = 1024
"""Many moves may begin at once, and a Unix socket whose queue is full refuses instead of waiting."""


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Destination → source: hand me what belongs to this token."""

    token: bytes

    def __repr__(self) -> str:
        return "Fetch(...)"


class Handed(msgspec.Struct, frozen=True, tag=True):
    """Source → destination: the descriptors, in the order of the extents; `more` packets follow."""

    count: int
    more: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Source → destination: unknown or used token."""


class DescriptorDoor:
    """Listens at `path`; hands descriptors to processes of the same user that show a token, once."""

    def __init__(self, path: Path, timeout_ms: int) -> None:
        self.path = path
        self._timeout = timeout_ms / 1000
        self._offers: dict[bytes, tuple[int, ...]] = {}
        self._socket: socket.socket | None = None
        self._inode = 0
        self._acceptor: Acceptor | None = None
        self._tasks = Tasks(lambda _error: None)

    def offer(self, token: bytes, fds: Sequence[int]) -> None:
        """Keeps `fds` (which stay open on this side) for whoever shows `token`."""
        self._offers[token] = tuple(fds)

    def withdraw(self, token: bytes) -> None:
        """Forgets an offer; nothing happens if it was taken."""
        self._offers.pop(token, None)

    async def start(self) -> None:
        """Binds the socket with mode 0600, over whatever a dead predecessor left at the path."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(str(self.path))
        self.path.chmod(0o600)
        listener.listen(BACKLOG)
        self._socket = listener
        self._inode = self.path.stat().st_ino
        self._acceptor = Acceptor(listener, self._visit)
        self._acceptor.start()

    def _visit(self, accepted: socket.socket) -> None:
        channel: Channel[Fetch] = Channel(accepted, Fetch)
        serving = self._tasks.spawn(self._serve(channel))
        # Not in the coroutine: one that is cancelled before it began runs no `finally`.
        serving.add_done_callback(partial(_hang_up, channel))

    async def _serve(self, channel: Channel[Fetch]) -> None:
        _pid, uid, _gid = channel.peer_credentials()
        async with asyncio.timeout(self._timeout):
            fetch, stray = await channel.receive()
            close_all(stray)
            fds = self._take(fetch.token) if uid == os.getuid() else None
            if fds is None:
                await channel.send(Refused())
                return
            for start in range(0, max(len(fds), 1), MAX_FDS):
                some = fds[start : start + MAX_FDS]
                await channel.send(Handed(len(some), start + MAX_FDS < len(fds)), some)

    def _take(self, token: bytes) -> tuple[int, ...] | None:
        found = [known for known in self._offers if hmac.compare_digest(known, token)]
        return self._offers.pop(found[0]) if found else None

    async def close(self) -> None:
        """Stops listening and removes the socket's file."""
        if self._socket is not None and self._acceptor is not None:
            self._acceptor.stop()
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                # A later incarnation of the node may listen at the path by now.
                if self.path.stat().st_ino == self._inode:
                    self.path.unlink()
        await self._tasks.cancel()


def _hang_up(channel: Channel[Fetch], _served: asyncio.Task[None]) -> None:
    channel.close()


async def fetch(path: str, token: bytes, count: int, timeout_ms: int) -> list[int]:
    """Fetches `count` descriptors; they belong to the caller.

    Raises:
        UnauthorizedError: the token is unknown there, or was used; or another user listens there.
        ConnectionLostError: nobody listens at `path`.
        FramingError: another number of descriptors came than the manifest needs.
        DeadlineError: no answer within `timeout_ms`.
    """
    channel: Channel[Handed | Refused] = Channel(_connect(path), Handed | Refused)
    fds: list[int] = []
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await _collect(channel, token, fds, count)
    except TimeoutError as error:
        close_all(fds)
        raise DeadlineError(f"no descriptors from {path} within {timeout_ms} ms") from error
    except BaseException:
        close_all(fds)
        raise
    else:
        return fds
    finally:
        channel.close()


async def _collect(channel: Channel[Handed | Refused], token: bytes, fds: list[int], count: int) -> None:
    # A stranger who listens there would get the token, and could hand over memory that shrinks.
    if channel.peer_credentials()[1] != os.getuid():
        raise UnauthorizedError("the socket for descriptors belongs to another user")
    await channel.send(Fetch(token))
    more = True
    while more:
        answer, some = await channel.receive()
        fds += some
        if isinstance(answer, Refused):
            raise UnauthorizedError("the token for descriptors is unknown or was used")
        more = answer.more
        if len(some) != answer.count or len(fds) > count or (len(fds) < count and not some):
            raise FramingError(f"{len(fds)} descriptors came, the manifest needs {count}")
    if len(fds) != count:
        raise FramingError(f"{len(fds)} descriptors came, the manifest needs {count}")


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ConnectionLostError(f"cannot connect to {path}: {error}") from error
    return sock
