"""Writes the annotated tree of docs/modules.md: every module with the first sentence of its docstring.

`make tree` runs it; with `--check` it only says whether the tree is up to date (exit code 1 if not).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "modules.md"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"
COLUMN = 28


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = " ".join(text.split("\n\n")[0].split())
    return words.split(". ")[0].removesuffix(".")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """The lines of one package: itself, its modules, its packages."""
    indent = "    " * depth
    init = folder / "__init__.py"
    found = [entry(indent + folder.name + "/", sentence(init) if init.exists() else "")]
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    found += [entry(indent + "    " + path.name, sentence(path)) for path in modules]
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        found += lines(inner, depth + 1)
    return found


def entry(name: str, what: str) -> str:
    """One line, the annotation in its column."""
    return f"{name:<{COLUMN}} {what}".rstrip() + "\n"


def document(text: str) -> str:
    """The document with its tree renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tree = [*lines(ROOT / "worldmove"), *lines(ROOT / "api")]
    return f"{before}{BEGIN}```text\n{''.join(tree)}```\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Writes the tree, or checks it."""
    old = DOCUMENT.read_text()
    new = document(old)
    if "--check" in arguments:
        return int(old != new)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
