"""The commands, put together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from worldmove.cli.fleet import moves_app, nodes, sessions_app, watch
from worldmove.cli.move import move
from worldmove.cli.serve import serve
from worldmove.cli.tools import bench_app, demo, doctor, simulate, soak

app = typer.Typer(
    name="worldmove",
    help="Moves a live session from one device to another while it generates: bit-identical, or not at all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"auto_envvar_prefix": "WORLDMOVE"},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("worldmove"))
        raise typer.Exit


@app.callback()
def _top(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            allow_from_autoenv=False,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    pass


app.command()(serve)
app.command()(demo)
app.command()(soak)
app.command()(nodes)
app.add_typer(sessions_app, name="sessions")
app.add_typer(moves_app, name="moves")
app.command()(move)
app.command()(watch)
app.add_typer(bench_app, name="bench")
app.command()(simulate)
app.command()(doctor)
