"""What the tools for GPUs share: what figures belong to, files that are always whole, and time that ends.

A machine with GPUs is lent for minutes, and a program that is late is killed: so a tool writes what it has
after every stage, and ends by itself, between two moves, when its `--seconds` are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("cupy-cuda13x", "cuda-bindings", "ucxx-cu13", "libucx-cu13", "numpy", "xxhash", "torch"),
    *("uvloop", "msgspec"),
)
SOURCES = (".py", ".cu", ".c", ".hpp")
LAST_WORDS = 2000
Report = dict[str, Any]


class Time:
    """How long a tool may go on; asked before each move whether there is time for it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._since: float | None = None
        self._longest = 0.0

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def anew(self) -> None:
        """Other moves begin: they may take longer, or not as long."""
        self._since, self._longest = None, 0.0

    def another(self, after: float = 0.0) -> bool:
        """Whether one more fits, as long as the longest since `anew`, and `after` seconds of other work."""
        now = time.monotonic()
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._since = now
        return now + self._longest + after < self._end


def write(path: Path, document: Any) -> None:
    """Puts a document in a file's place at once: whoever is killed meanwhile leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(document, indent=1, default=str) + "\n")
    beside.replace(path)


async def tried(work: Awaitable[Report]) -> Report:
    """What it finds; of what fails, how: what comes after it is tried all the same."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - whatever it is, it is part of the report
        words = traceback.format_exc()[-LAST_WORDS:]
        print(words, file=sys.stderr, flush=True)
        return {"held": False, "error": f"{type(error).__name__}: {error}", "trace": words.splitlines()}


def about(devices: Sequence[str]) -> Report:
    """What figures belong to; `devices` are names of GPUs."""
    return {
        "command": command(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code": code(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "devices": list(devices),
        "driver": driver(),
        "versions": versions(),
    }


def command() -> str:
    """How this tool was called; without the folder that its report is written to."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = [*words[:at], *words[at + 2 :]]
    return " ".join(["python", f"tools/{Path(sys.argv[0]).name}", *words])


@cache
def code() -> dict[str, str | bool | None]:
    """The commit, where git knows it, whether anything differs from it, and a digest of all sources."""
    digest = hashlib.sha256()
    for folder in ("worldmove", "api", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    commit, changed = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    return {"commit": commit or None, "changed": bool(changed), "sources": digest.hexdigest()[:16]}


def _git(*words: str) -> str:
    """What git says of this checkout; nothing where it is none, or there is no git."""
    if not (ROOT / ".git").exists():
        return ""
    with contextlib.suppress(OSError):
        answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return answer.stdout.strip()
    return ""


def versions() -> dict[str, str]:
    """Of the packages that count, and are installed."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def nvml() -> Any:
    """NVIDIA's management library; `None` where it or its bindings are missing, as with imagined GPUs."""
    try:
        import pynvml  # noqa: PLC0415 - not everywhere

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - its errors are classes of a module that may not be there
        return None
    return pynvml


def driver() -> str | None:
    """The driver's version."""
    library = nvml()
    return None if library is None else str(library.nvmlSystemGetDriverVersion())


def used(uuids: Sequence[str]) -> list[int]:
    """Bytes in use on each GPU, by whatever process; none are told of GPUs that are imagined."""
    library = nvml()
    if library is None:
        return []
    handles = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return [int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


async def settled(devices: Sequence[str], before: list[int]) -> list[int]:
    """Bytes in use once the driver has taken everything back, within ten seconds."""
    for _ in range(100):
        if used(devices) <= before:
            break
        await asyncio.sleep(0.1)
    return used(devices)


def duration(text: str) -> float:
    """The option `--seconds`: how long a tool may take; without it, as long as it needs."""
    value = float(text)
    if not value > 0 or math.isnan(value):
        raise ValueError(text)
    return value
