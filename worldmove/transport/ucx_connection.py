"""One UCX endpoint as a `Connection`.

Messages are found by *probing* (`ucp_tag_probe_nb`): nothing is posted in advance, and tag and length
are known before a byte lands. UCX matches tags per worker, not per endpoint, so a stranger who
connects could answer in a peer's place; therefore every direction of every connection has a random
48-bit prefix, exchanged over the endpoint's own stream, which only its two ends can read.

The end is agreed on (`_FIN`, `_FIN_ACK`), because closing an endpoint loses what is still queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from worldmove.errors import ConnectionLostError, DeadlineError, FramingError
from worldmove.transport import ucx
from worldmove.transport.base import MAX_TAG, Buffer, check_length, check_tag, quiet

GREETING = struct.Struct("<IHHQ")
MAGIC = 0x554D5657
VERSION = 1
GREETING_TIMEOUT = 3.0
MAX_INBOX = 1024
"""Announced, unread messages of one connection; more than this is an attack or a bug."""
_FIN = 0xFFFF
_FIN_ACK = 0xFFFE


class Driver(Protocol):
    """What a connection needs of the transport that drives the worker."""

    worker: ucx.Worker

    def track(self, pending: Pending) -> asyncio.Future[None]:
        """Keeps a request until it has completed."""

    def release(self, connection: UcxConnection, error: BaseException) -> None:
        """Tells those who wait on a failed connection; its requests stay tracked."""

    async def drained(self, connection: UcxConnection) -> None:
        """Returns when everything that the connection posted has completed or failed."""

    async def settled(self, connection: UcxConnection, deadline_s: float) -> None:
        """Returns when UCX has let go of every buffer of an ended connection."""

    def drop(self, connection: UcxConnection) -> None:
        """Closes the connection's endpoint, once."""

    def ended(self, connection: UcxConnection) -> None:
        """Called by UCX from inside progress, where nothing may be done: notes it."""


class Pending:
    """A request under way, and everything that must stay alive until it has completed."""

    __slots__ = ("buffer", "future", "over", "owner", "request")

    def __init__(self, request: Any, buffer: Any, owner: UcxConnection | None) -> None:
        self.request = request
        self.buffer = buffer
        self.owner = owner
        self.future: asyncio.Future[None] = quiet(asyncio.get_running_loop().create_future())
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self) -> bool:
        """Passes the outcome on; false while the request is under way."""
        if not self.request.completed:
            return False
        error = ucx.outcome(self.request)
        if error is not None and self.owner is not None:
            self.owner.fail(error)
        self.finish(error)
        self.over.set_result(None)
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

    def __init__(self, connection: UcxConnection, probe: ucx.Probe) -> None:
        self._connection = connection
        self._probe: ucx.Probe | None = probe
        self.tag = probe.tag & 0xFFFF
        self.nbytes = probe.nbytes

    def into(self, buffer: Buffer) -> asyncio.Future[None]:
        """See `Incoming.into`."""
        check_length(buffer, self.nbytes)
        probe = self.claim()
        if probe is None:
            raise FramingError("a message can be received once")
        return self._connection.take(buffer, probe)

    def claim(self) -> ucx.Probe | None:
        """UCX's handle of the message, once."""
        probe, self._probe = self._probe, None
        return probe


class UcxConnection:
    """One endpoint; see `Connection`."""

    def __init__(self, driver: Driver, endpoint: Any) -> None:
        self._driver = driver
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
        self._post(lambda: ucx.stream_send(self._endpoint, mine), mine)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                await self._post(lambda: ucx.stream_receive(self._endpoint, theirs), theirs)
        except TimeoutError:
            raise DeadlineError(f"no greeting within {GREETING_TIMEOUT} s") from None
        magic, version, _, self._outward = GREETING.unpack(theirs)
        if magic != MAGIC or version != VERSION or self._outward >> 48:
            raise ConnectionLostError("the other side speaks another protocol or version")

    def send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
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
                await self._driver.drained(self)
                if not self._closed:
                    self._send(_FIN, memoryview(b""))
                    await asyncio.shield(self._confirmed)
        except TimeoutError:
            raise DeadlineError(f"the peer did not confirm the close within {deadline_s} s") from None
        finally:
            self.abort()
        await self._driver.settled(self, deadline_s)

    def abort(self) -> None:
        """See `Connection.abort`."""
        self.fail(ConnectionLostError("the connection was ended on this side"))
        self._finished = True
        self._discard()
        self._driver.drop(self)

    def take(self, buffer: Buffer, probe: ucx.Probe) -> asyncio.Future[None]:
        """Posts the receive of a probed message."""
        return self._post(lambda: self._driver.worker.receive(probe, buffer), buffer)

    def poll(self) -> bool:
        """Announces what has arrived; true if anything has."""
        found = False
        while True:
            probe = self._driver.worker.probe(self._inward)
            if probe is None:
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
        self._driver.release(self, error)
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
            if probe is not None and incoming.nbytes < ucx.RENDEZVOUS:
                scratch = bytearray(incoming.nbytes)
                self._driver.track(Pending(self._driver.worker.receive(probe, scratch), scratch, None))

    def _announce(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        full = self._outward << 16 | tag
        return self._post(lambda: ucx.send(self._endpoint, full, buffer), buffer)

    def _post(self, post: Callable[[], Any], buffer: Any) -> asyncio.Future[None]:
        if self._error is not None or self._endpoint is None:
            raise ConnectionLostError(str(self._error or "the connection has ended"))
        return self._driver.track(Pending(post(), buffer, self))

    def _on_end(self) -> None:
        self._driver.ended(self)
