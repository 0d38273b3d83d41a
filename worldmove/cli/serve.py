"""`worldmove serve`: runs a node. Its options are made from the one table in `worldmove.options`."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from worldmove.cli.common import reporting
from worldmove.cli.signals import at_once
from worldmove.config import load
from worldmove.errors import ConfigError
from worldmove.options import OPTIONS, Option

SERVER_GROUP = "worldmove.server"


def _annotation(option: Option) -> Any:
    # The environment is read by `config.load`, so that an error can say where a value came from.
    shown = f"{option.help} Allowed: {option.allowed}. Environment: {option.env}."
    declared = typer.Option(
        option.flag,
        metavar="VALUE",
        help=shown.replace("[", r"\["),
        show_default=False,
        allow_from_autoenv=False,
    )
    return Annotated[str | None, declared]


def _config_annotation() -> Any:
    return Annotated[
        Path | None,
        typer.Option(
            "--config", envvar="WORLDMOVE_CONFIG", show_default=False, help="TOML file of options by name."
        ),
    ]


def _ready_annotation() -> Any:
    return Annotated[
        int | None,
        typer.Option(
            "--ready-fd",
            min=0,
            show_default=False,
            help="Descriptor to which the node's URL is written once it answers.",
        ),
    ]


def serve(**given: Any) -> None:
    """Run a node until SIGTERM or Ctrl-C; moves under way are finished or rolled back first."""
    file, ready_fd = given.pop("config"), given.pop("ready_fd")
    with reporting():
        settings = load(given, file=file)
        servers = {found.name: found for found in entry_points(group=SERVER_GROUP)}
        if "http" not in servers:
            raise ConfigError(f"no server is installed: the entry point {SERVER_GROUP}/http is missing")
        with at_once():
            run = servers["http"].load()
        code: int = run(settings, ready_fd=ready_fd)
    raise typer.Exit(code)


def _signature() -> inspect.Signature:
    kinds = {option.name: _annotation(option) for option in OPTIONS}
    kinds |= {"config": _config_annotation(), "ready_fd": _ready_annotation()}
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in kinds.items()
        ]
    )


# Typer reads a command's options from its signature.
serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: p.annotation for name, p in _signature().parameters.items()}
