"""Reads the project's own sources: files, imports, public names. Used by test_structure and test_docs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ORDER = (
    "errors",
    "quantities",
    "options",
    "config",
    "manifest",
    "placement",
    "cuda",
    "fingerprint",
    "views",
    "shortage",
    "ipc",
    "sealing",
    "listening",
    "mapping",
    "tasks",
    "kernels",
    "digest",
    "delta",
    "tokens",
    "tls",
    "dialing",
    "messages",
    "protocol",
    "rounds",
    "rules",
    "machine",
    "rates",
    "dirtying",
    "rests",
    "admission",
    "promises",
    "granting",
    "gate",
    "outlet",
    "pacing",
    "ledger",
    "memory",
    "executor",
    "transport",
    "page",
    "sdk",
    "worker",
    "torch",
    "hosting",
    "descriptors",
    "scratches",
    "reading",
    "hashing",
    "counting",
    "arming",
    "rearranging",
    "rings",
    "gated",
    "staging",
    "offering",
    "paths",
    "directing",
    "reaching",
    "bringing",
    "inbound",
    "feed",
    "sessions",
    "probing",
    "intake",
    "arrival",
    "driver",
    "opening",
    "timeline",
    "receipts",
    "readiness",
    "adoption",
    "outbound",
    "source",
    "destination",
    "faults",
    "node",
    "client",
    "doctor",
    "bench",
    "demo",
    "soak",
    "picture",
    "simulate",
    "cli",
    "__main__",
)
"""The parts of `worldmove/`, lowest first: a part imports only parts that stand before it."""


def sources(folder: str) -> list[Path]:
    """Every Python file below `folder`, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed source."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in the parsed source: many rules look through all of it."""
    return tuple(ast.walk(tree(path)))


def module_name(path: Path) -> str:
    """`worldmove/ledger/sqlite.py` is `worldmove.ledger.sqlite`; a package stands for its `__init__`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(path: Path) -> list[tuple[str, int]]:
    """Every function and method of a file with its number of lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in nodes(path) if isinstance(node, kinds)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that the file names in an import, wherever in it, as absolute dotted names."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}:{node.lineno}: a relative import")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return frozenset(found)


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Those of the `known` modules that the file imports; a package only where its own names are meant."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= known else inner | {str(node.module)}
    return found & known


def internal_modules() -> dict[str, Path]:
    """Dotted name to file of everything in `worldmove` and `api`."""
    return {module_name(path): path for folder in ("worldmove", "api") for path in sources(folder)}


def part(module: str) -> str | None:
    """`worldmove.ledger.sqlite` belongs to `ledger`; the package itself and foreign modules to nothing."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "worldmove" and len(pieces) > 1 else None


def undocumented(path: Path) -> list[str]:
    """Public modules, classes, functions and methods of a file that have no docstring."""
    missing = [] if ast.get_docstring(tree(path)) else [f"{path}: module"]
    if path.name == "__init__.py" and not (ROOT / path).read_text().strip():
        return []

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_") or _overload(child):
                continue
            if not ast.get_docstring(child):
                missing.append(f"{path}:{child.lineno}: {prefix}{child.name}")
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(tree(path), "")
    return missing


def _overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return bool(names & {"overload", "override", "setter"})


def texts() -> list[Path]:
    """Every text file that belongs to the project, relative to the root."""
    folders = ("worldmove", "api", "tests", "tools", "docs", "deploy", ".ci")
    suffixes = {".py", ".md", ".toml", ".sh", ".txt", ".json", ".jsonl", ".h", ".c", ".yaml", ".yml", ""}
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    return sorted(path.relative_to(ROOT) for path in inside + top if path.suffix in suffixes)
