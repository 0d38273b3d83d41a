"""Writes constraints.txt: the exact version of everything that a checkout installs, transitive ones too.

`make pins` runs it. It asks pip to resolve the project afresh for the `host`, `cu13`, `dev` and `fuzz`
extras, and installs nothing. The `cu12` extra is left out: its CUDA bindings exclude those of `cu13`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "host,cu13,dev,fuzz"


def requirements() -> list[str]:
    """What is resolved: the project with its extras, and what builds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [f"{ROOT}[{EXTRAS}]", *project["build-system"]["requires"]]


def resolve() -> dict[str, str]:
    """Name to version of everything that pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    answer = subprocess.run(
        [*command, "--report", "-", *requirements()], check=True, stdout=subprocess.PIPE, text=True
    )
    packages = [item["metadata"] for item in json.loads(answer.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in packages}


def main() -> None:
    """Writes the file."""
    pins = resolve()
    pins.pop("worldmove")
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    (ROOT / "constraints.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
