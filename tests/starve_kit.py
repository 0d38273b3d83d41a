"""Real shortages for tests: limits of single processes, cgroups, small disks. Lifted when a test is over."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")
PAGE = resource.getpagesize()


@contextlib.contextmanager
def limited(pid: int, kind: int, limit: int) -> Iterator[None]:
    """A living process has this soft limit; the former one afterwards, if it still lives."""
    _, hard = resource.prlimit(pid, kind)
    before = resource.prlimit(pid, kind, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def address_space(pid: int, more: int = 0) -> int:
    """Bytes that a process has mapped, and `more`."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * PAGE + more


def next_descriptor(pid: int) -> int:
    """The lowest number that a process has no descriptor of: as a limit it leaves none."""
    taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(taken) + 1)) - taken)


@contextlib.contextmanager
def group(controller: str, limits: dict[str, int], pids: Sequence[int]) -> Iterator[Path]:
    """Processes in a cgroup of their own; skips the test where none can be made.

    Args:
        controller: `memory` or `pids`, in either version of cgroups.
        limits: by the file's name in version 1.
        pids: what is in it.
    """
    first = CGROUPS / controller
    mount = first if first.is_dir() else CGROUPS
    place = mount / f"worldmove-{uuid.uuid4().hex}"
    names = {"memory.limit_in_bytes": "memory.max"} if mount == CGROUPS else {}
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            for name, limit in limits.items():
                (place / names.get(name, name)).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"cgroups have no limit of {controller} here: {error}")
        _enter(place, pids)
        yield place
    finally:
        _enter(mount, [int(pid) for pid in (place / "cgroup.procs").read_text().split()])
        place.rmdir()


def _enter(place: Path, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (place / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """An empty file system of `nbytes` at a folder; skips the test where nothing may be mounted."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"nothing may be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Takes every byte that is left on a small disk."""
    stuffing = folder / "stuffing"
    try:
        with contextlib.suppress(OSError), stuffing.open("wb", buffering=0) as file:
            while shutil.disk_usage(folder).free:
                file.write(bytes(4096))
        assert os.statvfs(folder).f_bavail == 0
        yield
    finally:
        stuffing.unlink()


@contextlib.contextmanager
def full_ledger(path: Path) -> Iterator[None]:
    """The small disk of a ledger is full, and so is the room that its log had left: no write finds any.

    The log can't start anew either, as long as somebody reads what stood in it before.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = (
            stack.enter_context(contextlib.closing(sqlite3.connect(path, isolation_level=None)))
            for _ in range(2)
        )
        writer.execute("CREATE TABLE stuffing (number INTEGER)")
        stack.callback(writer.execute, "DROP TABLE stuffing")
        writer.execute("INSERT INTO stuffing (number) VALUES (0)")
        reader.execute("BEGIN")
        reader.execute("SELECT number FROM stuffing").fetchone()
        stack.enter_context(full(path.parent))
        with pytest.raises(sqlite3.OperationalError, match="full"):
            _write_on(writer)
        yield


def _write_on(writer: sqlite3.Connection) -> None:
    while True:
        writer.execute("UPDATE stuffing SET number = number + 1")
