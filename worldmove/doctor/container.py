"""Checks of what a container, or whoever starts a node, has to grant: see docs/containers.md."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

from worldmove.config import load
from worldmove.doctor.finding import Finding, fail, ok, warn
from worldmove.errors import ConfigError

HOST_PIDS = 4026531836
"""Inode of the first PID namespace (the kernel's PROC_PID_INIT_INO): that of the host itself."""

INITS = frozenset({"systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "s6-svscan", "runsv"})
SMALL_SHM_BYTES = 1 << 30
LOCKED_BYTES = 1 << 30
SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written

_CAPABILITIES = {1: "DAC_OVERRIDE", 12: "NET_ADMIN", 13: "NET_RAW", 14: "IPC_LOCK", 19: "SYS_PTRACE"}
_CAPABILITIES |= {21: "SYS_ADMIN", 23: "SYS_NICE"}


class Box(NamedTuple):
    """What surrounds this process.

    Attributes:
        container: whether it is in a container. pids: inode of its PID namespace.
        first: name of process 1 there. capabilities: effective ones, of those that matter here.
        mounts: every mount point.
    """

    container: bool
    pids: int
    first: str
    capabilities: tuple[str, ...]
    mounts: frozenset[Path]


def look(root: Path = Path("/")) -> Box:
    """Finds out; `root` is another one in tests."""
    proc = root / "proc"
    status = _fields(proc / "self/status")
    mask = int(status.get("CapEff", "0"), 16)
    marks = (root / ".dockerenv", root / "run/.containerenv")
    variables = _text(proc / "1/environ").split("\0")
    return Box(
        container=any(mark.exists() for mark in marks)
        or any(each.startswith("container=") for each in variables)
        or "KUBERNETES_SERVICE_HOST" in os.environ,
        pids=(proc / "self/ns/pid").stat().st_ino,
        first=_text(proc / "1/comm").strip() or "unknown",
        capabilities=tuple(name for bit, name in _CAPABILITIES.items() if mask >> bit & 1),
        mounts=frozenset(
            Path(words[4])
            for line in _text(proc / "self/mountinfo").splitlines()
            if len(words := line.split()) > 4
        ),
    )


def surroundings(box: Box | None = None) -> Finding:
    """Container or not, PID namespace, user, capabilities. Nothing of it is needed for arenas."""
    name = "surroundings"
    seen = box or look()
    own = "the host's" if seen.pids == HOST_PIDS else "its own"
    found = (
        f"{'a container' if seen.container else 'no container'}, {own} PID namespace, user {os.getuid()}, "
        f"capabilities {', '.join(seen.capabilities) or 'none'}"
    )
    if seen.container and seen.first not in INITS:
        return warn(
            name,
            f"{found}, process 1 is {seen.first}",
            "Nobody reaps what outlives a node (its keeper): run the image's own entry point, or --init.",
        )
    if seen.pids != HOST_PIDS:
        found += "; memory of kind `cuda-ipc` needs the workers' PID namespace (--pid), arenas don't"
    return ok(name, found)


def run_folder(box: Box | None = None) -> Finding:
    """The folder of the Unix sockets: workers and the other nodes of the host have to see it."""
    name = "run folder"
    seen = box or look()
    try:
        folder = load({"name": "doctor"}).run_dir
    except ConfigError as error:
        return fail(name, error.message, "Correct the option.")
    found = f"{folder}, for user {os.getuid()} alone"
    place = folder
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return fail(name, f"{place} can't be written", "Name another place: --run-dir, WORLDMOVE_RUN_DIR.")
    if seen.container and not any(folder.is_relative_to(each) for each in seen.mounts - {Path("/")}):
        return warn(
            name,
            f"{found}, in this container alone",
            "Workers in other containers can't come: mount one volume at the same path in all of them, and "
            "name a folder in it by --run-dir. All of them have to run as the same user.",
        )
    return ok(name, found)


def shared_memory(folder: Path = SHM) -> Finding:
    """POSIX shared memory: only for sessions whose stack registers it by name."""
    name = "shared memory"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return warn(
            name, f"{folder} is not writable", "Sessions with regions of kind `shm` can't be registered."
        )
    usage = os.statvfs(folder)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    found = f"{free / 1e9:.2f} GB free in {folder}; arenas don't use it"
    if total < SMALL_SHM_BYTES:
        return warn(
            name, found, "Too small for sessions of kind `shm`, and for many a serving stack: --shm-size=8g"
        )
    return ok(name, found)


def locked_memory() -> Finding:
    """What a process may lock: RDMA counts against it, CUDA's pinned memory does not."""
    name = "locked memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.1f} MB"
    rdma = Path("/dev/infiniband").exists()
    if rdma and soft != resource.RLIM_INFINITY and soft < LOCKED_BYTES:
        return warn(name, found, "RDMA locks what it registers: ulimit -l unlimited, or --ulimit memlock=-1.")
    return ok(name, found if rdma else f"{found}; only RDMA needs more")


def device_binding() -> Finding:
    """Whether a socket can be kept on one network device (`--lane-device`): Linux 5.7 without privileges."""
    name = "lane device"
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        except PermissionError:
            return warn(
                name,
                f"SO_BINDTODEVICE is not permitted, Linux {os.uname().release}",
                "Lanes can't be kept on one device: use Linux 5.7 or newer (or grant NET_RAW), or start "
                "nodes with --lane-device all inside a network of their own.",
            )
        except OSError as error:
            return warn(
                name, f"SO_BINDTODEVICE on lo: {error.strerror}", "Bring the interface up: ip link set lo up"
            )
    return ok(name, "lanes can be kept on one network device")


def temporary_folder() -> Finding:
    """Where things go that are named nowhere: a read-only container needs a tmpfs there."""
    name = "temporary files"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        return warn(name, f"none can be made: {error}", "Mount a tmpfs: --tmpfs /tmp")
    return ok(name, tempfile.gettempdir())


def _fields(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
