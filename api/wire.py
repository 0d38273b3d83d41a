"""HTTP and WebSocket connections as uvicorn serves them, with what it leaves open closed.

uvicorn's parser takes heads of any length and waits for them for ever, and doesn't tell an application
who the other side of a TLS connection is.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from api import problems
from api.entrance import Places

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState
    from websockets.http11 import Request

MAX_HEAD = 64 * 1024
"""Request line and headers together, bytes."""
HEAD_SECONDS = 10.0
"""From a connection's start, or a request's first byte, to the end of its head."""
MAX_WAITING = 16
"""Requests that may wait on one connection for the answers before them (pipelining)."""


class HttpConnection(HttpToolsProtocol):
    """HTTP with bounded heads, a deadline for them, and few requests that wait for answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop_waiting()
        super().connection_lost(exc)
        give_back(self)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of a head, which the parser itself may hold back as long as it likes."""
        if self._in_head:
            self._head += len(data)
            self._await_head()
        super().data_received(data)
        if self._in_head and self._head > MAX_HEAD and not self.transport.is_closing():
            self._refuse(431, f"request line and headers are longer than {MAX_HEAD} bytes")

    def on_headers_complete(self) -> None:
        """The head is there.

        Raises:
            ValueError: too many requests wait; the parser ends with it.
        """
        if len(self.pipeline) >= MAX_WAITING:
            raise ValueError(f"more than {MAX_WAITING} requests wait for answers")
        self._in_head, self._head = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What comes now is the next request's head."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP with a problem."""
        self._refuse(400, msg)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self._refuse(408, f"the request did not arrive within {HEAD_SECONDS:.0f} s")

    def _refuse(self, status: int, detail: str) -> None:
        """Ends the connection; an answer may be on its way, and then says enough."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            answer = problems.of_http(status, detail, Connection="close")
            head = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
            phrase = problems.phrase(status).encode()
            self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, phrase, head, answer.body))
        self.transport.close()


class PeerConnection(WebSocketsSansIOProtocol):
    """A WebSocket that tells the application whose certificate the other side has shown, if any."""

    def __init__(self, config: Config, server_state: ServerState, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self.server_state = server_state

    def handle_connect(self, event: Request) -> None:
        """Adds `extensions.tls.client_cert_name` to the scope (the ASGI extension for TLS)."""
        super().handle_connect(event)
        scope = getattr(self, "scope", None)
        if scope is None:
            return
        shown: Any = self.transport.get_extra_info("ssl_object")
        if isinstance(shown, ssl.SSLObject | ssl.SSLSocket) and (certificate := shown.getpeercert()):
            scope["extensions"]["tls"] = {"client_cert_name": _name(certificate)}

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        give_back(self)


def give_back(connection: HttpConnection | PeerConnection) -> None:
    """Gives the place of a connection back that has ended."""
    if connection.client is not None and isinstance(connection.server_state, Places):
        connection.server_state.give_back(connection.client[0])


def _name(certificate: Any) -> str:
    parts = [f"{key}={value}" for group in certificate.get("subject", ()) for key, value in group]
    return ",".join(parts) or "without a name"
