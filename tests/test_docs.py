"""The documentation names everything that there is: routes, problems, options, commands, metrics, modules."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
import typer
from fastapi.routing import APIRoute
from structure_kit import ORDER, ROOT

from api.app import create_app
from api.facade import NodeFacade
from api.problems import status_of
from worldmove.cli.commands import app as cli
from worldmove.config import load
from worldmove.errors import WorldMoveError
from worldmove.node.metrics import Metrics
from worldmove.options import OPTIONS, Option

DOCS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text()


def routes() -> list[str]:
    node = SimpleNamespace(settings=load({"name": "A"}, environ={"HOME": "/nowhere"}))
    app = create_app(cast("NodeFacade", node))
    found = []
    for path, calls in app.openapi()["paths"].items():
        found += [f"{method.upper()} {path}" for method in calls]
    hidden = {
        route.path for route in app.routes if isinstance(route, APIRoute) and not route.include_in_schema
    }
    assert not hidden, f"routes that the OpenAPI document leaves out: {hidden}"
    return sorted(found)


def errors(base: type[WorldMoveError] = WorldMoveError) -> Iterator[type[WorldMoveError]]:
    yield base
    for kind in base.__subclasses__():
        yield from errors(kind)


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    inner = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield name, command
    for key, child in inner.items():
        yield from commands(child, f"{name} {key}")


COMMANDS = dict(commands(cast("click.Command", typer.main.get_command(cli)), "worldmove"))


def metrics() -> list[str]:
    """Names of all metrics, as they stand in the exposition."""
    families = Metrics().registry.collect()
    return sorted(family.name + ("_total" if family.type == "counter" else "") for family in families)


@pytest.mark.parametrize("route", routes())
def test_routes_are_documented(route: str) -> None:
    assert f"`{route}`" in text("docs/api.md")


@pytest.mark.parametrize(
    "kind", sorted(set(errors()), key=lambda kind: kind.code), ids=lambda kind: kind.code
)
def test_problems_are_documented(kind: type[WorldMoveError]) -> None:
    if kind.code in ("config", "rejected", "protocol", "session-ended"):
        return  # never an answer: the start fails; a base class; a defect, answered as `internal`; the SDK's
    rows = [line for line in text("docs/api.md").splitlines() if line.startswith(f"| {status_of(kind)} ")]
    assert any(f"`{kind.code}`" in row for row in rows), f"{status_of(kind)} {kind.code}"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_options_are_documented(option: Option) -> None:
    row = next(
        line for line in text("docs/options.md").splitlines() if line.startswith(f"| `{option.flag}` ")
    )
    assert f"`{option.env}`" in row
    assert option.allowed in row
    assert f"- **{option.name}**: " in text("docs/options.md")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_and_their_options_are_documented(name: str) -> None:
    document = text("docs/options.md")
    row = next(line for line in document.splitlines() if line.startswith(f"| `{name}`"))
    options = [flag for item in COMMANDS[name].params for flag in item.opts if flag.startswith("--")]
    shared = ("--url", "--token", "--tls-ca", "--json")
    searched = document if name == "worldmove serve" else row
    missing = [flag for flag in options if flag not in shared and f"`{flag}" not in searched]
    assert not missing


def test_there_are_metrics() -> None:
    assert metrics()


@pytest.mark.parametrize("name", metrics())
def test_metrics_are_documented(name: str) -> None:
    assert f"`{name}`" in text("docs/metrics.md")


def test_the_tree_is_up_to_date() -> None:
    """docs/modules.md has a line for every module, with the first sentence of its docstring."""
    answer = subprocess.run([sys.executable, "tools/tree.py", "--check"], cwd=ROOT, check=False)
    assert answer.returncode == 0, "`make tree` renews it"


def test_the_order_of_the_layers_is_written_down() -> None:
    words = re.findall(r"`(\w+)`", text("docs/structure.md").partition("## Layers")[2])
    there = {
        name
        for name in ORDER
        if (ROOT / "worldmove" / name).is_dir() or (ROOT / f"worldmove/{name}.py").exists()
    }
    assert [word for word in words if word in there] == [name for name in ORDER if name in there]


@pytest.mark.parametrize("path", DOCS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall((ROOT / path).read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (ROOT / path).parent / file if file else ROOT / path
        assert found.exists(), f"{path} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{path} links to {target}"


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_make_targets_are_those_that_the_readme_names() -> None:
    targets: set[Any] = set(re.findall(r"^([a-z]+):", text("Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", text("README.md") + text("CONTRIBUTING.md")))
    assert named <= targets


def test_the_tree_of_the_readme_names_every_part() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].partition("\n## ")[0]
    rows = re.findall(r"^ {8}(\S+(?: \S+)*)", tree, re.MULTILINE)
    named = {name.strip("/") for row in rows for name in row.split()}
    assert not set(ORDER) - {"__main__"} - named, "README.md lacks them"
    assert not {name for name in named if not list((ROOT / "worldmove").glob(f"{name}*"))}, "are not there"
