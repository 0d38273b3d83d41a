"""One memory file with the control pages of all sessions that have no worker: one descriptor for thousands.

A worker gets a page of its own, so none ever sees another session's; until one comes, and again after a start
of the node where none is left, the page lies here. The keeper holds the file, under a key of its own.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import defaultdict
from functools import cache
from typing import NamedTuple

from worldmove.errors import TransportError, WorldMoveError
from worldmove.ipc import close_all, sealed_memfd
from worldmove.page.control import ControlPage, format_page, page_bytes

CAPACITY = 64 << 30
"""Bytes that pages may take together; nothing is reserved."""
LARGEST = 1 << 20
"""Bytes of a page; larger ones have descriptors of their own."""
_PUNCH_HOLE_KEEP_SIZE = 3


class Place(NamedTuple):
    """Where a page lies in a folio: at which byte, and how many."""

    offset: int
    nbytes: int


class Folio:
    """Gives out places, and opens the pages there.

    Attributes:
        key: names the memory file in the records of slots; another one once no page lay in it.
    """

    def __init__(self) -> None:
        self.key = ""
        self._fd = -1
        self._end = 0
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def fd(self) -> int:
        """Of the memory file, which is there while a page lies in it."""
        return self._fd

    def add(self, ranks: int, host_state_bytes: int, *, incarnation: int, epoch: int) -> Place | None:
        """A new page; `None` if it is too large, there is no room, or no file as large may be made.

        Raises:
            WorldMoveError: there is no memory for it.
        """
        nbytes = page_bytes(ranks, host_state_bytes)
        free = self._free[nbytes]
        if nbytes > LARGEST or (not free and self._end + nbytes > CAPACITY) or not self._opened():
            return None
        if not free:
            free.append(self._end)
            self._end += nbytes
        place = Place(free.pop(), nbytes)
        self._used += 1
        try:
            format_page(self._fd, place.offset, ranks, host_state_bytes, incarnation=incarnation, epoch=epoch)
        except BaseException:
            self.free(place)
            raise
        return place

    def _opened(self) -> bool:
        if self._fd < 0:
            try:
                self._fd = sealed_memfd("worldmove-pages", CAPACITY)
            except WorldMoveError:
                return False
            self.key = secrets.token_hex(8)
        return True

    def open(self, place: Place) -> ControlPage:
        """Maps the page at a place."""
        return ControlPage(self._fd, *place)

    def free(self, place: Place) -> str | None:
        """Nobody's record names the place any more: its memory goes, and the next page may lie there.

        Returns:
            The key of the file, if no page lies in it any more: it has been closed here.

        Raises:
            TransportError: the system refuses.
        """
        self._used -= 1
        if self._used == 0:
            self.close()
            return self.key
        if _libc().fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, *place) != 0:
            raise TransportError(f"a page can't be freed: {os.strerror(ctypes.get_errno())}")
        self._free[place.nbytes].append(place.offset)
        return None

    def close(self) -> None:
        """Lets go of the file, which lives on in the keeper."""
        close_all([self._fd] if self._fd >= 0 else [])
        self._fd = -1
        self._end = 0
        self._free.clear()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc
