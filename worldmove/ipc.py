"""Messages and descriptors between processes of one host, over Unix sockets.

Every message is one SOCK_SEQPACKET packet: a 12-byte header (`magic`, `flags`, body length; little
endian), then a msgpack body. Descriptors travel with the packet as SCM_RIGHTS. A body that would not
fit a packet travels as one extra memfd, the last descriptor, and bit 0 of `flags` says so.
The same exchange serves keeper, executors, lanes and workers; a C++ stack can do it with `recvmsg`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import resource
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from worldmove.errors import ConnectionLostError, FramingError, NoMemoryError, TransportError, WorldMoveError
from worldmove.shortage import shortage

MAGIC = 0x314D574D
HEADER = struct.Struct("<III")
SPILLED = 1
MAX_PACKET = 96 * 1024
MAX_BODY = 16 * 1024 * 1024
MAX_FDS = 253
_RECEIVE = HEADER.size + MAX_PACKET

M = TypeVar("M")


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected, non-inheritable packet sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _encode(message: msgspec.Struct, fds: Sequence[int]) -> tuple[bytes, list[int], int | None]:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY:
        raise FramingError(f"message of {len(body)} bytes; at most {MAX_BODY} are allowed")
    if len(body) <= MAX_PACKET:
        _check_fds(len(fds))
        return HEADER.pack(MAGIC, 0, len(body)) + body, list(fds), None
    _check_fds(len(fds) + 1)
    spill = _spill(body)
    return HEADER.pack(MAGIC, SPILLED, len(body)), [*fds, spill], spill


def _spill(body: bytes) -> int:
    try:
        spill = os.memfd_create("worldmove-message", os.MFD_CLOEXEC)
    except OSError as error:
        raise _refused("a long message", len(body), error) from error
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(spill, view) :]
    except OSError as error:
        os.close(spill)
        raise _refused("a long message", len(body), error) from error
    return spill


def _refused(what: str, nbytes: int, error: OSError) -> NoMemoryError | TransportError:
    return shortage(what, nbytes, error) or TransportError(f"{what} of {nbytes} bytes: {error}")


def _check_fds(count: int) -> None:
    if count > MAX_FDS:
        raise FramingError(f"{count} descriptors in one message; the kernel carries at most {MAX_FDS}")


def _decode(packet: bytes, fds: list[int], flags: int) -> tuple[bytes, list[int]]:
    if flags & socket.MSG_CTRUNC:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise FramingError(
            f"descriptors were truncated: this process may have {limit} (LimitNOFILE, ulimit -n)"
        )
    if flags & socket.MSG_TRUNC:
        raise FramingError("a packet was truncated")
    if len(packet) < HEADER.size:
        raise FramingError(f"packet of {len(packet)} bytes is shorter than its header")
    magic, kind, length = HEADER.unpack_from(packet)
    if magic != MAGIC or kind not in (0, SPILLED) or length > MAX_BODY:
        raise FramingError("packet has an unknown magic, flag or length")
    if kind == 0:
        if len(packet) != HEADER.size + length:
            raise FramingError(f"packet holds {len(packet) - HEADER.size} bytes and announces {length}")
        return packet[HEADER.size :], fds
    if not fds:
        raise FramingError("a spilled body came without its descriptor")
    spill = fds.pop()
    try:
        # Anything but memory could make this process wait, or has no length: only memory has seals.
        fcntl.fcntl(spill, fcntl.F_GET_SEALS)
        if os.fstat(spill).st_size != length:
            raise FramingError("a spilled body has another length than announced")
        return os.pread(spill, length, 0), fds
    except OSError as error:
        raise FramingError(f"a spilled body can't be read: {error}") from error
    finally:
        os.close(spill)


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(MAX_FDS * fds.itemsize)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(_RECEIVE, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # Said once, before the last words of a side that closed without having read everything.
        packet, ancillary, flags, _ = sock.recvmsg(_RECEIVE, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds), flags


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors that nobody wants; already closed ones are passed over."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def unpack(
    packet: bytes, fds: list[int], flags: int, decoder: msgspec.msgpack.Decoder[M]
) -> tuple[M, list[int]]:
    """The message of a packet, and its descriptors less a spilled body's.

    Args:
        packet: as received.
        fds: that came with it; closed if it is no message.
        flags: of `recvmsg`.
        decoder: of what the other side may send.

    Raises:
        FramingError: it is no message of ours.
    """
    try:
        body, rest = _decode(packet, fds, flags)
        return decoder.decode(body), rest
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        close_all(fds)
        raise FramingError(f"message could not be decoded: {error}") from error
    except BaseException:
        close_all(fds)
        raise


class Channel(Generic[M]):
    """Asynchronous end of a packet socket; works on asyncio and uvloop.

    One task may receive and any number may send: packets are atomic. `kind` is the (union of)
    message struct that the other side may send.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._sending = asyncio.Lock()
        self._deaf: Callable[[], object] | None = None

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def peer_credentials(self) -> tuple[int, int, int]:
        """(pid, uid, gid) of the process that connected, as the kernel vouches (SO_PEERCRED)."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        return pid, uid, gid

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Sends one message; `fds` stay open on this side.

        Raises:
            ConnectionLostError: the other side is gone.
            FramingError: the message or its descriptors are too many.
        """
        packet, carried, spill = _encode(message, fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", carried))] if carried else []
        try:
            async with self._sending:
                while True:
                    try:
                        self._sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
                    except BlockingIOError:
                        await self._ready(write=True)
                    else:
                        return
        except OSError as error:
            raise ConnectionLostError(f"Unix socket: {error}") from error
        finally:
            if spill is not None:
                os.close(spill)

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Sends a small message without waiting.

        Raises:
            ConnectionLostError: the other side is gone, or so far behind that its queue is full.
        """
        packet, _, spill = _encode(message, ())
        if spill is not None:
            os.close(spill)
            raise FramingError("send_nowait carries only messages that fit a packet")
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            raise ConnectionLostError(f"Unix socket: {error}") from error

    async def receive(self) -> tuple[M, list[int]]:
        """The next message and its descriptors, which belong to the caller from now on.

        Raises:
            ConnectionLostError: the other side closed or died.
            FramingError: what arrived is no message of ours.
        """
        while (received := self.receive_nowait()) is None:
            await self._ready(write=False)
        return received

    def listen(
        self, on_message: Callable[[M, list[int]], None], on_end: Callable[[WorldMoveError], None]
    ) -> None:
        """From now on passes each message on at once, where `receive` would have to wake a task.

        Args:
            on_message: told a message and its descriptors, as `receive` returns them; what it raises of
                ours ends the listening.
            on_end: told once why nothing more comes, unless the channel is closed before.
        """
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()

        def heard() -> None:
            try:
                while self._sock.fileno() >= 0 and (received := self.receive_nowait()) is not None:
                    on_message(*received)
            except WorldMoveError as error:
                loop.remove_reader(fd)
                self._deaf = None
                on_end(error)

        self._deaf = partial(loop.remove_reader, fd)
        loop.add_reader(fd, heard)

    def receive_nowait(self) -> tuple[M, list[int]] | None:
        """As `receive`, or `None` where nothing has come yet."""
        try:
            packet, fds, flags = _receive(self._sock)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(f"Unix socket: {error}") from error
        if not packet:
            # An empty packet looks like the end, and can carry descriptors all the same.
            close_all(fds)
            raise ConnectionLostError("Unix socket: closed by the other side")
        return unpack(packet, fds, flags, self._decoder)

    async def _ready(self, *, write: bool) -> None:
        if self._sock.fileno() < 0:
            raise ConnectionLostError("Unix socket: closed on this side")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        fd = self._sock.fileno()
        add, remove = (
            (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        )

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        add(fd, wake)
        try:
            await future
        finally:
            remove(fd)

    def close(self) -> None:
        """Closes this side; a pending `receive` of another task must be cancelled by its owner first."""
        if self._deaf is not None:
            self._deaf()
            self._deaf = None
        self._sock.close()


class SyncChannel(Generic[M]):
    """Blocking end of a packet socket, for programs without an event loop (the worker SDK)."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    @classmethod
    def connect(cls, path: str, kind: Any, timeout: float = 10.0) -> SyncChannel[M]:
        """Connects to a node's Unix socket; `timeout` in seconds."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise ConnectionLostError(f"cannot connect to {path}: {error}") from error
        return cls(sock, kind)

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Sends one message; `fds` stay open on this side. Raises as `Channel.send`."""
        packet, carried, spill = _encode(message, fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", carried))] if carried else []
        try:
            self._sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ConnectionLostError(f"Unix socket: {error}") from error
        finally:
            if spill is not None:
                os.close(spill)

    def receive(self, timeout: float | None = None) -> tuple[M, list[int]] | None:
        """The next message, or `None` after `timeout` seconds. Raises as `Channel.receive`."""
        try:
            self._sock.settimeout(timeout)
            packet, fds, flags = _receive(self._sock)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise ConnectionLostError(f"Unix socket: {error}") from error
        finally:
            # A time-out left behind would fail a later send, and make a look at the socket wait.
            with contextlib.suppress(OSError):
                self._sock.setblocking(True)
        if not packet:
            close_all(fds)
            raise ConnectionLostError("Unix socket: closed by the other side")
        return unpack(packet, fds, flags, self._decoder)

    def close(self) -> None:
        """Closes this side."""
        self._sock.close()


def sealed_memfd(name: str, nbytes: int) -> int:
    """A memory file of `nbytes` (1 or more) whose size nobody can change any more.

    A holder that shrank it would kill all others with SIGBUS. The size is promised, not reserved:
    pages appear as they are touched (`memory.arena.create_arena` reserves them).

    Raises:
        TransportError: the size is not positive, or the system refuses.
        NoMemoryError: it refuses because descriptors, or the size that files may have, do not suffice.
    """
    if nbytes <= 0:
        raise TransportError(f"a memory file of {nbytes} bytes; 1 or more are allowed")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _refused("a memory file", nbytes, error) from error
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise _refused("a memory file", nbytes, error) from error
    return fd


def map_shared(fd: int, nbytes: int, *, writable: bool = True, populate: bool = False) -> mmap.mmap:
    """Maps a descriptor shared; populated mappings take their page faults now instead of under load.

    Raises:
        TransportError: the descriptor is smaller than `nbytes` (a touch would be SIGBUS), or not mappable.
        NoMemoryError: descriptors or address space do not suffice.
    """
    size = os.fstat(fd).st_size
    if size < nbytes or nbytes <= 0:
        raise TransportError(f"descriptor has {size} bytes, {nbytes} were announced")
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(fd, nbytes, flags=flags, prot=protection)
    except OSError as error:
        raise _refused("a mapping", nbytes, error) from error
