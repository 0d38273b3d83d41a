"""The shape of the code: which way imports point, how long files are, what is documented."""

from __future__ import annotations

import json
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from structure_kit import (
    ORDER,
    ROOT,
    functions,
    imported_modules,
    imports,
    internal_modules,
    module_name,
    part,
    sources,
    texts,
    undocumented,
)

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
CODE = [*sources("worldmove"), *sources("api")]
ALL_CODE = [*CODE, *sources("tests"), *sources("tools")]

PURE = (
    "machine",
    "messages",
    "protocol",
    "rounds",
    "rules",
    "delta",
    "rates",
    "dirtying",
    "rests",
    "admission",
    "promises",
    "granting",
    "manifest",
    "errors",
    "views",
)
SIDE_EFFECTS = {
    "asyncio",
    "time",
    "socket",
    "threading",
    "random",
    "secrets",
    "subprocess",
    "sqlite3",
    "httpx",
}

PACKAGE_MAY_EXPORT = {"errors", "manifest", "worker", "sdk"}

SDK = ("worker", "sdk", "page", "torch")
SDK_MAY_IMPORT = {
    "errors",
    "manifest",
    "fingerprint",
    "views",
    "ipc",
    "mapping",
    "cuda",
    "memory",
    "tls",
    "dialing",
    *SDK,
}

# Only these files may know the package: everything else goes through their seam.
SEAMS = {
    "ucxx": ("worldmove/transport/ucx.py",),
    "sqlite3": ("worldmove/ledger/sqlite",),
    "torch": ("worldmove/torch/", "worldmove/demo/video/"),
}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

MACHINE_PATH = re.compile(r"/(?:wor[k]/|roo[t]/|hom[e]/(?!worldmove\b)\w|User[s]/\w|tm[p]/x\b)")


def by_name(path: Path) -> str:
    return str(path)


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", CODE, ids=by_name)
def test_imports_point_downwards(path: Path) -> None:
    inside = {name for name in imports(path) if name.split(".")[0] in ("worldmove", "api")}
    if path.parts[0] == "api":
        return
    assert not {name for name in inside if name.split(".")[0] == "api"}, "worldmove/ may not import api/"
    mine = part(module_name(path))
    if mine is None:
        assert {part(name) for name in inside} <= PACKAGE_MAY_EXPORT | {None}
        return
    assert mine in ORDER, f"{mine} has no place in structure_kit.ORDER yet"
    above = {
        name
        for name in inside
        if (other := part(name)) in ORDER and ORDER.index(str(other)) > ORDER.index(mine)
    }
    assert not above, f"{path} imports what stands above {mine}: {sorted(above)}"


def test_no_import_goes_round_in_a_circle() -> None:
    modules = internal_modules()
    graph = {name: imported_modules(path, set(modules)) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go round: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", sorted(SEAMS))
def test_foreign_packages_stay_behind_their_seam(package: str) -> None:
    users = {str(path) for path in CODE if package in top_level(path)}
    assert not {user for user in users if not user.startswith(SEAMS[package])}


@pytest.mark.parametrize("path", ALL_CODE, ids=by_name)
def test_nothing_is_pickled(path: Path) -> None:
    assert not top_level(path) & FORBIDDEN


@pytest.mark.parametrize("path", [p for p in CODE if part(module_name(p)) in PURE], ids=by_name)
def test_decisions_have_no_clock_and_no_io(path: Path) -> None:
    assert not top_level(path) & SIDE_EFFECTS


@pytest.mark.parametrize("path", [p for p in CODE if part(module_name(p)) in SDK], ids=by_name)
def test_the_sdk_is_thin(path: Path) -> None:
    """It runs in the serving stack's process: no server, no UCX, no event loop of ours."""
    assert {part(name) for name in imports(path) if name.startswith("worldmove.")} <= SDK_MAY_IMPORT
    assert not top_level(path) & {"fastapi", "uvicorn", "uvloop", "ucxx", "structlog", "rich", "typer"}


@pytest.mark.parametrize("path", ALL_CODE, ids=by_name)
def test_files_are_short(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines; at most {MAX_LINES} are allowed"


@pytest.mark.parametrize("path", ALL_CODE, ids=by_name)
def test_functions_are_short(path: Path) -> None:
    """From `def` to the last line, docstring included."""
    long = {name: lines for name, lines in functions(path) if lines > MAX_FUNCTION_LINES}
    assert not long, f"at most {MAX_FUNCTION_LINES} lines are allowed"


@pytest.mark.parametrize("path", CODE, ids=by_name)
def test_public_names_have_docstrings(path: Path) -> None:
    assert not undocumented(path)


def test_no_file_names_a_machine() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pattern = re.compile(r"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.+!]+)")
    matches = [pattern.fullmatch(line) for line in lines]
    assert all(matches), "constraints.txt holds name==version and nothing else"
    return {match[1]: match[2] for match in matches if match}


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["host"], *extras["cu13"], *extras["dev"]]
    names = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in wanted}
    missing = names - pins().keys()
    assert not missing, f"`make pins` pins them: {sorted(missing)}"


def test_files_that_are_known_to_take_long_exist() -> None:
    names = json.loads((ROOT / "tests" / "data" / "seconds.json").read_text())
    assert names.keys() <= {path.stem for path in sources("tests")}
