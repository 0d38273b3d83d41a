"""How much memory a node's processes take, from proc(5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

PROC = Path("/proc")
EVERY_S = 0.02


def descendants(roots: Iterable[int]) -> set[int]:
    """The processes of `roots` and everything below them."""
    parents: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name (2nd field) may hold anything, so count from its closing parenthesis.
            fields = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += parents.get(pid, [])
    return found


def own_bytes(pids: Iterable[int]) -> int:
    """Bytes of these processes alone: anonymous pages and page tables. Shared pages are left out."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith(("RssAnon:", "VmPTE:")):
                    total += int(line.split()[1]) * 1024
    return total


def open_descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return sum(1 for _ in (PROC / str(pid) / "fd").iterdir())


def shared_bytes() -> int:
    """Bytes of all memory files and shared memory of the machine (`Shmem`)."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


class Growth:
    """By how much nodes have grown since `watch` began.

    Attributes:
        peak_bytes: the most that one node's processes grew by, at any time: their own pages and page tables,
            and all memory files made on this machine meanwhile (a machine that does other work shows more).
        samples: how often it was looked.
    """

    def __init__(self, nodes: Mapping[str, tuple[int, ...]]) -> None:
        self._nodes = nodes
        self._own = {name: own_bytes(descendants(pids)) for name, pids in nodes.items()}
        self._shared = shared_bytes()
        self.peak_bytes = 0
        self.samples = 0

    def look(self) -> None:
        """Takes one sample."""
        shared = max(shared_bytes() - self._shared, 0)
        for name, pids in self._nodes.items():
            grown = own_bytes(descendants(pids)) - self._own[name] + shared
            self.peak_bytes = max(self.peak_bytes, grown)
        self.samples += 1

    async def sample(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def watch(nodes: Mapping[str, tuple[int, ...]]) -> AsyncIterator[Growth]:
    """Watches the memory of nodes while the block runs.

    Args:
        nodes: by a node's name, processes that belong to it; everything below these is found.
    """
    growth = Growth(nodes)
    task = asyncio.create_task(growth.sample())
    try:
        yield growth
        growth.look()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
