"""The first thing a request meets: its host, the size of its body, and the access log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response

from api import problems
from api.security import ANYBODY, Security
from worldmove.errors import UnauthorizedError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 1024 * 1024
MAX_REGISTRATION = 2 * 1024 * 1024
"""`MAX_REGIONS` regions with long names fit."""
MAX_BOUNDARY = 6 * 1024 * 1024
"""The longest host state fits, as base64."""
BODY_SECONDS = 30.0

log = structlog.get_logger("worldmove.http")


class _RefusedError(Exception):
    """The request ends here, with this answer."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class Guard:
    """ASGI middleware: refuses foreign hosts, strangers, long and slow bodies before anything is parsed."""

    def __init__(self, app: App, security: Security) -> None:
        self._app = app
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        misdirected = not self._security.host_allowed(headers.get("host", ""))
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send, misdirected or "origin" in headers)
            return
        await self._http(scope, receive, send, headers, misdirected)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, refused: bool) -> None:
        if not refused:
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "peers only"})

    async def _http(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, misdirected: bool
    ) -> None:
        started = time.monotonic()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            _same_host(misdirected)
            self._known(scope, headers)
            body = await _body(receive, headers, limit_of(scope["path"]))
            await self._app(scope, receive if body is None else _replay(body, receive), watched)
        except _RefusedError as refused:
            await refused.response(scope, receive, watched)
        finally:
            elapsed = round((time.monotonic() - started) * 1000, 3)
            log.debug("request", method=scope["method"], path=scope["path"], status=status, ms=elapsed)

    def _known(self, scope: Scope, headers: Headers) -> None:
        """Nobody's body is read, let alone parsed, before the caller has shown a token that is known."""
        if not _has_body(headers) or not self._security.guarded:
            return
        try:
            self._security.check(HTTPConnection(scope), ANYBODY)
        except UnauthorizedError as error:
            answer = problems.of_error(error)
            answer.headers["Connection"] = "close"
            raise _RefusedError(answer) from None


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _same_host(misdirected: bool) -> None:
    if misdirected:
        raise _RefusedError(problems.of_http(421, "Host names another machine; this node has no tokens"))


def limit_of(path: str) -> int:
    """Most bytes that a body for `path` may have."""
    if path in ("/v1/sessions", "/v1/standbys"):
        return MAX_REGISTRATION
    return MAX_BOUNDARY if path.endswith("/boundary") else MAX_BODY


async def _body(receive: Receive, headers: Headers, limit: int) -> bytes | None:
    announced = headers.get("content-length")
    if announced is None and "transfer-encoding" not in headers:
        return None
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise _RefusedError(_too_large(limit))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _collect(receive, limit)
    except TimeoutError:
        detail = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise _RefusedError(problems.of_http(408, detail, Connection="close")) from None


async def _collect(receive: Receive, limit: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _RefusedError(problems.of_http(400, "the body ended too early", Connection="close"))
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise _RefusedError(_too_large(limit))
        if not message.get("more_body", False):
            return bytes(parts)


def _too_large(limit: int) -> Response:
    return problems.of_http(413, f"the body is longer than {limit} bytes", Connection="close")


def _replay(body: bytes, receive: Receive) -> Receive:
    first = True

    async def replayed() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
