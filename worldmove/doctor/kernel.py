"""Checks of what the kernel offers: each one does the thing itself, once, and undoes it."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import resource
import select
import socket
import struct
import tempfile
import time
from pathlib import Path

from worldmove.doctor.finding import Finding, fail, ok, warn
from worldmove.errors import TransportError
from worldmove.ipc import map_shared, sealed_memfd, socketpair

TRIAL_BYTES = 2 * 1024 * 1024
WANTED_FILES = 1024


def memory_files() -> Finding:
    """Sealed memory files: made, reserved, mapped, and impossible to shrink."""
    name = "memory files"
    advice = "A kernel of 3.17 or newer is needed, and a sandbox must allow memfd_create and fallocate."
    try:
        fd = sealed_memfd("worldmove-doctor", TRIAL_BYTES)
    except TransportError as error:
        return fail(name, str(error), advice)
    try:
        os.posix_fallocate(fd, 0, TRIAL_BYTES)
        with map_shared(fd, TRIAL_BYTES, populate=True) as mapping:
            mapping[-1] = 1
        if os.pread(fd, 1, TRIAL_BYTES - 1) != b"\x01":
            return fail(name, "a mapping and its file show different bytes", advice)
    except OSError as error:
        return fail(name, f"reserving or mapping: {error.strerror}", advice)
    else:
        return _cannot_shrink(name, fd, advice)
    finally:
        os.close(fd)


def _cannot_shrink(name: str, fd: int, advice: str) -> Finding:
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
    except PermissionError:
        return ok(name, "memfd, fallocate, seals, populated mappings")
    return fail(name, "a sealed file could be shrunk, which would kill everyone who maps it", advice)


def unix_sockets() -> Finding:
    """Packet sockets that carry descriptors and name the process at the other end."""
    name = "Unix sockets"
    advice = "Descriptors travel over SOCK_SEQPACKET with SCM_RIGHTS; the sandbox has to allow both."
    passed = array.array("i")
    try:
        left, right = socketpair()
        with left, right:
            fds = array.array("i", [left.fileno()])
            left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            _, ancillary, _, _ = right.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
            for _, _, data in ancillary:
                passed.frombytes(data)
            raw = right.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError as error:
        return fail(name, f"{error.strerror}", advice)
    finally:
        for fd in passed:
            os.close(fd)
    pid, uid, _ = struct.unpack("3i", raw)
    if len(passed) != 1 or (pid, uid) != (os.getpid(), os.getuid()):
        return fail(name, "descriptors or credentials did not arrive", advice)
    return ok(name, "SOCK_SEQPACKET, descriptors, peer credentials")


def processes() -> Finding:
    """Descriptors of processes: how the end of a lane is known without polling."""
    name = "process descriptors"
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError as error:
        return fail(name, f"pidfd_open: {error.strerror}", "A kernel of 5.3 or newer is needed.")
    os.close(fd)
    return ok(name, "pidfd_open")


def open_files() -> Finding:
    """How many descriptors a process may hold: an arena, a mapping and a socket need one each."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard})"
    if 0 <= soft < WANTED_FILES:
        return warn(name, found, f"Raise it: ulimit -n {WANTED_FILES}")
    return ok(name, found)


def loopback() -> Finding:
    """TCP on 127.0.0.1: the control plane, and lanes between nodes of one host."""
    name = "loopback"
    advice = "Bring the interface up: ip link set lo up"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.settimeout(2)
            client.connect(server.getsockname())
            ready, _, _ = select.select([server], [], [], 2)
    except OSError as error:
        return fail(name, f"127.0.0.1: {error}", advice)
    if not ready:
        return fail(name, "a connection to 127.0.0.1 did not arrive", advice)
    return ok(name, "127.0.0.1 accepts connections")


def folder_write_ms(folder: Path) -> float | None:
    """Milliseconds of the fastest of five synced writes of a page; `None` where `folder` can't be written."""
    best = None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            start = time.perf_counter()
            os.pwrite(file.fileno(), bytes(mmap.PAGESIZE), 0)
            os.fdatasync(file.fileno())
            took = (time.perf_counter() - start) * 1e3
            best = took if best is None else min(best, took)
    return best
