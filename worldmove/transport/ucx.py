"""UCX through UCXX: the one file of this package that imports it.

UCXX's own `request.wait()` polls the event loop for as long as anything is pending. Here one task
drives the worker instead: it progresses in bounded bursts, settles what has completed, announces what
has arrived, and once nothing moves it arms the worker and sleeps on its epoll descriptor.

Messages are found by *probing* (`ucp_tag_probe_nb`): nothing is posted in advance, and tag and length
are known before a byte lands. UCX matches tags per worker, not per endpoint, so a stranger who
connects could answer in a peer's place; therefore every direction of every connection has a random
48-bit prefix, exchanged over the endpoint's own stream, which only its two ends can read.

No request is ever cancelled: a cancelled receive goes on writing into its buffer. UCXX cancels a
request when its Python object is collected, so `_Pending` keeps it, and its buffer, until completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

# UCX reads these when its library is loaded, so they can't stand in `OPTIONS`. Loading it patches eight
# functions and busily waits 50 ms after each for other threads to leave them: 0.4 s of CPU at every
# start, where no other thread runs yet. (Switching UCX_MEM_EVENTS off saves the same and makes UCX 1.21
# crash when a peer dies in mid-transfer: its rendezvous then has no registration cache to invalidate.)
os.environ.setdefault("UCX_MEM_BISTRO_GRACE_DURATION", "100us")
os.environ.setdefault("UCX_VFS_ENABLE", "n")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

from ucxx._lib import libucxx
from ucxx._lib.arr import Array
from ucxx.types import Tag, TagMask

from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, TransportError
from worldmove.transport.base import MAX_TAG, check_length, check_tag, quiet

RENDEZVOUS = 8 * 1024
"""From this length on bytes move only when the receiver has named a buffer."""
OPTIONS = {
    "TLS": "tcp",
    "TCP_TX_SEG_SIZE": "256k",  # the default of 8k halves to quarters the rate
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_CM_REUSEADDR": "y",
    "RNDV_THRESH": str(RENDEZVOUS),
}
GREETING = struct.Struct("<IHHQ")
MAGIC = 0x554D5657
VERSION = 1
GREETING_TIMEOUT = 3.0
MAX_GREETING = 64
MAX_INBOX = 1024
"""Announced, unread messages of one connection; more than this is an attack or a bug."""
BURST = 16
"""Progress calls before the event loop gets its turn; each moves about one segment."""
SPIN = 4
"""Progress calls in a row that find nothing before the worker is armed."""
IDLE_WAIT = 1.0
_FIN = 0xFFFF
_FIN_ACK = 0xFFFE
_PREFIX = TagMask(0xFFFF_FFFF_FFFF_0000)
_FEATURES = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP, libucxx.Feature.STREAM)


def _lost(error: BaseException) -> ConnectionLostError:
    return ConnectionLostError(f"UCX: {error}" if str(error) else f"UCX: {type(error).__name__}")


class _Pending:
    """A request under way, and everything that must stay alive until it has completed."""

    __slots__ = ("buffer", "future", "owner", "request")

    def __init__(self, request: Any, buffer: Any, owner: UcxConnection | None) -> None:
        self.request = request
        self.buffer = buffer
        self.owner = owner
        self.future: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())

    def settle(self) -> bool:
        """Passes the outcome on; false while the request is under way."""
        if not self.request.completed:
            return False
        error: BaseException | None = None
        try:
            self.request.check_error()
        except libucxx.UCXError as reason:
            error = _lost(reason)
        if error is not None and self.owner is not None:
            self.owner.fail(error)
        self.finish(error)
        return True

    def finish(self, error: BaseException | None) -> None:
        """Completes the future; the request may go on."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class UcxIncoming:
    """A probed message: removed from UCX's queue, its bytes not yet asked for."""

    def __init__(self, connection: UcxConnection, probe: Any) -> None:
        self._connection = connection
        self._probe = probe
        self.tag = int(probe.sender_tag.value) & 0xFFFF
        self.nbytes = int(probe.length)

    def into(self, buffer: memoryview) -> asyncio.Future[None]:
        """See `Incoming.into`."""
        check_length(buffer, self.nbytes)
        probe = self.claim()
        if probe is None:
            raise FramingError("a message can be received once")
        return self._connection.take(buffer, probe)

    def claim(self) -> Any:
        """UCX's handle of the message, once."""
        probe, self._probe = self._probe, None
        return probe


