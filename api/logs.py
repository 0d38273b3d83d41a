"""Structured logs on stderr: JSON lines or a console form, and never a secret.

Tracebacks have no values of local variables: tokens are among them. Bearer tokens in a text, such as a
header that a library quotes, are cut out.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

from worldmove.options import LogFormat, LogLevel

SECRET_KEYS = frozenset({"authorization", "password", "secret", "ticket", "tickets", "token", "tokens"})


HIDDEN = "[hidden]"
_BEARER = re.compile(r"(?i)(bearer\s+)[!-~]+")
_MAX_DEPTH = 8


def hide_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces values whose key says that they are secret, at any depth, and bearer tokens in texts."""
    for key, value in event.items():
        event[key] = _hidden(key, value, 0)
    return event


def _hidden(key: object, value: Any, depth: int) -> Any:
    if isinstance(key, str) and key.lower() in SECRET_KEYS:
        return HIDDEN
    if isinstance(value, str):
        return _BEARER.sub(rf"\1{HIDDEN}", value)
    if depth < _MAX_DEPTH and isinstance(value, dict):
        return {name: _hidden(name, inner, depth + 1) for name, inner in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [_hidden(None, inner, depth + 1) for inner in value]
    return value


def hide_controls(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces control characters in texts: a name from outside must not write to the reader's terminal."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(one if one.isprintable() else repr(one)[1:-1] for one in value)
    return event


def configure(level: LogLevel, form: LogFormat) -> None:
    """Sends everything logged in this process, also by the web server, through one set of processors."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    last: list[Processor] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            hide_secrets,
            structlog.processors.JSONRenderer(default=str),
        ]
        if form == "json"
        else [
            hide_controls,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # The web server tells of every connection and start; the node's own lines say it better.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    # At the level `debug` these libraries quote whole requests, headers and all.
    for name in ("websockets", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
