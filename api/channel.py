"""A peer's WebSocket as a channel of binary messages with our own errors."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from worldmove.errors import ConnectionLostError, FramingError
from worldmove.messages import MAX_MESSAGE

MAX_REASON = 120
"""RFC 6455 leaves 123 bytes for the reason of a close."""


class WebSocketChannel:
    """The receiving end's channel.

    Keep one task in `receive` at all times: while nobody receives, the socket is not read, and the
    keep-alive would take the peer for dead.
    """

    def __init__(self, socket: WebSocket, move_id: str) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()
        self.move_id = move_id

    async def send(self, message: bytes) -> None:
        """Sends one binary message.

        Raises:
            FramingError: it is longer than `MAX_MESSAGE`.
            ConnectionLostError: the peer is gone or the channel is closed.
        """
        if len(message) > MAX_MESSAGE:
            raise FramingError(f"message of {len(message)} bytes; at most {MAX_MESSAGE} are allowed")
        try:
            async with self._sending:
                await self._socket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError, OSError) as error:
            raise ConnectionLostError(f"peer connection of move {self.move_id} is closed") from error

    async def receive(self) -> bytes:
        """The next binary message.

        Raises:
            FramingError: the peer sent text.
            ConnectionLostError: the peer is gone or the channel is closed.
        """
        if self._socket.client_state is not WebSocketState.CONNECTED:
            raise ConnectionLostError(f"peer connection of move {self.move_id} is closed")
        try:
            event = await self._socket.receive()
        except (RuntimeError, OSError) as error:
            raise ConnectionLostError(f"peer connection of move {self.move_id} failed") from error
        if event["type"] == "websocket.disconnect":
            raise ConnectionLostError(
                f"the peer of move {self.move_id} closed the connection", close_code=event.get("code")
            )
        message = event.get("bytes")
        if not isinstance(message, bytes):
            raise FramingError(f"the peer of move {self.move_id} sent text; binary messages are allowed")
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes the connection; never raises, and a second call does nothing."""
        if self._socket.application_state is not WebSocketState.CONNECTED:
            return
        short = reason.encode("utf-8", "replace")[:MAX_REASON].decode("utf-8", "ignore")
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._socket.close(code, short)
