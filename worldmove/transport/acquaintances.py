"""The lanes of this host with which a *direct* lane has exchanged, and whether they still live.

UCX keeps what it has opened of another process's GPU memory until its own process ends: its cache for
`cuda_ipc` has an entry for each peer, which nothing takes out (UCX 1.21, `cuda_ipc_cache.c`). So the ring of
a lane that has died stays allocated for as long as a lane lives that has ever received from it, a gigabyte of
a GPU each time. Nobody but the kernel knows when a lane ends: so each says which process it is, and the other
watches it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from worldmove.transport.framing import ProcessId

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def myself() -> ProcessId:
    """This process, as those on the same host can find it; where /proc is hidden, as one that nobody can."""
    try:
        boot = hashlib.blake2b(BOOT_ID.read_bytes(), digest_size=8).digest()
        namespace = PID_NAMESPACE.stat().st_ino
    except OSError:
        return ProcessId(os.getpid(), 0, secrets.randbits(64))
    return ProcessId(os.getpid(), int.from_bytes(boot, "little"), namespace)


class Acquaintances:
    """Watches processes that this one has met.

    Args:
        me: this one.
        on_gone: called once, when one of those that run on this host has ended, or can't be watched, as it
            lives in another PID namespace.
    """

    def __init__(self, me: ProcessId, on_gone: Callable[[], None]) -> None:
        self.me = me
        self._on_gone = on_gone
        self._watched: dict[int, int] = {}
        self._gone = False

    def meet(self, other: ProcessId) -> None:
        """The other end of a connection that stands; `other` is what it says it is, whatever that may be."""
        if self._gone or other.host != self.me.host:
            return
        if other.namespace != self.me.namespace:
            self._tell()
            return
        if other.pid in self._watched:
            return
        try:
            watched = os.pidfd_open(other.pid)
        except (OSError, OverflowError):
            self._tell()
            return
        self._watched[other.pid] = watched
        asyncio.get_running_loop().add_reader(watched, self._tell)

    def close(self) -> None:
        """Watches nobody any more."""
        loop = asyncio.get_running_loop()
        for watched in self._watched.values():
            loop.remove_reader(watched)
            os.close(watched)
        self._watched.clear()

    def _tell(self) -> None:
        self.close()
        if not self._gone:
            self._gone = True
            self._on_gone()
