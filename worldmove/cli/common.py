"""What the commands share: options of every client, output, errors and exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from worldmove.cli.tables import readable
from worldmove.client import Client
from worldmove.errors import (
    ConfigError,
    DeadlineError,
    PeerError,
    ValidationError,
    WorldMoveError,
)

EXIT_FAILED = 1
"""What was asked does not hold: refused, aborted, not found."""
EXIT_USAGE = 2
"""The command line or an option is wrong."""
EXIT_UNREACHABLE = 3
"""The node can't be reached or does not answer in time."""
DEFAULT_URL = "http://127.0.0.1:8001"

Url = Annotated[str, typer.Option("--url", envvar="WORLDMOVE_URL", help="Any node of the fleet.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="WORLDMOVE_TOKEN",
        show_default=False,
        help="Bearer token. Better in the environment: a command line is seen by everybody on the host.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="WORLDMOVE_TLS_CA",
        show_default=False,
        help="PEM file of the authorities that are trusted with an https node. Default: the system's.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of a table.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Most entries shown.")]


def stdout() -> Console:
    """Where results go; wide enough to keep one row on one line when nobody looks."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def stderr() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True)


def emit(document: Any) -> None:
    """Writes one JSON document to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
    sys.stdout.flush()


def exit_code(error: WorldMoveError) -> int:
    """The exit code of an error."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, PeerError | DeadlineError) and "status" not in error.details:
        return EXIT_UNREACHABLE
    return EXIT_FAILED


@contextlib.contextmanager
def reporting(as_json: bool = False) -> Iterator[None]:
    """Turns our errors into a message (or document) and an exit code."""
    try:
        yield
    except WorldMoveError as error:
        report(error, as_json)
        raise typer.Exit(exit_code(error)) from error


def report(error: WorldMoveError, as_json: bool) -> None:
    """Shows an error: on stderr for people, as a document on stdout for programs."""
    code = str(error.details.get("code", error.code))
    facts = {name: value for name, value in error.details.items() if name != "code"}
    if as_json:
        emit({"error": msgspec.to_builtins({"code": code, "message": error.message} | facts, enc_hook=str)})
        return
    console = stderr()
    message = f"error: {error.message} ({code})"
    console.print(readable(message), markup=False, highlight=False, soft_wrap=True, style="red")
    if not isinstance(error, ConfigError | ValidationError):
        for name in sorted(facts.keys() - {"status", "url"}):
            fact = readable(f"  {name}: {facts[name]}")
            console.print(fact, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def client_of(url: str, token: str | None, tls_ca: Path | None) -> Iterator[Client]:
    """A client that is closed afterwards.

    Raises:
        ConfigError: `tls_ca` can't be used.
    """
    with Client(url, token, tls_ca=tls_ca) as client:
        yield client
