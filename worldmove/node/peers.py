"""The connecting end of the control connection between two nodes: one WebSocket a move."""

from __future__ import annotations

import asyncio
import ssl

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from worldmove.errors import ConnectionLostError, FramingError, PeerError
from worldmove.messages import MAX_MESSAGE

PING_S = 1.0


class ClientChannel:
    """A control connection that this node opened."""

    def __init__(self, connection: ClientConnection, move_id: str) -> None:
        self._connection = connection
        self.move_id = move_id

    async def send(self, message: bytes) -> None:
        """Sends one message.

        Raises:
            ConnectionLostError: the connection is gone.
        """
        try:
            await self._connection.send(message)
        except (ConnectionClosed, OSError) as error:
            raise ConnectionLostError(f"the peer is gone: {error}") from error

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ConnectionLostError: the connection is gone.
            FramingError: the peer sent text.
        """
        try:
            message = await self._connection.recv()
        except (ConnectionClosed, OSError) as error:
            raise ConnectionLostError(f"the peer is gone: {error}") from error
        if isinstance(message, str):
            raise FramingError("the peer sent text; binary messages are allowed")
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes with a status code; never raises."""
        await self._connection.close(code, reason[:120])


async def connect_peer(
    url: str, move_id: str, token: str | None, timeout_ms: float, tls: ssl.SSLContext | None = None
) -> ClientChannel:
    """Opens the control connection of a move to the node at `url`.

    A peer that does not answer pings for `timeout_ms` is gone: so a stopped process is noticed. `tls` is
    for an `https` URL: whom this node trusts, and its own certificate.

    Raises:
        PeerError: unreachable, or it does not accept this node.
    """
    target = f"{url.replace('http', 'ws', 1).rstrip('/')}/v1/peer/moves/{move_id}"
    headers = {"Authorization": f"Bearer {token}"} if token else None
    seconds = timeout_ms / 1000
    try:
        async with asyncio.timeout(seconds):
            connection = await connect(
                target,
                ssl=tls if target.startswith("wss:") else None,
                additional_headers=headers,
                max_size=MAX_MESSAGE,
                compression=None,
                ping_interval=min(PING_S, seconds),
                ping_timeout=seconds,
                close_timeout=seconds,
                proxy=None,
            )
    except TimeoutError as error:
        raise PeerError(f"node at {url} did not answer within {timeout_ms:g} ms") from error
    except (OSError, WebSocketException) as error:
        raise PeerError(f"node at {url} cannot be reached: {error}") from error
    return ClientChannel(connection, move_id)
