"""Devices, streams and events that have nothing to wait for."""

from __future__ import annotations

import ctypes
import os
import time
from types import SimpleNamespace

from cuda.bindings.driver import lost

_COPY_S = float(os.environ.get("IMAGINED_COPY_MS", "0")) / 1000


class Device:
    attributes = {"MultiProcessorCount": 4}  # noqa: RUF012 - CuPy's shape

    def __init__(self, number=0):
        self.number = number

    def use(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Stream:
    ptr = 0

    def __init__(self, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass


class Event:
    def __init__(self, **_options):
        pass

    ptr = 0

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def get_elapsed_time(_begin, _end):
    return 1.0


def get_current_stream():
    return Stream()


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class CompileException(Exception):  # noqa: N818 - CuPy's name
    pass


class OutOfMemoryError(MemoryError):
    pass


def check():
    """Raises what CUDA says of every call once a context is lost."""
    if lost():
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def linger():
    """What copies take, whatever they copy: where times are compared, the machine's own count for little."""
    if _COPY_S:
        time.sleep(_COPY_S)


def _copy(target, source, length, _direction, _stream):
    check()
    linger()
    ctypes.memmove(target, source, length)


def _set(target, byte, length, _stream=0):
    check()
    ctypes.memset(target, byte, length)


runtime = SimpleNamespace(
    memcpy=lambda target, source, length, _direction: _copy(target, source, length, _direction, 0),
    CUDARuntimeError=CUDARuntimeError,
    memcpyAsync=_copy,
    memsetAsync=_set,
    memset=_set,
    getDeviceCount=lambda: 2,
    eventQuery=lambda _event: lost(),
)
driver = SimpleNamespace(CUDADriverError=CUDADriverError)
compiler = SimpleNamespace(CompileException=CompileException)
memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
