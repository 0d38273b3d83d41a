"""`worldmove nodes`, `sessions`, `moves`, `watch`: what is where, and what is under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from worldmove import picture
from worldmove.cli import tables
from worldmove.cli.common import (
    DEFAULT_URL,
    Json,
    Limit,
    TlsCa,
    Token,
    Url,
    client_of,
    emit,
    reporting,
    stderr,
    stdout,
)
from worldmove.cli.moveplot import draw
from worldmove.client import Client
from worldmove.errors import DeadlineError, PeerError
from worldmove.views import MigrationPage, MigrationView, SessionPage, SessionView

PAGE = 500
DANGERS: dict[str, str] = {
    "keep": (
        "The world will be what this node holds, at a new epoch. If another node holds it too and its worker "
        "generates, there are two worlds of one name until that node is started again: make sure that it is "
        "stopped. Whatever was generated anywhere else is given up."
    ),
    "end": (
        "The session ends for good. If some node holds its memory after all, that world is ended there as "
        "soon as it looks: make sure that nobody needs it."
    ),
}
"""What `sessions resolve` may break, by decision."""

sessions_app = typer.Typer(
    help="List sessions, show or end one, or decide about a fenced one.", invoke_without_command=True
)
moves_app = typer.Typer(
    help="List moves, show one with its receipt, or cancel one.", invoke_without_command=True
)


def nodes(url: Url = DEFAULT_URL, token: Token = None, tls_ca: TlsCa = None, as_json: Json = False) -> None:
    """List the nodes of the fleet, as the ledger knows them."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        found = client.nodes()
    if as_json:
        emit({"nodes": found})
    else:
        stdout().print(tables.nodes(found))


def _pages(
    fetch: Callable[[str | None, int], SessionPage | MigrationPage], name: str, limit: int
) -> tuple[list[Any], str | None]:
    items: list[Any] = []
    after: str | None = None
    while True:
        page = fetch(after, min(PAGE, limit - len(items)))
        items += getattr(page, name)
        after = page.next
        if after is None or len(items) >= limit:
            return items, after


@sessions_app.callback()
def sessions(
    context: typer.Context,
    *,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the sessions of a node."""
    if context.invoked_subcommand is not None:
        return
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        found, following = _pages(client.sessions, "sessions", limit)
    if as_json:
        emit({"sessions": found, "next": following})
        return
    stdout().print(tables.sessions(found))
    _more(following)


@sessions_app.command("show")
def session(
    session_id: Annotated[str, typer.Argument(metavar="ID")],
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Show one session, also one that another node owns."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        found: SessionView = client.session(session_id)
    if as_json:
        emit(found)
    else:
        stdout().print(tables.sessions([found]))


@sessions_app.command("end")
def end_session(
    session_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on the terminal.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """End a session for good, on whichever node it is: its worker is told, its memory is freed."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        if not yes:
            found = client.session(session_id)
            stderr().print(tables.sessions([found]))
            typer.confirm(f"End {session_id} for good?", abort=True, err=True)
        client.end_session(session_id)
    if as_json:
        emit({"id": session_id, "ended": True})
    else:
        stdout().print(f"{session_id} has ended", markup=False)


@sessions_app.command("resolve")
def resolve(
    session_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    keep: Annotated[bool, typer.Option("--keep", help="The world is what this node's host holds.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Nobody holds the world any more: end it.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes-i-know", help="The dangers are known: do not ask on the terminal.")
    ] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Break-glass: decide about a session that stays fenced, or whose node is gone for good."""
    if keep == end:
        raise typer.BadParameter("exactly one of --keep and --end is needed")
    decision: Literal["keep", "end"] = "keep" if keep else "end"
    if not yes:
        stderr().print(f"{DANGERS[decision]}\n", markup=False, soft_wrap=True)
        if typer.prompt(f"Type the session's id to {decision} it", err=True) != session_id:
            raise typer.Abort
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        found = client.resolve_session(session_id, decision)
    if as_json:
        emit(found)
    elif found.session is not None:
        stdout().print(tables.sessions([found.session]))
    else:
        stdout().print(f"{session_id} has ended", markup=False)


@moves_app.callback()
def moves(
    context: typer.Context,
    *,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the moves that a node knows, newest first."""
    if context.invoked_subcommand is not None:
        return
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        found, following = _pages(client.migrations, "migrations", limit)
    if as_json:
        emit({"migrations": found, "next": following})
        return
    console = stdout()
    console.print(tables.moves(found, console.width))
    _more(following)


@moves_app.command("show")
def show_move(
    migration_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            metavar="FILE",
            help="Draw it, once it has ended, into this PNG; needs worldmove[plot].",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Show one move and its receipt."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        if plot is not None:
            picture.check(plot)
        found = client.migration(migration_id)
        if plot is not None:
            picture.save(draw(found), plot)
        _show(found, as_json)


@moves_app.command("cancel")
def cancel_move(
    migration_id: Annotated[str, typer.Argument(metavar="ID")],
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Cancel a move: it aborts to its source, unless it was committed already."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        _show(client.cancel(migration_id), as_json)


def _show(view: MigrationView, as_json: bool) -> None:
    if as_json:
        emit(view)
    else:
        stdout().print(tables.move(view))


def _more(following: str | None) -> None:
    if following is not None:
        stdout().print("… and more: see --limit", style="dim")


def watch(
    url: Url = DEFAULT_URL,
    token: Token = None,
    tls_ca: TlsCa = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Watch a node, its sessions and moves until Ctrl-C; with --json one look as a document."""
    with reporting(as_json), client_of(url, token, tls_ca) as client:
        if as_json:
            emit(_look(client))
            return
        console = stdout()
        screen = Live(_screen(_look(client), console.width), console=console, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), screen as live:
            while True:
                time.sleep(interval)
                live.update(_again(client, console.width), refresh=True)


def _look(client: Client) -> dict[str, Any]:
    return {
        "node": client.node(),
        "nodes": client.nodes(),
        "sessions": client.sessions(limit=20).sessions,
        "migrations": client.migrations(limit=10).migrations,
    }


def _again(client: Client, width: int) -> Group | Text:
    try:
        return _screen(_look(client), width)
    except (PeerError, DeadlineError) as error:
        return Text(f"{error.message}; trying again", style="red")


def _screen(look: dict[str, Any], width: int) -> Group:
    return Group(
        tables.node(look["node"]),
        "",
        tables.nodes(look["nodes"]),
        "",
        tables.sessions(look["sessions"]),
        "",
        tables.moves(look["migrations"], width),
    )
