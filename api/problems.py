"""Errors as RFC 9457 `application/problem+json`, mapped by class in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from worldmove import errors
from worldmove.errors import WorldMoveError
from worldmove.shortage import shortage

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:worldmove:problem:"
STATUS: dict[type[WorldMoveError], int] = {
    WorldMoveError: 500,
    errors.ValidationError: 422,
    errors.NotFoundError: 404,
    errors.UnauthorizedError: 401,
    errors.ForbiddenError: 403,
    errors.ConflictError: 409,
    errors.IdempotencyMismatchError: 422,
    errors.RejectedError: 429,
    errors.TransportError: 502,
    errors.PeerError: 502,
    errors.DeviceError: 503,
    errors.DeadlineError: 504,
    errors.ProcessLostError: 503,
    errors.LedgerError: 503,
    errors.MoveAbortedError: 409,
}
"""Status of a class and of its subclasses that have no row of their own."""

# Codes of what HTTP itself refuses; everything else takes its code from the error's class.
_HTTP_CODES = {
    400: "bad-request",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "timeout",
    413: "too-large",
    415: "media-type",
    421: "misdirected",
    431: "too-large",
}
_STANDARD = frozenset({"type", "title", "status", "detail", "instance", "code"})
_DEFAULT_RETRY_MS = 1000.0

log = structlog.get_logger("worldmove.http")


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9457 problem. `code` is stable; further members hold the error's facts."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def status_of(error: type[WorldMoveError]) -> int:
    """The HTTP status of an error class: its own row or that of its nearest base."""
    return next(STATUS[base] for base in error.__mro__ if base in STATUS)


def response(
    status: int, code: str, detail: str, details: Mapping[str, Any] | None = None, **headers: str
) -> Response:
    """One problem as a response; members of `details` never replace the standard ones."""
    body: dict[str, Any] = {name: value for name, value in (details or {}).items() if name not in _STANDARD}
    body |= {
        "type": TYPE_PREFIX + code,
        "title": phrase(status),
        "status": status,
        "detail": detail,
        "code": code,
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(msgspec.json.encode(body, enc_hook=str), status, named, MEDIA_TYPE)


def of_error(error: WorldMoveError) -> Response:
    """The problem of one of our errors, with `Retry-After` on a rejection."""
    status = status_of(type(error))
    headers: dict[str, str] = {}
    if status == 429:
        wait = error.details.get("retry_after_ms", _DEFAULT_RETRY_MS)
        headers["Retry_After"] = str(max(1, math.ceil(float(wait) / 1000)))
    if status == 401:
        headers["WWW_Authenticate"] = "Bearer"
    return response(status, error.code, error.message, error.details, **headers)


def phrase(status: int) -> str:
    """The standard phrase of a status."""
    return HTTPStatus(status).phrase


def of_http(status: int, detail: str, **headers: str) -> Response:
    """The problem of something that HTTP itself refuses; what can't be read is the body."""
    facts = {"field": "body"} if status in (400, 413) else None
    return response(status, _HTTP_CODES.get(status, "http"), detail, facts, **headers)


def of_validation(failures: Sequence[Mapping[str, Any]]) -> Response:
    """The problem of a malformed request: the first field by name, all of them in `fields`.

    The values are not repeated: they may be secret, huge, or no valid text at all.
    """
    named = [{"field": _field(failure), "reason": str(failure["msg"])} for failure in failures[:16]]
    first = named[0] if named else {"field": "body", "reason": "is malformed"}
    return response(
        422,
        errors.ValidationError.code,
        f"{first['field']}: {first['reason']}",
        {"field": first["field"], "fields": named},
    )


def _field(failure: Mapping[str, Any]) -> str:
    location: Sequence[str | int] = failure["loc"]
    if failure["type"] == "json_invalid":
        # What follows is where in the text it broke off, and no field.
        return "body"
    parts = location[1:] if location and location[0] == "body" and len(location) > 1 else location
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    # A key of the body can be part of the path, and may be no valid text.
    return text.encode("utf-8", "replace").decode()[:256] or "body"


def install(app: FastAPI) -> None:
    """Makes every error of the app a problem."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, WorldMoveError)  # noqa: S101 - registered for this class only
        if status_of(type(error)) >= 500:
            log.warning("request failed", code=error.code, detail=error.message)
        return of_error(error)

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        return of_validation(error.errors())

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        headers = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
        return of_http(error.status_code, str(error.detail), **headers)

    async def system(_: Request, error: Exception) -> Response:
        # Descriptors can run out anywhere, also in a library; nothing is wrong with the request.
        short = shortage("the request", 0, error) if isinstance(error, OSError) else None
        if short is None:
            raise error
        log.warning("request failed", code=short.code, detail=short.message)
        return of_error(short)

    async def unknown(_: Request, error: Exception) -> Response:
        # The server logs the traceback; what it says is not for strangers.
        log.error("request failed", code=WorldMoveError.code, kind=type(error).__name__)
        return response(500, WorldMoveError.code, "an unexpected error; the node's log has it")

    app.add_exception_handler(WorldMoveError, ours)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(OSError, system)
    app.add_exception_handler(Exception, unknown)


def documented(*kinds: type[WorldMoveError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` for the errors that a route can answer with, codes by status."""
    codes: dict[int, list[str]] = {}
    for kind in kinds:
        codes.setdefault(status_of(kind), []).append(kind.code)
    reference = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {
            "description": "Problem: " + ", ".join(f"`{code}`" for code in names),
            "content": {MEDIA_TYPE: reference},
        }
        for status, names in codes.items()
    }


def unready() -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` for a node that can't accept moves yet."""
    reference = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {503: {"description": "Problem: `not-ready`", "content": {MEDIA_TYPE: reference}}}
