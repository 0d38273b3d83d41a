"""Talking to the keeper: the process that holds every arena's descriptor while nodes and workers come and go.

The exchange (packets of `worldmove.ipc`): the client sends `Claim`, `Put`, `Get`, `Drop` or `List` with a
number of its choice, the keeper answers `Answer` with the same number. Descriptors travel with `Put` and with
the answer to `Get`. After a `Claim` only the connection that claimed last can change anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from worldmove.errors import (
    ConnectionLostError,
    FencedError,
    FramingError,
    NotFoundError,
    ProcessLostError,
    ValidationError,
    WorldMoveError,
)
from worldmove.ipc import MAX_FDS, Channel, close_all
from worldmove.memory.limits import no_descriptors

MAX_META = 8 * 1024 * 1024
MAX_KEY = 256
LISTENING = 0
OTHER_KEEPER = 3
"""Exit status of a started keeper that found a living one at its path."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """From now on only this connection, or a later one that claims, may `Put` and `Drop`."""

    call: int


class Put(msgspec.Struct, tag="put", frozen=True):
    """Hold the descriptors that came along under `key`, in place of what was there."""

    call: int
    key: str
    meta: bytes


class Get(msgspec.Struct, tag="get", frozen=True):
    """Send `key`'s meta and descriptors."""

    call: int
    key: str


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """Close what is held under `key`; nothing happens where nothing is."""

    call: int
    key: str


class List(msgspec.Struct, tag="list", frozen=True):
    """Send all keys."""

    call: int


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """What became of a call.

    `found` is false where `Get` named an unknown key, `fenced` is true where another connection has claimed.
    `required` is not 0 where a new key was refused: that many descriptors were needed, `available` are left.
    """

    call: int
    pid: int
    found: bool = True
    meta: bytes = b""
    keys: tuple[str, ...] = ()
    fenced: bool = False
    required: int = 0
    available: int = 0


Request = Claim | Put | Get | Drop | List


