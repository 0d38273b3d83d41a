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

LONGEST_FILE = 1 << 16
"""Bytes; the files that are read here have some kilobytes at most."""
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
    fields = _fields(f"{root}/proc/meminfo")
    scale = 1024
    total, available = fields["MemTotal:"] * scale, fields["MemAvailable:"] * scale
    for limit, used in _cgroups(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return MemoryView(total, available)


def _fields(path: str) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2}


def _text(path: str) -> str:
    """A small file of the kernel's, without what a file object costs: it is read for every session."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, LONGEST_FILE).decode()
    finally:
        os.close(fd)


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    mount = root / "sys/fs/cgroup"
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
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
            bound = int(_text(f"{place}/{limit}"))
            used = int(_text(f"{place}/{usage}")) - _fields(f"{place}/memory.stat").get(inactive, 0)
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


def free_descriptors() -> int:
    """How many more this process may open.

    The kernel gives out the lowest number that is free, so that number says how many are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(0)
        os.close(lowest)
    except OSError:
        lowest = limit
    return max(limit - lowest, 0)


def check_descriptors(needed: int, spare: int = SPARE_DESCRIPTORS) -> None:
    """Checks that `needed` descriptors can be opened, and `spare` are left for what has to go on.

    Raises:
        NoMemoryError: they can't; nothing was opened.
    """
    available = max(free_descriptors() - spare, 0)
    if needed > available:
        raise no_descriptors("this node", needed, available)


def no_descriptors(whose: str, needed: int, available: int) -> NoMemoryError:
    """The rejection that says how many descriptors were needed, and how many there are."""
    return NoMemoryError(
        f"{needed} descriptors are needed, {whose} has {available} left (LimitNOFILE, ulimit -n)",
        required=needed,
        available=available,
    )
