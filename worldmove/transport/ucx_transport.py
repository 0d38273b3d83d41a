"""UCX as a `Transport`: one worker, driven by one task of the event loop.

UCXX's own `request.wait()` polls the event loop for as long as anything is pending. Here one task
progresses the worker in bounded bursts, settles what has completed, announces what has arrived, and
once nothing moves it arms the worker and sleeps on its descriptor: an idle worker uses no CPU.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from worldmove.errors import ConnectionLostError, DeadlineError, TransportError
from worldmove.transport import ucx
from worldmove.transport.lobby import Lobby
from worldmove.transport.ucx_connection import Pending, UcxConnection

MAX_GREETING = 64
"""Callers that have not greeted yet; for one more the first of them is turned away."""
BURST = 16
"""Steps of progress before the event loop gets its turn."""
TICK = 1.0
"""Longest time without progress, in seconds."""


async def _address(host: str) -> str:
    """The IPv4 address of a host: UCXX's listener binds no IPv6 ones."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=socket.AF_INET)
    except OSError as error:
        raise ConnectionLostError(f"{host!r} has no IPv4 address: {error}") from error
    return str(found[0][4][0])


class UcxListener:
    """Greets callers in the background and hands out those that answer; see `Listener`."""

    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport
        self._ready: asyncio.Queue[UcxConnection] = asyncio.Queue()
        self._greeting = Lobby(MAX_GREETING)
        self._closed = False
        self._listener = transport.worker.listen(self._on_call)
        self.port = self._listener.port

    async def accept(self) -> UcxConnection:
        """See `Listener.accept`."""
        return await self._ready.get()

    async def close(self) -> None:
        """See `Listener.close`."""
        self.deaf()
        await self._greeting.close()

    def deaf(self) -> None:
        """Takes no more callers, without waiting for those that are being greeted."""
        self._closed = True
        self._listener.close()

    def _on_call(self, endpoint: Any) -> None:
        connection = self._transport.adopt(endpoint)
        if self._ready.qsize() >= MAX_GREETING or self._closed:
            asyncio.get_running_loop().call_soon(connection.abort)
        else:
            self._greeting.take(self._greet(connection))

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
    """One UCX context and worker, driven by one task of the running event loop; see `Transport`.

    Args:
        options: see `ucx.Worker`.
        alert_s: for so long after something has moved it looks again without pause before it sleeps. With
            copies by the GPU's engines a wake-up takes as long as a message.
    """

    def __init__(self, options: Mapping[str, str] = ucx.OPTIONS, alert_s: float = 0.0) -> None:
        self.worker = ucx.Worker(options)
        self._alert_s = alert_s
        self._alert_until = 0.0
        self._pending: list[Pending] = []
        self._connections: list[UcxConnection] = []
        self._ended: list[UcxConnection] = []
        self._listeners: list[UcxListener] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._driver = asyncio.get_running_loop().create_task(self._run())

    async def listen(self) -> UcxListener:
        """See `Transport.listen`."""
        self._listeners.append(listener := UcxListener(self))
        return listener

    async def connect(self, host: str, port: int, deadline_s: float) -> UcxConnection:
        """See `Transport.connect`."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._call(await _address(host), port)
        except TimeoutError:
            raise DeadlineError(f"{host}:{port} did not answer within {deadline_s} s") from None

    async def _call(self, address: str, port: int) -> UcxConnection:
        if self._stopping:  # `close` has ended all that were there, and waits only for those
            raise ConnectionLostError(f"cannot connect to {address}:{port}: the transport is closed")
        connection = self.adopt(self.worker.connect(address, port))
        try:
            await connection.greet()
        except BaseException:
            connection.abort()
            raise
        return connection

    async def close(self) -> None:
        """See `Transport.close`."""
        for listener in self._listeners:
            listener.deaf()
        for connection in tuple(self._connections):
            connection.abort()
        self._stopping = True
        self._wake.set()
        await asyncio.shield(self._driver)
        self._give_back()

    def _give_back(self) -> None:
        # Requests first, then what they belong to (see `ucx`); only a worker beyond use has any left.
        self._pending.clear()
        self.worker.close()

    def adopt(self, endpoint: Any) -> UcxConnection:
        """Takes an endpoint under the driver's care."""
        connection = UcxConnection(self, endpoint)
        self._connections.append(connection)
        self._wake.set()
        return connection

    def track(self, pending: Pending) -> asyncio.Future[None]:
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

    async def settled(self, connection: UcxConnection, deadline_s: float) -> None:
        """Returns when UCX has let go of every buffer of an ended connection; raises `DeadlineError`."""
        if waiting := [item.over for item in self._pending if item.owner is connection]:
            _, late = await asyncio.wait(waiting, timeout=deadline_s)
            if late:
                raise DeadlineError(f"{len(late)} transfers did not end within {deadline_s} s")

    def drop(self, connection: UcxConnection) -> None:
        """Closes the connection's endpoint, once."""
        if connection in self._connections:
            self._connections.remove(connection)
            endpoint = connection.endpoint()
            request = ucx.close(endpoint)
            if request is not None:
                self.track(Pending(request, endpoint, None))

    def ended(self, connection: UcxConnection) -> None:
        """Called by UCX from inside progress, where nothing may be done: notes it."""
        self._ended.append(connection)

    async def _run(self) -> None:
        await self._drive()
        if self._stopping:  # whoever closes may have been cancelled meanwhile
            self._give_back()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = self.worker.descriptor
        loop.add_reader(descriptor, self._wake.set)
        self._tick()
        try:
            while not self._stopping or self._pending:
                if self._step():
                    if self._alert_s:
                        self._alert_until = loop.time() + self._alert_s
                    await asyncio.sleep(0)
                elif self._alert_until and loop.time() < self._alert_until:
                    await asyncio.sleep(0)
                elif self.worker.arm():
                    await self._wake.wait()
                    self._wake.clear()
                else:
                    await asyncio.sleep(0)
        except TransportError as error:
            for connection in tuple(self._connections):
                connection.fail(error)
        finally:
            loop.remove_reader(descriptor)
            self._timer.cancel()

    def _tick(self) -> None:
        """UCX looks after its own timers (keep-alive, retries) only while it is progressed."""
        self._wake.set()
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _step(self) -> bool:
        """One bounded burst; false if everything that could be done is done."""
        moved = self.worker.progress(BURST)
        waiting = [item for item in self._pending if not item.settle()]
        busy = moved == BURST or len(waiting) != len(self._pending)
        self._pending = waiting
        if moved:
            for connection in tuple(self._connections):
                busy |= connection.poll()
        if self._ended:
            ended, self._ended = self._ended, []
            for connection in ended:
                connection.fail(ConnectionLostError("UCX: the peer's endpoint is gone"))
        return busy
