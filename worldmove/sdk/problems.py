"""Errors by their code, as they come over the Unix socket and over REST."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from worldmove.errors import WorldMoveError


def _classes(base: type[WorldMoveError]) -> Iterator[type[WorldMoveError]]:
    yield base
    for each in base.__subclasses__():
        yield from _classes(each)


def error_of(code: str, message: str, details: Mapping[str, Any] | None = None) -> WorldMoveError:
    """The error with this code; an unknown code gives the base class, with the code in its details."""
    facts = {str(key): value for key, value in (details or {}).items() if key not in ("message", "self")}
    for kind in _classes(WorldMoveError):
        if kind.code == code:
            return kind(message, **facts)
    return WorldMoveError(message, **{**facts, "code": code})
