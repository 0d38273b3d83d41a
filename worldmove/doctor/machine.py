"""Checks of the machine and of what is installed on it."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from worldmove.config import load
from worldmove.doctor.finding import Finding, fail, ok, warn
from worldmove.doctor.kernel import folder_write_ms
from worldmove.errors import ConfigError
from worldmove.memory.limits import machine_memory

WANTED_BYTES = 1 << 30
REMOTE_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre"}
CHEAP_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}


def python() -> Finding:
    """The interpreter."""
    name = "Python"
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    if sys.platform != "linux":
        return fail(
            name, f"{found}, {sys.platform}", "Linux is needed: arenas are memfds, sockets are packets."
        )
    return ok(name, f"{found}, Linux {platform.release()}")


def event_loop() -> Finding:
    """uvloop, on which everything runs."""
    name = "event loop"
    try:
        return ok(name, f"uvloop {metadata.version('uvloop')}")
    except metadata.PackageNotFoundError:
        return fail(name, "uvloop is not installed", "Install the project: make setup")


def processors() -> Finding:
    """Cores that this process may use: a lane, an executor, the node and the world want one each."""
    name = "processors"
    usable = float(len(os.sched_getaffinity(0)))
    quota = _cpu_quota()
    cores = min(usable, quota) if quota else usable
    found = f"{cores:g} of {os.cpu_count()}"
    if cores < 2:
        return warn(
            name, found, "Moves work, and are slow: lanes and executors share one core with the world."
        )
    return ok(name, found)


def _cpu_quota() -> float | None:
    for line in _lines("/proc/self/cgroup"):
        if line.startswith("0::"):
            fields = _lines(f"/sys/fs/cgroup{line[3:]}/cpu.max") or _lines("/sys/fs/cgroup/cpu.max")
            words = fields[0].split() if fields else []
            if len(words) == 2 and words[0] != "max":
                return int(words[0]) / int(words[1])
    return None


def memory() -> Finding:
    """What arenas may reserve: the machine's memory, or the cgroup's if that is less."""
    name = "memory"
    view = machine_memory()
    found = f"{view.available / 1e9:.1f} GB of {view.total / 1e9:.1f} GB available"
    if view.available < WANTED_BYTES:
        return warn(name, found, "The demo at its default size needs about 1 GB; try --state-mb 16.")
    if _lines("/proc/sys/vm/overcommit_memory") == ["2"]:
        return warn(name, f"{found}, strict overcommit", "Every mapping counts: raise vm.overcommit_ratio.")
    return ok(name, found)


def clock() -> Finding:
    """The clock source: a boundary reads the clock, and may take 20 µs altogether."""
    name = "clock"
    source = (_lines("/sys/devices/system/clocksource/clocksource0/current_clocksource") or ["unknown"])[0]
    start = time.perf_counter_ns()
    for _ in range(1000):
        time.monotonic_ns()
    each = (time.perf_counter_ns() - start) / 1000
    found = f"{source}, {each:.0f} ns a reading"
    if source not in CHEAP_CLOCKS and each > 500:
        return warn(
            name, found, "Readings are slow; where the machine allows it, choose tsc as clock source."
        )
    return ok(name, found)


def identity() -> Finding:
    """The boot id, by which two nodes know that they share a host and can exchange descriptors."""
    name = "boot id"
    boot = _lines("/proc/sys/kernel/random/boot_id")
    if not boot:
        return warn(name, "not readable", "Nodes of this host use lanes instead of exchanging descriptors.")
    spaces = [Path(f"/proc/self/ns/{kind}").readlink().name for kind in ("pid", "net", "user")]
    return ok(name, f"{boot[0]}; namespaces {', '.join(spaces)}")


def ledger_folder() -> Finding:
    """The folder of the default ledger: SQLite's write-ahead log needs a local filesystem."""
    name = "ledger"
    try:
        url = load({"name": "doctor"}).ledger
    except ConfigError as error:
        return fail(name, error.message, "Correct the option.")
    if not url.startswith("sqlite:///"):
        return ok(name, f"{urlsplit(url).scheme} at {urlsplit(url).netloc}")
    folder = Path(url.removeprefix("sqlite:///")).absolute().parent
    while not folder.exists():
        folder = folder.parent
    kind = filesystem(folder)
    took = folder_write_ms(folder)
    found = f"{folder} ({kind})"
    if took is None:
        return fail(
            name, f"{found} can't be written", "Name another place: --ledger sqlite:////PATH/ledger.db"
        )
    found += f", a synced write takes {took:.2f} ms"
    if kind in REMOTE_FILESYSTEMS:
        return fail(name, found, "SQLite needs a local filesystem: --ledger sqlite:////PATH/ledger.db")
    if kind in ("tmpfs", "ramfs"):
        return warn(name, found, "It does not outlive a reboot: --ledger sqlite:////PATH/ledger.db")
    return ok(name, found)


def filesystem(folder: Path) -> str:
    """Type of the filesystem that holds `folder`, from mountinfo of proc(5)."""
    resolved = folder.resolve()
    best, kind = -1, "unknown"
    for line in _lines("/proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        mount = Path(fields.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), tail.split()[0]
    return kind


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
