"""CuPy as far as WorldMove's executor and its benchmark use it, on host memory: see `cuda.bindings.driver`.

A kernel is its NumPy reference, found by its name; everything is done before a call returns.
"""

from __future__ import annotations

import numpy as np

from cupy import cuda
from worldmove.kernels import runs as _runs
from worldmove.kernels.addresses import memory_at
from worldmove.kernels.pieces import PIECE, digest_pieces, leaves_of

__all__ = [
    "RawModule",
    "asarray",
    "asnumpy",
    "cuda",
    "empty",
    "empty_like",
    "ndarray",
    "uint8",
    "uint64",
    "zeros",
]

uint8, uint64 = np.uint8, np.uint64


class _Data:
    def __init__(self, pointer):
        self.ptr = pointer


class ndarray:  # noqa: N801 - CuPy's name
    """An array at an address; `base` keeps the memory."""

    def __init__(self, array, base=None):
        self.array = array
        self.base = base

    @property
    def data(self):
        return _Data(self.array.ctypes.data)

    @property
    def nbytes(self):
        return self.array.nbytes

    @property
    def shape(self):
        return self.array.shape

    @property
    def size(self):
        return self.array.size

    def copy(self):
        return ndarray(self.array.copy())

    def reshape(self, *shape):
        return ndarray(self.array.reshape(*shape), self)

    def view(self, kind):
        return ndarray(self.array.view(kind), self)

    def __getitem__(self, item):
        return ndarray(self.array[item], self) if isinstance(item, slice) else self.array[item]

    def __setitem__(self, item, value):
        self.array[item] = value.array if isinstance(value, ndarray) else value

    def __iadd__(self, other):
        self.array += other.array if isinstance(other, ndarray) else other
        return self


def asarray(given):
    if isinstance(given, np.ndarray):
        return ndarray(given.copy())
    face = given.__cuda_array_interface__
    kind = np.dtype(face["typestr"])
    nbytes = int(np.prod(face["shape"], dtype=np.int64)) * kind.itemsize
    return ndarray(memory_at(face["data"][0], nbytes).view(kind).reshape(face["shape"]), given)


def asnumpy(given):
    return given.array.copy()


def zeros(shape, dtype):
    return ndarray(np.zeros(shape, dtype))


empty = zeros


def empty_like(other):
    return ndarray(np.zeros_like(other.array))


def _digest(data, count, _leaves, seed, table):
    pieces = data.array.view(PIECE)[: int(count)]
    rows = int((pieces["first_leaf"] + leaves_of(pieces)).max())
    digest_pieces(pieces, int(seed), memory_at(int(table), rows * 16).reshape(-1, 16))


def _words(count, seed):
    z = (np.arange(int(count), dtype=np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _write(data, count, seed):
    data.array.reshape(-1).view(np.uint64)[:] = _words(count, seed)


def _compare(data, count, seed, wrong):
    there = data.array.reshape(-1).view(np.uint64)
    wrong.array[0] += np.count_nonzero(there.view(np.uint8) != _words(count, seed).view(np.uint8))


def _copy_runs(data, _count, _tiles):
    cuda.linger()
    runs = data.array.view(_runs.RUN)
    # As on a device, where runs of one launch go on at once: the order in which they are given is no help.
    _runs.copy_runs(runs[::-1])


_KERNELS = {
    "copy_runs": _copy_runs,
    "fill_runs": lambda data, _count, _tiles, value: _runs.fill_runs(data.array.view(_runs.RUN), int(value)),
    "write_words": _write,
    "compare_words": _compare,
}


class RawModule:
    def __init__(self, **_options):
        pass

    def get_function(self, name):
        kernel = _digest if name.startswith("leaf_digest") else _KERNELS.get(name, lambda *_: None)

        def launch(_grid, _block, arguments, **_how):
            cuda.check()
            kernel(*arguments)

        return launch
