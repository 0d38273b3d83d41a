"""The in-memory twin of the UCX transport, with faults on demand.

It keeps the same contract (one test suite runs on both): messages up to 8 KiB complete at once, larger
ones when the receiver has taken them. It lives inside one event loop and is meant for tests of what
stands on a connection: every fault happens exactly where it is asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, TransportError
from worldmove.transport.base import Buffer, check_length, check_tag, on_host, quiet

EAGER = 8 * 1024


class Fault(NamedTuple):
    """What befalls the `at`-th message (from 0) that a transport's connections send.

    `drop`: it never arrives. `delay`: it, and all behind it, arrive after `until` is set. `corrupt`:
    its middle byte is flipped. `short`: its last byte is missing. `cut`: the connection breaks instead.
    """

    kind: Literal["drop", "delay", "corrupt", "short", "cut"]
    at: int
    until: asyncio.Event | None = None


class _Message:
    def __init__(self, tag: int, data: memoryview, until: asyncio.Event | None) -> None:
        self.tag = tag
        self.until = until
        self.sent: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())
        self.data = data
        if data.nbytes <= EAGER:
            self.data = memoryview(bytes(data))
            self.sent.set_result(None)


class MemoryIncoming:
    """See `Incoming`."""

    def __init__(self, connection: MemoryConnection, message: _Message) -> None:
        self._connection = connection
        self._message: _Message | None = message
        self.tag = message.tag
        self.nbytes = message.data.nbytes

    def into(self, buffer: Buffer) -> asyncio.Future[None]:
        """See `Incoming.into`."""
        check_length(buffer, self.nbytes)
        message, self._message = self._message, None
        if message is None:
            raise FramingError("a message can be received once")
        return self._connection.take(message, on_host(buffer))


class MemoryConnection:
    """One end; see `Connection`."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._inbox: deque[_Message] = deque()
        self._changed = asyncio.Event()
        self._unfinished: set[asyncio.Future[None]] = set()
        self._error: ConnectionLostError | None = None
        self._closed = self._finished = False
        self.peer: MemoryConnection = self

    def send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        """See `Connection.send`."""
        check_tag(tag)
        buffer = on_host(buffer)
        if self._finished or self._error is not None:
            raise ConnectionLostError(str(self._error or "the connection is closed on this side"))
        fault = self._transport.fault()
        data = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if fault is not None and fault.kind == "cut":
            self.peer.fail(ConnectionLostError("cut"))
            self.fail(ConnectionLostError("cut"))
            return self._watch(self._failed())
        if fault is not None and fault.kind == "corrupt":
            damaged = bytearray(data)
            damaged[len(damaged) // 2] ^= 0xFF
            data = memoryview(damaged)
        if fault is not None and fault.kind == "short":
            data = data[:-1]
        message = _Message(tag, data, fault.until if fault is not None else None)
        if fault is None or fault.kind != "drop":
            self.peer.deliver(message)
        return self._watch(message.sent)

    async def receive(self) -> MemoryIncoming | None:
        """See `Connection.receive`."""
        while True:
            if self._inbox:
                until = self._inbox[0].until
                if until is None:
                    return MemoryIncoming(self, self._inbox.popleft())
                await until.wait()
                self._inbox[0].until = None
                continue
            if self._error is not None:
                raise ConnectionLostError(str(self._error)) from self._error
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def close(self, deadline_s: float = 5.0) -> None:
        """See `Connection.close`."""
        if self._finished:
            return
        self._finished = True
        try:
            if self._unfinished:
                done, late = await asyncio.wait(self._unfinished, timeout=deadline_s)
                if late:
                    raise DeadlineError(f"the peer did not confirm the close within {deadline_s} s")
                for future in done:
                    future.result()
            if self._error is not None:
                raise ConnectionLostError(str(self._error))
            self.peer.end()
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Connection.abort`."""
        self._finished = True
        self.fail(ConnectionLostError("the connection was ended on this side"))
        self.peer.fail(ConnectionLostError("the peer's end is gone"))

    def deliver(self, message: _Message) -> None:
        """Called by the sender."""
        self._inbox.append(message)
        self._changed.set()

    def take(self, message: _Message, buffer: memoryview) -> asyncio.Future[None]:
        """Copies in a later turn of the loop, as a network would."""
        if self._error is not None:
            raise ConnectionLostError(str(self._error))
        landed: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())

        def land() -> None:
            if self._error is not None:
                _fail(landed, self._error)
                return
            if message.data.nbytes:
                buffer.cast("B")[:] = message.data
            for future in (landed, message.sent):
                if not future.done():
                    future.set_result(None)

        asyncio.get_running_loop().call_soon(land)
        return self._watch(landed)

    def end(self) -> None:
        """The peer has closed."""
        self._closed = True
        self._changed.set()

    def fail(self, error: ConnectionLostError) -> None:
        """The connection is over."""
        if self._error is None and not self._closed:
            self._error = error
        for future in tuple(self._unfinished):
            _fail(future, error)
        self._changed.set()

    def _watch(self, future: asyncio.Future[None]) -> asyncio.Future[None]:
        if not future.done():
            self._unfinished.add(future)
            future.add_done_callback(self._unfinished.discard)
        return future

    def _failed(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())
        _fail(future, self._error or ConnectionLostError("cut"))
        return future


def _fail(future: asyncio.Future[None], error: ConnectionLostError) -> None:
    if not future.done():
        future.set_exception(ConnectionLostError(str(error)))


class MemoryListener:
    """See `Listener`."""

    def __init__(self, transport: MemoryTransport, port: int) -> None:
        self._transport = transport
        self.port = port
        self.calls: asyncio.Queue[MemoryConnection] = asyncio.Queue()

    async def accept(self) -> MemoryConnection:
        """See `Listener.accept`."""
        return await self.calls.get()

    async def close(self) -> None:
        """See `Listener.close`."""
        self._transport.network.listeners.pop(self.port, None)


class MemoryNetwork:
    """What joins the transports of one test."""

    def __init__(self) -> None:
        self.listeners: dict[int, tuple[MemoryTransport, MemoryListener]] = {}
        self._next = 1

    def port(self) -> int:
        """A port that was never used."""
        self._next += 1
        return self._next


class MemoryTransport:
    """See `Transport`; `faults` befall the messages that this side sends."""

    def __init__(self, network: MemoryNetwork, faults: Sequence[Fault] = ()) -> None:
        self.network = network
        self._faults = {fault.at: fault for fault in faults}
        self._sent = 0
        self._connections: list[MemoryConnection] = []
        self._closed = False

    async def listen(self) -> MemoryListener:
        """See `Transport.listen`."""
        if self._closed:
            raise TransportError("the transport is closed")
        listener = MemoryListener(self, self.network.port())
        self.network.listeners[listener.port] = (self, listener)
        return listener

    async def connect(self, host: str, port: int, deadline_s: float) -> MemoryConnection:
        """See `Transport.connect`."""
        if self._closed:
            raise ConnectionLostError("the transport is closed")
        found = self.network.listeners.get(port)
        if found is None:
            raise ConnectionLostError(f"nobody listens on {host}:{port}")
        other, listener = found
        mine, theirs = self.open(), other.open()
        mine.peer, theirs.peer = theirs, mine
        listener.calls.put_nowait(theirs)
        return mine

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self.network.listeners = {p: on for p, on in self.network.listeners.items() if on[0] is not self}
        for connection in self._connections:
            connection.abort()

    def open(self) -> MemoryConnection:
        """One end, not yet joined to its peer."""
        connection = MemoryConnection(self)
        self._connections.append(connection)
        return connection

    def fault(self) -> Fault | None:
        """What befalls the message that is being sent now."""
        index = self._sent
        self._sent += 1
        return self._faults.get(index)
