"""How much memory this process may still take: what the machine has, and what its cgroups allow.

The kernel answers an allocation beyond a cgroup's limit not with an error but by killing a process,
so this is asked before anything is allocated.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from worldmove.errors import NoMemoryError

SPARE_DESCRIPTORS = 256
"""What no session may take: for lanes, executors, connections and the ledger."""
MOVE_DESCRIPTORS = 64
"""What has to be left for one more move: its tables, lanes and connections, and the ledger's files."""


class MemoryView(NamedTuple):
    """Bytes that this process may use in all, and how many of them are free now."""

    total: int
    available: int


def machine_memory(root: Path = Path("/")) -> MemoryView:
    """The tightest of the machine's memory and the limits of every cgroup above this process.

    Sources: `MemTotal` and `MemAvailable` of proc(5); `memory.max`, `memory.current` (cgroup v2) and
    `memory.limit_in_bytes`, `memory.usage_in_bytes` (v1) of the kernel's cgroup documentation. Inactive
    file pages count as free, since the kernel drops them before it kills.

    Args:
        root: where `/proc` and `/sys` are found (another place only in tests).
    """
    fields = _fields(root / "proc/meminfo")
    scale = 1024
    total, available = fields["MemTotal:"] * scale, fields["MemAvailable:"] * scale
    for limit, used in _cgroups(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return MemoryView(total, available)


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2}


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    mount = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(mount, path, "memory.max", "memory.current", "inactive_file")
            yield from _walk(mount / "unified", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(mount / "memory", path, *names)


def _walk(mount: Path, path: str, limit: str, usage: str, inactive: str) -> Iterator[tuple[int, int]]:
    group = PurePosixPath(path)
    # Inside a container the path may be the host's, and then only the mount itself is there to look at.
    for relative in [group, *group.parents]:
        place = mount / str(relative).lstrip("/")
        # A group may be removed, or have no limit ("max", no file at all at the root).
        with contextlib.suppress(OSError, ValueError, KeyError):
            bound = int((place / limit).read_text())
            used = int((place / usage).read_text()) - _fields(place / "memory.stat").get(inactive, 0)
            yield bound, max(used, 0)


def raise_descriptor_limit() -> int:
    """Lets this process open as many descriptors as its hard limit allows; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    # Where the hard limit is "infinity" the kernel's own one (fs.nr_open) still holds, and is refused.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def check_descriptors(needed: int = SPARE_DESCRIPTORS) -> None:
    """Checks that descriptors are left for what has to go on, beside what is about to be made.

    The kernel gives out the lowest number that is free, so that number says how many are in use.

    Raises:
        NoMemoryError: fewer than `needed` are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(0)
        os.close(lowest)
    except OSError:
        lowest = limit
    if limit - lowest < needed:
        raise NoMemoryError(
            f"{limit} descriptors are allowed and nearly all in use (LimitNOFILE, ulimit -n)",
            required=needed,
            available=max(limit - lowest, 0),
        )
