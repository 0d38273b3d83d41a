"""POSIX shared memory that a serving stack allocated itself, opened by name."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from worldmove.errors import ManifestError

SHM = Path("/dev/shm")  # noqa: S108 - where shm_open(3) keeps its objects on Linux


def open_shared(name: str, needed: int, field: str) -> tuple[int, int]:
    """Opens shared memory as `shm_open(3)` names it: one leading slash is optional, none may follow.

    Args:
        name: of the object.
        needed: bytes that must be there.
        field: of the request, for the error.

    Returns:
        A descriptor that the caller owns, and the object's size in bytes.

    Raises:
        ManifestError: no such object, not a plain one of this user, or too small.
    """
    plain = name.removeprefix("/")
    if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(plain) > 255:
        raise ManifestError(f"{field} {name!r} is no name of shared memory", field=field)
    try:
        fd = os.open(SHM / plain, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ManifestError(f"{field} {name!r} cannot be opened: {error}", field=field) from error
    try:
        return fd, check_shared(fd, needed, f"{field} {name!r}", field)
    except ManifestError:
        os.close(fd)
        raise


def check_shared(fd: int, needed: int, what: str, field: str) -> int:
    """Checks a descriptor of shared memory, which stays the caller's.

    It can't be sealed: a stack that makes it smaller while it is mapped elsewhere ends the executors that
    read it, and no more than these.

    Args:
        fd: of the object.
        needed: bytes that must be there.
        what: it is called in the error.
        field: of the request, for the error.

    Returns:
        The object's size in bytes.

    Raises:
        ManifestError: it is no plain object of this user that can be written, or too small.
    """
    status = os.fstat(fd)
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not writable:
        raise ManifestError(f"{what} is not shared memory of this user", field=field)
    if status.st_size < needed:
        raise ManifestError(f"{what} has {status.st_size} bytes; {needed} are needed", field=field)
    return status.st_size
