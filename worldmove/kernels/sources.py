"""The text of the device code, ready for a compiler.

Local includes are put in place, so that a compiler needs no search path, and a cache of compiled code that is
keyed by the text notices a change in any of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

KERNELS = {
    "leaf_digest": ("leaf_digest", "leaf_digest_copy", "leaf_digest_any"),
    "copy_runs": ("copy_runs",),
    "fill_runs": ("fill_runs",),
    "read_runs": ("read_runs",),
    "table_diff": ("table_diff_mark", "table_diff_list"),
}
"""Every file of device code (without `.cu`), and the kernels in it."""

OPTIONS = ("-std=c++17",)
"""What NVRTC is told besides the architecture."""

_FOLDER = Path(__file__).parent
_INCLUDE = '#include "'


@cache
def source(name: str) -> str:
    """The whole text of `name`.cu.

    Raises:
        FileNotFoundError: there is no such file, or it includes one that isn't there.
    """
    return "".join(_expand(f"{name}.cu", set()))


def _expand(file: str, seen: set[str]) -> list[str]:
    """The file's lines with every include in its place, each file once (all have `#pragma once`)."""
    if file in seen:
        return []
    seen.add(file)
    lines = [f'#line 1 "{file}"\n']
    for number, line in enumerate((_FOLDER / file).read_text().splitlines(keepends=True), 1):
        if line.startswith(_INCLUDE):
            lines += [*_expand(line.split('"')[1], seen), f'#line {number + 1} "{file}"\n']
        elif not line.startswith("#pragma once"):
            lines.append(line)
    return lines
