"""What comes back: views from JSON, our errors from problems, events from a stream of lines."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import httpx
import msgspec

from worldmove.client.calls import Call, Nothing
from worldmove.errors import (
    DeadlineError,
    FramingError,
    NotOwnerError,
    PeerError,
    WorldMoveError,
)

T = TypeVar("T")
MAX_EVENT = 4 * 1024 * 1024
_STANDARD = frozenset({"type", "title", "detail", "code"})


def _codes(base: type[WorldMoveError]) -> dict[str, type[WorldMoveError]]:
    found = {base.code: base}
    for kind in base.__subclasses__():
        found |= _codes(kind)
    return found


def error_of(status: int, content: bytes) -> WorldMoveError:
    """The error that a problem stands for; `details` holds its other members and `status`.

    A code without a class of its own is kept as `details["code"]`.
    """
    try:
        problem: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        return PeerError(f"HTTP status {status} without a problem", status=status)
    kind = _codes(WorldMoveError).get(problem["code"])
    error = (kind or WorldMoveError)(str(problem.get("detail", problem["code"])))
    error.details = {name: value for name, value in problem.items() if name not in _STANDARD}
    error.details.setdefault("status", status)
    if kind is None:
        error.details["code"] = problem["code"]
    return error


def view_of(call: Call[T], response: httpx.Response) -> T:
    """The answer of a call.

    Raises:
        WorldMoveError: the class that the problem's code names.
        PeerError: the answer is no problem and has another form than it must.
    """
    if not response.is_success:
        raise error_of(response.status_code, response.content)
    if call.answer is Nothing:
        return cast("T", Nothing())
    try:
        return msgspec.json.decode(response.content, type=call.answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"{call.method} {call.path}: the answer has another form: {error}") from error


def owner_of(error: NotOwnerError, tried: set[str], base: str) -> str | None:
    """Where to ask instead, unless it was asked already or is no address.

    From a node that `base` reaches by TLS nothing leads to one without: the token would travel in clear.
    """
    url = error.details.get("owner_url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return None
    if base.startswith("https:") and not url.startswith("https:"):
        return None
    url = url.rstrip("/")
    return None if url in tried else url


def unreachable(url: str, error: httpx.HTTPError | httpx.InvalidURL) -> WorldMoveError:
    """One of our errors for a request that got no answer."""
    if isinstance(error, httpx.TimeoutException):
        return DeadlineError(f"{url} did not answer in time")
    return PeerError(f"{url} can't be reached: {error or type(error).__name__}", url=url)


class Event(NamedTuple):
    """One server-sent event."""

    type: str
    data: str
    id: str | None


class EventReader:
    """Puts events together from lines, as the HTML standard (server-sent events) tells."""

    def __init__(self) -> None:
        self._type = ""
        self._data: list[str] = []
        self._size = 0
        self._id: str | None = None

    def feed(self, line: str) -> Event | None:
        """Takes one line without its end; an empty one ends an event.

        Raises:
            FramingError: the event grows beyond `MAX_EVENT`.
        """
        if not line:
            return self._finish()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._size += len(value)
            if self._size > MAX_EVENT:
                raise FramingError(f"an event is longer than {MAX_EVENT} characters")
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _finish(self) -> Event | None:
        event = Event(self._type or "message", "\n".join(self._data), self._id) if self._data else None
        self._type, self._data, self._size = "", [], 0
        return event


def event_view(event: Event, kind: type[T]) -> T:
    """The view that an event carries.

    Raises:
        WorldMoveError: the event is a problem, with which a stream ends that can't go on.
        PeerError: it has another form.
    """
    content = event.data.encode("utf-8", "replace")
    if event.type == "problem":
        raise error_of(200, content)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(f"event {event.type!r} has another form: {error}") from error
