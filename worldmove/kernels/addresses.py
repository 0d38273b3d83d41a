"""Memory of this process by address: how the references take the same descriptors as the kernels do."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def memory_at(address: int, length: int) -> Bytes:
    """A view of `length` bytes of this process's own memory; the caller vouches for them."""
    if not length:
        return np.zeros(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def first_of(counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each record, how much work stands before it: the sums of the counts before its own."""
    return np.cumsum(counts, dtype=np.uint64) - counts
