"""CUDA's driver as far as WorldMove uses it, on host memory: two GPUs whose memory is made of memory files.

For tests of what happens around a GPU, on machines without one: processes, descriptors, who maps what, who
is asked. It proves nothing about CUDA. Processes that a test starts find it through PYTHONPATH.
"""

# ruff: noqa: N802 - the names are CUDA's

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

GRANULARITY = 2 << 20
TOTAL = 1 << 30
COUNT = 2
CU_MEMHOSTREGISTER_DEVICEMAP = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10
_NOTHING = 0


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


OK, INVALID, FULL = CUresult


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):  # noqa: N801 - CUDA's name
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801 - CUDA's name
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUdevice_attribute(IntEnum):  # noqa: N801 - CUDA's name
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


def CUmemAllocationProp() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace())


def CUmemAccessDesc() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace())


CUdeviceptr = int
CUstream = int


def cuInit(_flags):
    return (OK,)


def cuDeviceGetCount():
    return OK, COUNT


def cuDeviceGet(ordinal):
    return OK, ordinal


def cuDeviceGetName(_length, _device):
    return OK, b"Imagined\0\0"


def cuDeviceGetAttribute(_attribute, _device):
    return OK, 4


def cuDriverGetVersion():
    return OK, 13000


def cuDeviceGetUuid(device):
    return OK, SimpleNamespace(bytes=bytes([device + 1]) * 16)


def cuDeviceGetPCIBusId(_length, device):
    return OK, f"0000:0{device}:00.0".encode() + b"\0\0"


def cuDeviceTotalMem(_device):
    return OK, TOTAL


def cuDevicePrimaryCtxRetain(device):
    return OK, device


def cuCtxPushCurrent(_context):
    return (OK,)


def cuCtxPopCurrent():
    return OK, 0


def cuCtxSynchronize():
    return (OK,)


def cuMemGetInfo():
    return OK, TOTAL // 2, TOTAL


def cuMemGetAllocationGranularity(_properties, _option):
    return OK, GRANULARITY


def cuMemCreate(size, _properties, _flags):
    if size > TOTAL:
        return FULL, None
    fd = os.memfd_create("imagined-gpu")
    os.ftruncate(fd, size)
    os.pwrite(fd, b"\xee" * 4096, 0)
    return OK, fd


def cuMemExportToShareableHandle(handle, _kind, _flags):
    return OK, os.dup(handle)


def cuMemImportFromShareableHandle(fd, _kind):
    if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:imagined-gpu"):
        return INVALID, None
    return OK, os.dup(fd)


def cuMemRelease(handle):
    os.close(handle)
    return (OK,)


def cuMemAddressReserve(size, _alignment, _address, _flags):
    return OK, _libc.mmap(None, size, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def cuMemMap(address, size, _offset, handle, _flags):
    if size != os.fstat(handle).st_size:
        return (INVALID,)
    _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle, 0)
    return (OK,)


def cuMemSetAccess(_address, _size, _access, _count):
    return (OK,)


def cuMemUnmap(address, size):
    _libc.mmap(address, size, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
    return (OK,)


def cuMemAddressFree(address, size):
    _libc.munmap(address, size)
    return (OK,)


def cuMemHostRegister(_address, _nbytes, _flags):
    return (OK,)


def cuMemHostUnregister(_address):
    return (OK,)


def cuMemHostGetDevicePointer(address, _flags):
    return OK, address


def cuMemcpyAsync(target, source, nbytes, _stream):
    ctypes.memmove(target, source, nbytes)
    return (OK,)