class Keeper:
    """A connection to the keeper at one path.

    Attributes:
        pid: the keeper's process.
        lost: completes with `ProcessLostError` when the keeper is gone; whoever holds descriptors
            puts them into a new one then.
    """

    def __init__(self, channel: Channel[Answer]) -> None:
        self.pid = 0
        self.lost: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
        self._channel = channel
        self._calls: dict[int, asyncio.Future[tuple[Answer, list[int]]]] = {}
        self._next = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, path: Path | str, *, claim: bool = False) -> Keeper:
        """Connects to the living keeper at `path`, or starts one there.

        Args:
            path: of its socket.
            claim: nobody who came before may change anything there any more.

        Raises:
            ProcessLostError: it cannot be started, or the one that lives there serves another user.
        """
        place = str(path)
        for _ in range(3):
            keeper = await cls._connect(place, claim)
            if keeper is not None:
                return keeper
            await _launch(place)
        raise ProcessLostError(f"no keeper can be reached at {place}")

    @classmethod
    async def _connect(cls, path: str, claim: bool) -> Keeper | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            # A Unix socket connects at once or not at all: EAGAIN says that the queue is full.
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except OSError as error:
            sock.close()
            raise ProcessLostError(f"keeper at {path}: {error}") from error
        keeper = cls(Channel(sock, Answer))
        try:
            number = keeper._number()
            answer, _ = await keeper._call(Claim(number) if claim else List(number))
        except ProcessLostError:
            # It was about to end, or it serves another user.
            await keeper.close()
            return None
        except BaseException:
            await asyncio.shield(keeper.close())
            raise
        keeper.pid = answer.pid
        return keeper

    async def put(self, key: str, meta: bytes, fds: Sequence[int]) -> None:
        """Has `fds` held under `key`, in place of what was there; they stay open on this side.

        When this returns the keeper holds them. One key carries at most 252 descriptors.

        Raises:
            ValidationError: key, meta or descriptors are too many or too long.
            FencedError: somebody has claimed the keeper since; nothing has changed.
            NoMemoryError: the keeper may not open as many; nothing has changed.
            ProcessLostError: the keeper is gone.
        """
        _check(key, meta, fds)
        await self._call(Put(self._number(), key, meta), fds)

    async def get(self, key: str) -> tuple[bytes, list[int]]:
        """The meta and fresh descriptors (the caller's own) of `key`.

        Raises:
            NotFoundError: nothing is held under that key.
            ProcessLostError: the keeper is gone.
        """
        answer, fds = await self._call(Get(self._number(), key))
        if not answer.found:
            raise NotFoundError(f"the keeper holds nothing under {key!r}", key=key)
        return answer.meta, fds

    async def drop(self, key: str) -> None:
        """Has the descriptors under `key` closed; an unknown key is passed over.

        Raises:
            FencedError: as `put`.
            ProcessLostError: the keeper is gone.
        """
        await self._call(Drop(self._number(), key))

    async def keys(self) -> list[str]:
        """All keys, sorted.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        answer, _ = await self._call(List(self._number()))
        return list(answer.keys)

    async def close(self) -> None:
        """Hangs up; the keeper goes on holding what it holds."""
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({self._reading})
        self._channel.close()
        self._fail("the connection was closed on this side")

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _call(self, request: Request, fds: Sequence[int] = ()) -> tuple[Answer, list[int]]:
        if self._reading.done():
            raise ProcessLostError(f"the keeper (process {self.pid}) is gone")
        future: asyncio.Future[tuple[Answer, list[int]]] = asyncio.get_running_loop().create_future()
        self._calls[request.call] = future
        try:
            await self._channel.send(request, fds)
            answer, carried = await future
        except ConnectionLostError as error:
            raise ProcessLostError(f"the keeper (process {self.pid}) is gone") from error
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                close_all(future.result()[1])
            raise
        finally:
            self._calls.pop(request.call, None)
            future.cancel()
        if answer.fenced:
            raise FencedError("a later incarnation of this node has claimed the keeper")
        if answer.required:
            raise no_descriptors("the keeper", answer.required, answer.available)
        return answer, carried

    async def _read(self) -> None:
        try:
            while True:
                answer, fds = await self._channel.receive()
                future = self._calls.pop(answer.call, None)
                if future is None or future.done():
                    # Whoever asked was cancelled meanwhile.
                    close_all(fds)
                else:
                    future.set_result((answer, fds))
        except (ConnectionLostError, FramingError) as error:
            self._fail(str(error))
            if not self.lost.done():
                self.lost.set_result(ProcessLostError(f"the keeper (process {self.pid}) is gone: {error}"))

    def _fail(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ProcessLostError(f"the keeper (process {self.pid}) is gone: {reason}"))


def _check(key: str, meta: bytes, fds: Sequence[int]) -> None:
    if not 1 <= len(key) <= MAX_KEY:
        raise ValidationError(f"a key of {len(key)} characters; 1 to {MAX_KEY} are allowed", field="key")
    if len(meta) > MAX_META:
        raise ValidationError(f"meta of {len(meta)} bytes; at most {MAX_META} are allowed", field="meta")
    if len(fds) >= MAX_FDS:
        raise ValidationError(f"{len(fds)} descriptors; at most {MAX_FDS - 1} are allowed", field="fds")


async def _launch(path: str) -> None:
    """Starts a keeper; returns when one listens at `path` (this one, or another that was faster)."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "worldmove.memory.keeper", path, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise ProcessLostError(f"the keeper at {path} cannot be started: {error}") from error
    # The started process listens, leaves its child behind and ends: nothing ties the keeper to this one.
    status = await process.wait()
    if status not in (LISTENING, OTHER_KEEPER):
        raise ProcessLostError(f"the keeper at {path} ended with status {status} while it was started")
