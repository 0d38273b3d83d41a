"""Looking at real memory from outside: who holds a memory file, and which processes have ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path


def holders(name: str) -> set[int]:
    """Processes that hold a descriptor or a mapping of the memory file `name`."""
    mark = f"/memfd:{name} (deleted)"
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # Any process may end while it is being looked at.
        with contextlib.suppress(OSError):
            if mark in (entry / "maps").read_text():
                found.add(int(entry.name))
            for fd in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()) == mark:
                        found.add(int(entry.name))
    return found


def open_descriptors() -> frozenset[tuple[int, int, int]]:
    """Number, device and inode of each descriptor of this process.

    A set, and no count: what earlier tests left to the collector may go at any time, and hides nothing.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            status = os.fstat(int(entry.name))
            found.add((int(entry.name), status.st_dev, status.st_ino))
    return frozenset(found)


async def ended(pid: int, seconds: float = 20.0) -> None:
    """Returns when the process is gone, or fails."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: future.done() or future.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await future
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def pattern(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that differ from leaf to leaf."""
    block = bytes((seed * 131 + i * 7 + (i >> 8)) & 0xFF for i in range(4093))
    return (block * (nbytes // len(block) + 1))[:nbytes]
