"""Structured logs on stderr: JSON lines or a console form, and never a secret."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

from worldmove.options import LogFormat, LogLevel

SECRET_KEYS = frozenset({"authorization", "password", "secret", "ticket", "tickets", "token", "tokens"})


def hide_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces values whose key says that they are secret, whatever they are."""
    for key in event:
        if key.lower() in SECRET_KEYS:
            event[key] = "[hidden]"
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
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(default=str)]
        if form == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
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
