"""Memory as a descriptor: sealed memory files whose pages are all there before anybody relies on them.

An arena lives as long as somebody holds its descriptor or a mapping of it. This module only makes
arenas and keeps count; keeper, worker, executors and lanes hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from worldmove.errors import ManifestError, NoMemoryError, TransportError
from worldmove.ipc import close_all, sealed_memfd
from worldmove.memory.limits import MemoryView, machine_memory
from worldmove.memory.near import running_on
from worldmove.shortage import file_bytes

HEADROOM_BYTES = 128 * 1024 * 1024
"""What stays free of the machine's memory for page tables and the growth of processes."""

FRESH_S = 0.05
"""For so long a look at the machine's memory counts, less what was reserved since."""

_ZEROS = bytes(4 * 1024 * 1024)


def create_arena(nbytes: int, name: str) -> int:
    """Makes one arena of `nbytes` zero bytes; blocks for about half a second per GiB.

    Every page is reserved (`fallocate`) and then written once: a page that is only reserved is cleared at
    its first fault, in the middle of somebody's work. The interpreter lock is released meanwhile.

    Returns:
        A descriptor that the caller owns. Its size is sealed, and it is not inherited by children.

    Raises:
        NoMemoryError: the machine does not have that much; nothing stays allocated.
    """
    available = min(free_bytes(machine_memory()), file_bytes())
    if nbytes > available:
        raise no_memory(nbytes, available)
    try:
        fd = sealed_memfd(name, nbytes)
    except TransportError as error:
        raise no_memory(nbytes, available, str(error)) from error
    try:
        os.posix_fallocate(fd, 0, nbytes)
        _clear(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise no_memory(nbytes, available, str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _clear(fd: int, nbytes: int) -> None:
    zeros = memoryview(_ZEROS)
    offset = 0
    while offset < nbytes:
        offset += os.pwrite(fd, zeros[: nbytes - offset], offset)


def free_bytes(memory: MemoryView) -> int:
    """What arenas may take of `memory`, beside `HEADROOM_BYTES`."""
    return max(memory.available - HEADROOM_BYTES, 0)


def no_memory(required: int, available: int, cause: str = "") -> NoMemoryError:
    """The rejection that says how many bytes were needed and how many there are."""
    reason = f" ({cause})" if cause else ""
    return NoMemoryError(
        f"{required} bytes of memory are needed, {available} are available{reason}",
        required_bytes=required,
        available_bytes=available,
    )


class MemoryBudget:
    """Counts what sessions hold, and refuses what would not fit.

    Not a lock on memory: bytes are promised synchronously by `reserve`, and whoever was promised
    allocates afterwards. `allocate` does both, and undoes both.

    Args:
        limit_bytes: the most that sessions may hold together; `None`: what the machine allows.
        probe: asks for the machine's memory (another one only in tests).
    """

    def __init__(
        self, limit_bytes: int | None = None, *, probe: Callable[[], MemoryView] = machine_memory
    ) -> None:
        self._limit = limit_bytes
        self._probe = probe
        self._held = 0
        self._promised = 0
        self._left = 0
        self._looked_at = -inf
        self._undoing: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> int:
        """Bytes counted now."""
        return self._held

    @property
    def total(self) -> int:
        """Bytes that sessions may hold together."""
        total = self._probe().total
        return total if self._limit is None else min(self._limit, total)

    @property
    def free(self) -> int:
        """Bytes that `reserve` would grant now."""
        self._look()
        return self._free()

    def _look(self) -> None:
        self._left, self._looked_at = free_bytes(self._probe()) - self._promised, time.monotonic()

    def _free(self) -> int:
        """As the last look showed, less what was reserved since."""
        left = self._left if self._limit is None else min(self._left, self._limit - self._held)
        return max(left, 0)

    def reserve(self, nbytes: int) -> None:
        """Counts memory that is about to be allocated by other means than `allocate`.

        The kernel's files are not read for each of many sessions that come at once, but before one is
        refused; and whoever makes an arena looks again.

        Raises:
            NoMemoryError: it does not fit; nothing is counted.
        """
        if nbytes > self._free() or time.monotonic() - self._looked_at > FRESH_S:
            self._look()
        if nbytes > (free := self._free()):
            raise no_memory(nbytes, free)
        self._held += nbytes
        self._left -= nbytes

    def adopt(self, nbytes: int) -> None:
        """Counts memory that exists already (a worker's own, or a former incarnation's); never refuses."""
        self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Takes back what `reserve`, `adopt` or `allocate` counted."""
        self._held -= nbytes

    async def allocate(self, sizes: Sequence[int], name: str, *, cpus: Collection[int] = ()) -> list[int]:
        """Reserves and makes one arena for each of `sizes` (bytes), all or none, beside the event loop.

        Cancelling it leaves nothing behind: what is being made meanwhile is freed when it is there.

        Args:
            sizes: in bytes.
            name: of the memory files, for people who look.
            cpus: processors near to which they are to lie; empty: anywhere.

        Returns:
            Descriptors that the caller owns; `release(sum(sizes))` goes with `free_arenas` of them.

        Raises:
            NoMemoryError: they do not fit, or the system refused; nothing is held.
        """
        needed = sum(sizes)
        self.reserve(needed)
        self._promised += needed
        making = asyncio.ensure_future(asyncio.to_thread(_create_all, tuple(sizes), name, cpus))
        making.add_done_callback(lambda _: self._kept_promise(needed))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._undo(making, needed))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        except BaseException:
            self.release(needed)
            raise

    async def allocate_on(self, device: str, nbytes: int) -> int:
        """Refuses: this budget is of host memory.

        Raises:
            ManifestError: always.
        """
        raise ManifestError(
            f"device {device!r} is not on this node ({nbytes} bytes); allowed: 'host'", field="device"
        )

    async def check_on(self, device: str, fd: int, nbytes: int) -> None:
        """Refuses as `allocate_on`: descriptor `fd` can be no GPU's here.

        Raises:
            ManifestError: always.
        """
        raise ManifestError(
            f"device {device!r} is not on this node (descriptor {fd} of {nbytes} bytes); allowed: 'host'",
            field="device",
        )

    def _kept_promise(self, nbytes: int) -> None:
        self._promised -= nbytes

    async def _undo(self, making: asyncio.Future[list[int]], nbytes: int) -> None:
        try:
            await free_arenas(await making)
        except NoMemoryError:
            # Nothing was made, and the one who is told so is gone.
            return
        finally:
            self.release(nbytes)


def _create_all(sizes: Sequence[int], name: str, cpus: Collection[int]) -> list[int]:
    with running_on(cpus), contextlib.ExitStack() as undo:
        fds = []
        for size in sizes:
            fds.append(create_arena(size, name))
            undo.callback(os.close, fds[-1])
        undo.pop_all()
        return fds


async def free_arenas(fds: Sequence[int]) -> None:
    """Closes descriptors beside the event loop: the last close of an arena takes 0.2 s per GiB."""
    owned = tuple(fds)
    await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(close_all, owned)))
