"""`worldmove move`: asks for a move, says whether it would be taken, or follows it to its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from worldmove.cli import tables
from worldmove.cli.common import (
    DEFAULT_URL,
    EXIT_FAILED,
    Json,
    TlsCa,
    Token,
    Url,
    client_of,
    emit,
    reporting,
    stderr,
    stdout,
)
from worldmove.client import Client
from worldmove.errors import ConfigError, ConnectionLostError
from worldmove.views import ENDED_STATES, DryRun, MigrationRequest, MigrationView, PathChoice


class Path(StrEnum):
    """How bytes travel."""

    auto = "auto"
    local = "local"
    direct = "direct"
    staged = "staged"


def move(
    session: Annotated[str, typer.Argument(help="Id of the session.")],
    *,
    to: Annotated[str, typer.Option("--to", metavar="NODE", help="Name of the node it goes to.")],
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="SRC=DST", help="A GPU of the source and its new one: UUIDs or numbers."),
    ] = None,
    horizon_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Longest pause; the session's own by default.")
    ] = None,
    deadline_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Time for the whole move; the node's own by default.")
    ] = None,
    live: Annotated[bool, typer.Option(help="Copy while the world generates.")] = True,
    path: Annotated[Path | None, typer.Option(help="How bytes travel; the node's own by default.")] = None,
    allow_unattended: Annotated[bool, typer.Option(help="Move a session that has no worker.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key again gives the same move.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say whether it would be taken on.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended; 0 only if it went.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Move a session to another node."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        chosen: PathChoice | None = None if path is None else path.value
        request = MigrationRequest(
            session_id=session,
            destination=to,
            devices=_devices(device or []),
            horizon_ms=horizon_ms,
            deadline_ms=deadline_ms,
            live=live,
            path=chosen,
            allow_unattended=allow_unattended,
        )
        if dry_run:
            _verdict(client.dry_run(request), as_json)
            return
        view = client.migrate(request, idempotency_key)
        if wait and view.state not in ENDED_STATES:
            view = follow(client, view)
    if as_json:
        emit(view)
    else:
        stdout().print(tables.move(view))
    if view.state in ("rejected", "aborted"):
        raise typer.Exit(EXIT_FAILED)


def _devices(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        source, equals, destination = pair.partition("=")
        if not (source and equals and destination):
            raise ConfigError(f"device is {pair!r}; allowed: SRC=DST", option="device", value=pair)
        found[source] = destination
    return found


def _verdict(verdict: DryRun, as_json: bool) -> None:
    if as_json:
        emit(verdict)
    else:
        console = stdout()
        refused = f"would be refused: {verdict.reason} ({verdict.code})"
        said = "would be taken on" if verdict.admissible else refused
        console.print(tables.readable(said), markup=False)
        console.print(tables.verdict(verdict))
        if verdict.provisional:
            console.print("provisional: what is not known is measured before the world stops, and decides")
        if verdict.unmeasured:
            names = tables.readable(", ".join(verdict.unmeasured))
            console.print(f"not measured yet: {names}", markup=False)
        if verdict.retry_after_ms is not None:
            console.print(f"there should be room in {verdict.retry_after_ms / 1000:.1f} s")
    if not verdict.admissible:
        raise typer.Exit(EXIT_FAILED)


def follow(client: Client, view: MigrationView) -> MigrationView:
    """Shows a move's progress on stderr until it has ended, and returns its last view.

    Ctrl-C ends the watching, not the move.

    Raises:
        ConnectionLostError: the node went away before.
    """
    try:
        return _follow(client, view)
    except KeyboardInterrupt:
        stderr().print(f"move {view.id} goes on: worldmove moves show {view.id}", markup=False)
        raise


def _follow(client: Client, view: MigrationView) -> MigrationView:
    with _progress() as progress:
        task = progress.add_task(view.state, total=max(view.state_bytes, 1))
        for current in client.migration_events(view.id):
            # Live rounds send some bytes again, so what was sent may exceed the state.
            progress.update(
                task,
                description=f"{current.state}, round {current.round}",
                completed=current.sent_bytes,
                total=max(current.state_bytes, current.sent_bytes, 1),
            )
            if current.state in ENDED_STATES:
                return current
    raise ConnectionLostError(f"the events of move {view.id} stopped before it ended")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr(), disable=not sys.stderr.isatty(), transient=True) as progress:
        yield progress
