"""The Unix socket through which workers come: who they are is checked, then they get their descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from worldmove.errors import (
    ConfigError,
    DeadlineError,
    NotFoundError,
    ProtocolError,
    TransportError,
    UnauthorizedError,
    WorldMoveError,
)
from worldmove.hosting.ranks import Ranks
from worldmove.ipc import Channel, close_all
from worldmove.listening import Acceptor
from worldmove.manifest import MAX_REGIONS
from worldmove.page.messages import (
    FDS_PER_MESSAGE,
    PROTOCOL,
    Adopted,
    Answer,
    Bye,
    Ended,
    Handback,
    Hello,
    Memory,
    Moved,
    Paused,
    Ping,
    Pong,
    Ready,
    Refused,
    Rejoin,
    Revise,
    Started,
    Welcome,
    WorkerMessage,
)

FIRST_MESSAGE_S = 5.0
READY_S = 120.0
"""Mapping and populating many gigabytes takes a while."""
BACKLOG = 512

log = structlog.get_logger(__name__)


class Entry(NamedTuple):
    """An accepted rank: what it is told and given. `stopped` and `waiting` as for `Ranks.attach`."""

    slot: str
    ranks: Ranks
    rank: int
    welcome: Welcome
    page_fd: int
    fds: tuple[int, ...]
    stopped: int | None
    waiting: bool


class Desk(Protocol):
    """Who decides at the door."""

    async def enter(self, first: Hello | Rejoin) -> Entry:
        """Accepts a rank, or raises a `WorldMoveError`. The entry's descriptors are the caller's to close."""

    async def farewell(self, first: Rejoin) -> Moved | Ended | None:
        """What became of the session of a rank whose slot is not here, if that is known."""

    async def hand_back(self, first: Handback, fds: Sequence[int]) -> None:
        """Returns when the rank's session is a slot here, or raises; the descriptors stay the caller's."""

    async def revise(self, slot: str, rank: int, revision: Revise, fds: Sequence[int]) -> None:
        """Takes in a revision and its descriptors; raises a `WorldMoveError` if it is wrong."""


class Door:
    """Listens at `path`; one task for each worker.

    Args:
        path: of the socket; whatever lies there is replaced, since a stopped former incarnation may hold it.
        desk: accepts ranks.
    """

    def __init__(self, path: Path, desk: Desk) -> None:
        self.path = path
        self._desk = desk
        self._acceptor: Acceptor | None = None
        self._sock: socket.socket | None = None
        self._inode = 0
        self._visits: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Binds and listens.

        Raises:
            ConfigError: the socket can't be made there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)
            # The mode is set before anybody can connect: a socket that does not listen refuses.
            sock.bind(str(self.path))
            self.path.chmod(0o600)
            sock.listen(BACKLOG)
            self._inode = self.path.stat().st_ino
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"no socket at {self.path}: {error}; run_dir must be a writable directory with a short path",
                option="run_dir",
                value=str(self.path.parent),
            ) from error
        self._sock = sock
        self._acceptor = Acceptor(sock, self._visit)
        self._acceptor.start()

    async def close(self) -> None:
        """Stops listening and lets every worker go; they keep their worlds and look for the next node."""
        if self._sock is not None and self._acceptor is not None:
            self._acceptor.stop()
            self._sock.close()
            self._sock = None
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == self._inode:
                    self.path.unlink()
        for visit in self._visits:
            visit.cancel()
        if self._visits:
            await asyncio.wait(self._visits)

    def _visit(self, sock: socket.socket) -> None:
        task = asyncio.create_task(_Visit(sock, self._desk).run())
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)


class _Visit:
    """One worker's connection, from its first message to its end; the seat of its rank in between."""

    def __init__(self, sock: socket.socket, desk: Desk) -> None:
        self._channel: Channel[WorkerMessage] = Channel(sock, WorkerMessage)
        self._desk = desk
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._channel.peer_credentials()[0]

    def ping(self, number: int) -> None:
        self._tell(Ping(number))

    def answer(self, message: Answer | Adopted) -> None:
        self._tell(message)

    def _tell(self, message: Answer | Adopted | Ping) -> None:
        try:
            self._channel.send_nowait(message)
        except TransportError:
            self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        try:
            entry = await self._enter()
            if entry is not None:
                await self._stay(entry)
        except asyncio.CancelledError:
            # By `close`, of this seat or of the door: ending quietly is what was asked for.
            return
        except WorldMoveError as error:
            log.info("worker.gone", code=error.code, reason=error.message)
        finally:
            self._channel.close()

    async def _enter(self) -> Entry | None:
        if self._channel.peer_credentials()[1] != os.geteuid():
            await self._refuse(UnauthorizedError("only processes of the node's user are let in"))
            return None
        first: Hello | Rejoin | Handback | None = None
        fds: list[int] = []
        try:
            first, fds = await self._first()
            entry = await self._desk.enter(await self._introduced(first, fds))
        except WorldMoveError as error:
            await self._turn_away(first, error)
            return None
        finally:
            close_all(fds)
        try:
            await self._channel.send(entry.welcome, [entry.page_fd])
            for start in range(0, len(entry.fds), FDS_PER_MESSAGE):
                part = entry.fds[start : start + FDS_PER_MESSAGE]
                await self._channel.send(Memory(len(part)), part)
        finally:
            close_all([entry.page_fd, *entry.fds])
        return entry

    async def _first(self) -> tuple[Hello | Rejoin | Handback, list[int]]:
        """With its descriptors, which only a handback has."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                message, fds = await self._channel.receive()
        except TimeoutError:
            raise DeadlineError(f"no message within {FIRST_MESSAGE_S:g} s") from None
        if isinstance(message, Handback) and message.protocol == PROTOCOL:
            return message, fds
        close_all(fds)
        if not isinstance(message, Hello | Rejoin | Handback):
            raise ProtocolError(f"the first message is {type(message).__name__}, not Hello or Rejoin")
        if message.protocol != PROTOCOL:
            raise ProtocolError(f"protocol {message.protocol} is not spoken here, {PROTOCOL} is")
        return message, []

    async def _introduced(self, first: Hello | Rejoin | Handback, fds: list[int]) -> Hello | Rejoin:
        """Who comes; of a rank that is handed back, once its session is here again."""
        if not isinstance(first, Handback):
            return first
        await self._fetch(fds, 1 + len(first.sizes))
        await self._while_there(self._desk.hand_back(first, fds))
        return first.rejoin

    async def _fetch(self, fds: list[int], count: int) -> None:
        if count > MAX_REGIONS:
            raise ProtocolError(f"{count} descriptors are more than there can be regions")
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                while len(fds) < count:
                    message, more = await self._channel.receive()
                    fds += more
                    if not isinstance(message, Memory) or not more:
                        raise ProtocolError(f"{type(message).__name__} came instead of descriptors")
        except TimeoutError:
            raise DeadlineError(f"no descriptors within {FIRST_MESSAGE_S:g} s") from None

    async def _while_there(self, wanted: Coroutine[Any, Any, None]) -> None:
        """Awaits what may take long; raises if the worker goes meanwhile, or does not wait for it."""
        working = asyncio.ensure_future(wanted)
        hearing = asyncio.ensure_future(self._channel.receive())
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                message, fds = hearing.result()
                close_all(fds)
                raise ProtocolError(f"{type(message).__name__} came out of turn")
        finally:
            working.cancel()
            hearing.cancel()
            await asyncio.wait({working, hearing})
        working.result()

    async def _turn_away(self, first: Hello | Rejoin | Handback | None, error: WorldMoveError) -> None:
        """Refuses; a rank whose world went elsewhere, or is over, hears that instead."""
        rank = first.rejoin if isinstance(first, Handback) else first
        if isinstance(error, NotFoundError) and isinstance(rank, Rejoin):
            answer = await self._desk.farewell(rank)
            if answer is not None:
                with contextlib.suppress(TransportError):
                    await self._channel.send(answer)
                return
        await self._refuse(error)

    async def _refuse(self, error: WorldMoveError) -> None:
        with contextlib.suppress(TransportError):
            await self._channel.send(Refused(error.code, error.message))

    async def _stay(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(READY_S):
                message, fds = await self._channel.receive()
        except TimeoutError:
            raise DeadlineError(f"rank {entry.rank} was not ready within {READY_S:g} s") from None
        close_all(fds)
        if not isinstance(message, Ready):
            raise ProtocolError(f"{type(message).__name__} came before Ready")
        ranks, rank = entry.ranks, entry.rank
        ranks.attach(rank, self, stopped=entry.stopped, waiting=entry.waiting)
        left = False
        try:
            while not left:
                message, fds = await self._channel.receive()
                left = await self._hear(entry, message, fds)
        finally:
            ranks.detach(rank, self, left=left)

    async def _hear(self, entry: Entry, message: WorkerMessage, fds: list[int]) -> bool:
        """Acts on a message; whether it was the last."""
        if isinstance(message, Revise):
            await self._desk.revise(entry.slot, entry.rank, message, fds)
            return False
        close_all(fds)
        match message:
            case Paused():
                entry.ranks.paused(entry.rank, self, message.block)
            case Pong():
                entry.ranks.roll.heard(entry.rank, self, message.number)
            case Started():
                entry.ranks.started(entry.rank, self)
            case Bye():
                return True
            case _:
                raise ProtocolError(f"{type(message).__name__} came out of turn")
        return False