class UcxConnection:
    """One endpoint; see `Connection`."""

    def __init__(self, transport: UcxTransport, endpoint: Any) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._inbox: deque[UcxIncoming] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._inward = secrets.randbits(48)
        self._outward = 0
        self._error: BaseException | None = None
        self._finished = self._closed = False
        self._confirmed: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())
        endpoint.set_close_callback(self._on_end)

    async def greet(self) -> None:
        """Exchanges the tag prefixes over the endpoint's stream; raises as `Transport.connect`."""
        theirs = bytearray(GREETING.size)
        mine = GREETING.pack(MAGIC, VERSION, 0, self._inward)
        self._post(lambda: self._endpoint.stream_send(Array(mine)), mine)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                await self._post(lambda: self._endpoint.stream_recv(Array(theirs)), theirs)
        except TimeoutError:
            raise DeadlineError(f"no greeting within {GREETING_TIMEOUT} s") from None
        magic, version, _, self._outward = GREETING.unpack(theirs)
        if magic != MAGIC or version != VERSION or self._outward >> 48:
            raise ConnectionLostError("the other side speaks another protocol or version")

    def send(self, tag: int, buffer: memoryview) -> asyncio.Future[None]:
        """See `Connection.send`."""
        check_tag(tag)
        if self._finished:
            raise ConnectionLostError("the connection is closed on this side")
        return self._send(tag, buffer)

    async def receive(self) -> UcxIncoming | None:
        """See `Connection.receive`."""
        while not self._inbox:
            if self._error is not None:
                raise ConnectionLostError(str(self._error)) from self._error
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._inbox.popleft()

    async def close(self, deadline_s: float = 5.0) -> None:
        """See `Connection.close`."""
        if self._finished:
            return
        self._finished = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._transport.drained(self)
                if not self._closed:
                    self._send(_FIN, memoryview(b""))
                    await asyncio.shield(self._confirmed)
        except TimeoutError:
            raise DeadlineError(f"the peer did not confirm the close within {deadline_s} s") from None
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Connection.abort`."""
        self.fail(ConnectionLostError("the connection was ended on this side"))
        self._finished = True
        self._discard()
        self._transport.drop(self)

    def take(self, buffer: memoryview, probe: Any) -> asyncio.Future[None]:
        """Posts the receive of a probed message."""
        return self._post(lambda: self._transport.worker.tag_recv_with_handle(Array(buffer), probe), buffer)

    def poll(self) -> bool:
        """Announces what has arrived; true if anything has."""
        found = False
        while True:
            probe = self._transport.worker.tag_probe(Tag(self._inward << 16), _PREFIX, True)
            if not probe.matched:
                break
            found = True
            self._arrived(UcxIncoming(self, probe))
        return found

    def fail(self, error: BaseException) -> None:
        """The connection is over: everyone who waits learns it. Transfers under way are left alone."""
        if self._error is None and not self._closed:
            self._error = error
        if not self._confirmed.done():
            # A peer that has closed itself needs no confirmation from us, nor we from it.
            if self._closed:
                self._confirmed.set_result(None)
            else:
                self._confirmed.set_exception(error)
        self._transport.release(self, error)
        self._announce()

    def endpoint(self) -> Any:
        """The UCXX endpoint, once: whoever takes it closes it."""
        endpoint, self._endpoint = self._endpoint, None
        return endpoint

    def _arrived(self, incoming: UcxIncoming) -> None:
        if incoming.tag in (_FIN, _FIN_ACK) and incoming.nbytes == 0:
            with contextlib.suppress(ConnectionLostError):
                incoming.into(memoryview(bytearray()))
                self._end(incoming.tag)
        elif incoming.tag > MAX_TAG:
            self.fail(FramingError(f"tag {incoming.tag} belongs to the transport"))
        elif len(self._inbox) >= MAX_INBOX:
            self.fail(FramingError(f"more than {MAX_INBOX} messages wait unread"))
        else:
            self._inbox.append(incoming)
        self._announce()

    def _end(self, tag: int) -> None:
        if tag == _FIN:
            self._closed = True
            self._send(_FIN_ACK, memoryview(b""))
        elif not self._confirmed.done():
            self._confirmed.set_result(None)

    def _discard(self) -> None:
        """Takes small messages that nobody will read: UCX holds their bytes until someone does."""
        while self._inbox:
            incoming = self._inbox.popleft()
            probe = incoming.claim()
            if probe is not None and incoming.nbytes < RENDEZVOUS:
                scratch = bytearray(incoming.nbytes)
                request = self._transport.worker.tag_recv_with_handle(Array(scratch), probe)
                self._transport.track(_Pending(request, scratch, None))

    def _announce(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send(self, tag: int, buffer: memoryview) -> asyncio.Future[None]:
        full = Tag(self._outward << 16 | tag)
        return self._post(lambda: self._endpoint.tag_send(Array(buffer), full), buffer)

    def _post(self, post: Callable[[], Any], buffer: Any) -> asyncio.Future[None]:
        if self._error is not None or self._endpoint is None:
            raise ConnectionLostError(str(self._error or "the connection has ended"))
        try:
            request = post()
        except libucxx.UCXError as error:
            raise _lost(error) from error
        return self._transport.track(_Pending(request, buffer, self))

    def _on_end(self) -> None:
        self._transport.ended(self)


class UcxListener:
    """Greets callers in the background and hands out those that answer; see `Listener`."""

    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport
        self._ready: asyncio.Queue[UcxConnection] = asyncio.Queue()
        self._greeting: set[asyncio.Task[None]] = set()
        try:
            self._listener = libucxx.UCXListener.create(
                worker=transport.worker, port=0, cb_func=self._on_call, deliver_endpoint=True
            )
        except libucxx.UCXError as error:
            raise TransportError(f"UCX cannot listen: {error}") from error
        self.port = int(self._listener.port)

    async def accept(self) -> UcxConnection:
        """See `Listener.accept`."""
        return await self._ready.get()

    async def close(self) -> None:
        """See `Listener.close`."""
        self._listener = None
        for task in tuple(self._greeting):
            task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)

    def _on_call(self, endpoint: Any) -> None:
        connection = self._transport.adopt(endpoint)
        if len(self._greeting) + self._ready.qsize() >= MAX_GREETING or self._listener is None:
            asyncio.get_running_loop().call_soon(connection.abort)
            return
        task = asyncio.get_running_loop().create_task(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: UcxConnection) -> None:
        try:
            await connection.greet()
        except (TransportError, DeadlineError):
            connection.abort()
        except asyncio.CancelledError:
            connection.abort()
            raise
        else:
            self._ready.put_nowait(connection)


class UcxTransport:
    """One UCX context and worker, driven by one task of the running event loop; see `Transport`."""

    def __init__(self) -> None:
        try:
            self._context = libucxx.UCXContext(dict(OPTIONS), _FEATURES)
            self.worker = libucxx.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
        except libucxx.UCXError as error:
            raise TransportError(f"UCX cannot start: {error}") from error
        self._pending: list[_Pending] = []
        self._connections: list[UcxConnection] = []
        self._ended: list[UcxConnection] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def listen(self) -> UcxListener:
        """See `Transport.listen`."""
        return UcxListener(self)

    async def connect(self, host: str, port: int, deadline_s: float) -> UcxConnection:
        """See `Transport.connect`."""
        try:
            connection = self.adopt(libucxx.UCXEndpoint.create(self.worker, host, port, True))
        except libucxx.UCXError as error:
            raise ConnectionLostError(f"UCX cannot connect to {host}:{port}: {error}") from error
        try:
            async with asyncio.timeout(deadline_s):
                await connection.greet()
        except TimeoutError:
            connection.abort()
            raise DeadlineError(f"{host}:{port} did not answer within {deadline_s} s") from None
        except BaseException:
            connection.abort()
            raise
        return connection

    async def close(self) -> None:
        """See `Transport.close`."""
        for connection in tuple(self._connections):
            connection.abort()
        self._stopping = True
        self._wake.set()
        await asyncio.shield(self._driver)

    def adopt(self, endpoint: Any) -> UcxConnection:
        """Takes an endpoint under the driver's care."""
        connection = UcxConnection(self, endpoint)
        self._connections.append(connection)
        self._wake.set()
        return connection

    def track(self, pending: _Pending) -> asyncio.Future[None]:
        """Keeps a request until it has completed."""
        if not pending.settle():
            self._pending.append(pending)
            self._wake.set()
        return pending.future

    def release(self, connection: UcxConnection, error: BaseException) -> None:
        """Tells those who wait on a failed connection; its requests stay tracked."""
        for item in self._pending:
            if item.owner is connection:
                item.finish(error)

    async def drained(self, connection: UcxConnection) -> None:
        """Returns when everything that the connection posted has completed or failed."""
        while waiting := [i.future for i in self._pending if i.owner is connection and not i.future.done()]:
            await asyncio.wait(waiting)

    def drop(self, connection: UcxConnection) -> None:
        """Closes the connection's endpoint, once."""
        if connection in self._connections:
            self._connections.remove(connection)
            endpoint = connection.endpoint()
            # UCXX closes a failed endpoint itself, and then answers `close` with a null request.
            if endpoint.alive:
                self.track(_Pending(endpoint.close(), endpoint, None))

    def ended(self, connection: UcxConnection) -> None:
        """Called by UCX from inside progress, where nothing may be done: notes it."""
        self._ended.append(connection)

    async def _drive(self) -> None:
        try:
            while not self._stopping or self._pending:
                if self._step():
                    await asyncio.sleep(0)
                else:
                    await self._sleep()
        except libucxx.UCXError as error:
            for connection in tuple(self._connections):
                connection.fail(_lost(error))

    def _step(self) -> bool:
        """One bounded burst; true if anything moved, completed or arrived."""
        busy, misses = False, 0
        for _ in range(BURST):
            if self.worker.progress_once():
                busy, misses = True, 0
                continue
            misses += 1
            if misses == SPIN:
                break
        waiting = [item for item in self._pending if not item.settle()]
        busy |= len(waiting) != len(self._pending)
        self._pending = waiting
        for connection in tuple(self._connections):
            busy |= connection.poll()
        ended, self._ended = self._ended, []
        for connection in ended:
            connection.fail(ConnectionLostError("UCX: the peer's endpoint is gone"))
        return busy

    async def _sleep(self) -> None:
        """Waits for the worker's descriptor or for something to be posted; `IDLE_WAIT` is a safety net."""
        if not self.worker.arm():
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        descriptor = self.worker.epoll_file_descriptor
        loop.add_reader(descriptor, self._wake.set)
        timer = loop.call_later(IDLE_WAIT, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
        self._wake.clear()
