"""The seam of the data plane: what a transport must do, and nothing more.

A connection carries messages in the order they were sent, each with a 16-bit tag and a length. The
receiver learns tag and length of the next message *before* a byte of it lands and then chooses the
buffer, so a message that is too short, too long or uncalled-for never touches memory.

Posting is synchronous and returns a future; cancelling that future, or a task that awaits it, stops
the waiting and never the transfer: the buffer stays in use until the transfer completes by itself,
or until the process that runs it is gone. `abort` never waits; `close` drains.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from worldmove.errors import FramingError

MAX_TAG = 0xFFEF
"""The highest tag that a user may send; those above belong to the transports."""


class DeviceBytes:
    """Bytes in a GPU's memory, as UCX takes them; whoever made them keeps the memory.

    Attributes:
        address: as the device sees it. nbytes: how many. readonly: never.
    """

    readonly = False

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See CUDA's array interface, version 3."""
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


Buffer = memoryview | DeviceBytes


class Incoming(Protocol):
    """A message that has been announced and not yet received."""

    @property
    def tag(self) -> int:
        """The sender's tag, 0 to `MAX_TAG`."""

    @property
    def nbytes(self) -> int:
        """Length in bytes, as it will land."""

    def into(self, buffer: Buffer) -> asyncio.Future[None]:
        """Receives the message into `buffer`, of exactly `nbytes` writable bytes; callable once.

        Returns:
            A future that completes when every byte is in `buffer`, or fails with
            `ConnectionLostError`.

        Raises:
            FramingError: the buffer has another length, or the message was received already.
        """


class Connection(Protocol):
    """One ordered, reliable conversation with a peer."""

    def send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        """Sends a message; `buffer` may be read-only and empty.

        Returns:
            A future that completes when the buffer may be changed again (which may be before the
            peer has the bytes), or fails with `ConnectionLostError`.

        Raises:
            FramingError: the tag is out of range.
            ConnectionLostError: the connection has ended.
        """

    async def receive(self) -> Incoming | None:
        """The next message, or `None` when the peer has closed and all it sent was taken.

        One task at a time may receive.

        Raises:
            ConnectionLostError: the connection broke, or was aborted on this side.
        """

    async def close(self, deadline_s: float = 5.0) -> None:
        """Drains and ends: returns when the peer's side holds or has taken all that was sent.

        When it has returned, no buffer of this connection is in use.

        Raises:
            ConnectionLostError: the connection broke first.
            DeadlineError: the peer didn't confirm within `deadline_s` seconds; the connection is aborted.
        """

    def abort(self) -> None:
        """Ends the connection at once; pending futures fail.

        Buffers of transfers under way stay in use until these complete by themselves or this
        process is gone.
        """


class Listener(Protocol):
    """Accepts connections; anyone may call, so the first message must authenticate."""

    @property
    def port(self) -> int:
        """The port it listens on."""

    async def accept(self) -> Connection:
        """The next caller's connection."""

    async def close(self) -> None:
        """Stops listening; accepted connections live on."""


class Transport(Protocol):
    """A way to reach peers."""

    async def listen(self) -> Listener:
        """Listens on a free port. Raises `TransportError`: it can't, or the transport is closed."""

    async def connect(self, host: str, port: int, deadline_s: float) -> Connection:
        """Connects to a listener; `deadline_s` in seconds.

        Raises:
            ConnectionLostError: nobody listens there, or what listens is no transport of this kind.
            DeadlineError: no answer in time.
        """

    async def close(self) -> None:
        """Aborts what is open, ends listeners, gives all back; returns when no transfer is under way."""


def check_tag(tag: int) -> None:
    """Raises `FramingError` for a tag that users may not send."""
    if not 0 <= tag <= MAX_TAG:
        raise FramingError(f"tag {tag} is not in 0 to {MAX_TAG}")


def check_length(buffer: Buffer, nbytes: int) -> None:
    """Raises `FramingError` unless `buffer` is exactly `nbytes` long and writable."""
    if buffer.nbytes != nbytes:
        raise FramingError(f"a message of {nbytes} bytes came where {buffer.nbytes} are expected")
    if buffer.readonly:
        raise FramingError("a message cannot be received into read-only memory")


def on_host(buffer: Buffer) -> memoryview:
    """The buffer, where only host memory can be used. Raises `FramingError` for a GPU's."""
    if isinstance(buffer, DeviceBytes):
        raise FramingError("this transport carries no GPU memory")
    return buffer


async def take(incoming: Incoming) -> bytes:
    """Receives a message of bounded length whole."""
    body = bytearray(incoming.nbytes)
    await incoming.into(memoryview(body))
    return bytes(body)


def quiet(future: asyncio.Future[None]) -> asyncio.Future[None]:
    """Marks a failure as seen, for futures that nobody may be waiting for; returns the same future."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
