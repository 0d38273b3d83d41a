"""A full memory fence, as Python can reach one: between a store and a load that must not change places."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable

from worldmove.errors import FramingError


def _lock_fence() -> Callable[[], None]:
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()

    return fence


def _membarrier_fence() -> Callable[[], None]:
    """Linux `membarrier(2)`, which is a full barrier for the caller on every architecture."""
    number = {"aarch64": 283, "arm64": 283, "riscv64": 283, "ppc64le": 365}.get(platform.machine())
    if number is None:
        raise FramingError(f"no memory barrier is known for {platform.machine()!r}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    private_expedited, register_private_expedited = 1 << 3, 1 << 4
    if call(number, register_private_expedited, 0, 0) != 0:
        raise FramingError(f"membarrier: {os.strerror(ctypes.get_errno())}")

    def fence() -> None:
        call(number, private_expedited, 0, 0)

    return fence


def make_fence() -> Callable[[], None]:
    """A function that orders every earlier store before every later load of the calling thread.

    On x86-64 taking any lock is a locked read-modify-write, which is a full fence and takes 0.1 µs.

    Raises:
        FramingError: this architecture offers none that Python can reach.
    """
    return _lock_fence() if platform.machine() in ("x86_64", "AMD64") else _membarrier_fence()
