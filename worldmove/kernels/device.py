"""Loads device code by CuPy: compiled by NVRTC for the current device, kept in CuPy's cache on disk.

Needs a GPU. Kernels run on CuPy's current stream of its current device, and return at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import cupy
import numpy as np
import numpy.typing as npt

from worldmove.kernels.sources import KERNELS, OPTIONS, source

Kernel = Any
"""A `cupy.RawKernel`: called with grid, block and arguments."""


def load(name: str, defines: Mapping[str, int] | None = None) -> dict[str, Kernel]:
    """Compiles one file of device code.

    Args:
        name: a key of `KERNELS`.
        defines: macros, for trying other shapes of a kernel.

    Returns:
        Its kernels by name, loaded on the current device.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses it.
    """
    options = (*OPTIONS, *(f"-D{key}={value}" for key, value in (defines or {}).items()))
    module = cupy.RawModule(code=source(name), options=options)
    return {kernel: module.get_function(kernel) for kernel in KERNELS[name]}


class Records(NamedTuple):
    """Descriptors (pieces or runs) in device memory, for any number of launches.

    Attributes:
        data: holds the memory.
        number: how many descriptors.
        work: leaves or tiles of all of them together.
    """

    data: Any
    number: int
    work: int

    @property
    def arguments(self) -> tuple[Any, np.uint64, np.uint64]:
        """The first three arguments of every kernel that takes descriptors."""
        return self.data, np.uint64(self.number), np.uint64(self.work)


def upload(records: npt.NDArray[np.void], work: int) -> Records:
    """Copies descriptors to the current device; ordered before what the current stream does next."""
    return Records(cupy.asarray(np.ascontiguousarray(records).view(np.uint8)), len(records), work)


def multiprocessors() -> int:
    """How many multiprocessors the current device has."""
    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])
