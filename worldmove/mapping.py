"""Shared mappings that cost no descriptor.

`mmap.mmap` keeps a duplicate of the descriptor for as long as it lives (since Python 3.13 it can be told not
to): one more for every control page, of which a node has thousands.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

from worldmove.errors import TransportError
from worldmove.shortage import shortage

_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class SharedMapping:
    """`nbytes` of a descriptor from `offset` (whole memory pages) on, mapped shared and writable.

    Raises:
        TransportError: the descriptor is smaller (touching it would be a SIGBUS), or can't be mapped.
        NoMemoryError: address space does not suffice.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        size = os.fstat(fd).st_size
        if size < offset + nbytes or nbytes <= 0:
            raise TransportError(f"descriptor has {size} bytes, {offset} + {nbytes} were announced")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, offset)
        if self._address == _FAILED:
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            short = shortage("a mapping", nbytes, error)
            raise short or TransportError(f"{nbytes} bytes can't be mapped: {error.strerror}")
        self._nbytes = nbytes
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self._address)).cast("B")

    def close(self) -> None:
        """Unmaps; every view of `view` must have been released. Once more is nothing."""
        self.view.release()
        if self._address is not None:
            _libc().munmap(self._address, self._nbytes)
            self._address = None
