"""CUDA's driver as far as WorldMove uses it, on host memory: two GPUs whose memory is made of memory files.

For tests of what happens around a GPU, on machines without one: processes, descriptors, who maps what, who
is asked. It proves nothing about CUDA. Processes that a test starts find it through PYTHONPATH.
"""

# ruff: noqa: N802 - the names are CUDA's

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import uuid
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

GRANULARITY = 2 << 20
TOTAL = int(os.environ.get("IMAGINED_BYTES", str(1 << 30)))
"""Of each GPU."""
COUNT = int(os.environ.get("IMAGINED_GPUS", "2"))
CU_MEMHOSTREGISTER_DEVICEMAP = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10
_NOTHING = 0
_ROOM = os.environ.get("IMAGINED_ROOM", "")
"""Processes of one room share the GPUs' memory: what one holds the others lack."""
_LOSSES = os.environ.get("IMAGINED_LOST", "")
_PEERS = os.environ.get("IMAGINED_PEERS", "")
"""`none`: no GPU has access to the other's memory; `denied`: that is only seen when it is to be mapped."""
_GIVEN = os.environ.get("CUDA_VISIBLE_DEVICES", "")
_seen = [
    number
    for number in range(COUNT)
    if "GPU-" not in _GIVEN or f"GPU-{uuid.UUID(bytes=bytes([number + 1]) * 16)}" in _GIVEN.split(",")
]
"""Which of the GPUs each ordinal of this process is."""
_owners = {}
"""Address of a mapping to the GPU whose memory it is."""
_current = []
_allocated = {}
"""Base address to size, descriptor and kind, of what is no virtual memory."""


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK, INVALID, FULL, LOST = CUresult


def lost():
    """700 once this process's context is lost, which is sticky; 0 before.

    It is lost once a file with its pid for a name lies in the folder `IMAGINED_LOST`.
    """
    return int(LOST) if _LOSSES and Path(_LOSSES, str(os.getpid())).exists() else 0


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemorytype(IntEnum):
    CU_MEMORYTYPE_DEVICE = 2


class CUipcMem_flags(IntEnum):  # noqa: N801 - CUDA's name
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1


class CUpointer_attribute(IntEnum):  # noqa: N801 - CUDA's name
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17


class CUmemAccess_flags(IntEnum):  # noqa: N801 - CUDA's name
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801 - CUDA's name
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUdevice_attribute(IntEnum):  # noqa: N801 - CUDA's name
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUipcMemHandle:
    def __init__(self):
        self._raw = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self._raw)


class CUDA_MEMCPY2D:  # noqa: N801 - CUDA's name
    pass


def CUmemAllocationProp() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace())


def CUmemAccessDesc() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace())


CUdeviceptr = int
CUstream = int


def cuInit(_flags):
    return (OK,)


def cuDeviceGetCount():
    return OK, len(_seen)


def cuDeviceGet(ordinal):
    return OK, ordinal


def cuDeviceGetName(_length, _device):
    return OK, b"Imagined\0\0"


def cuDeviceGetAttribute(_attribute, _device):
    return OK, 4


def cuDriverGetVersion():
    return OK, 13000


def cuDeviceGetUuid(device):
    return OK, SimpleNamespace(bytes=bytes([_seen[device] + 1]) * 16)


def cuDeviceCanAccessPeer(_device, _other):
    return OK, int(_PEERS != "none")


def cuDeviceGetPCIBusId(_length, device):
    return OK, f"0000:0{_seen[device]}:00.0".encode() + b"\0\0"


def cuDeviceTotalMem(_device):
    return OK, TOTAL


def cuDevicePrimaryCtxRetain(device):
    return OK, device


def cuCtxPushCurrent(context):
    _current.append(context)
    return (OK,)


def cuCtxPopCurrent():
    return OK, _current.pop()


def cuCtxSynchronize():
    if lost():
        return (LOST,)
    return (OK,)


def cuMemGetInfo():
    if lost():
        return LOST, 0, 0
    return OK, TOTAL - _used(_current[-1]) if _ROOM else TOTAL // 2, TOTAL


def _name(ordinal):
    return f"imagined-gpu-{_seen[ordinal]}-{_ROOM}"


def _owner(fd):
    """The GPU whose memory a descriptor is; `None`: it is something else, or of one that is not seen."""
    name = str(Path(f"/proc/self/fd/{fd}").readlink())
    found = int(name.split("-")[2]) if name.startswith("/memfd:imagined-gpu-") else None
    return found if found in _seen else None


def _used(ordinal):
    """Bytes of one GPU that processes of this room hold, looked up in all of them."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith(f"/memfd:{_name(ordinal)} "):
                status = link.stat()
                found[status.st_ino] = status.st_size
        except OSError:
            continue
    return sum(found.values())


def cuMemGetAllocationGranularity(_properties, _option):
    return OK, GRANULARITY


def cuMemCreate(size, properties, _flags):
    if lost():
        return LOST, None
    ordinal = properties.location.id
    if size > (TOTAL - _used(ordinal) if _ROOM else TOTAL):
        return FULL, None
    fd = os.memfd_create(_name(ordinal))
    os.ftruncate(fd, size)
    os.pwrite(fd, b"\xee" * 4096, 0)
    return OK, fd


def cuMemExportToShareableHandle(handle, _kind, _flags):
    return OK, os.dup(handle)


def cuMemImportFromShareableHandle(fd, _kind):
    if _owner(fd) is None:
        return INVALID, None
    return OK, os.dup(fd)


def cuMemRelease(handle):
    os.close(handle)
    return (OK,)


def cuMemAddressReserve(size, _alignment, _address, _flags):
    return OK, _libc.mmap(None, size, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def cuMemMap(address, size, _offset, handle, _flags):
    if lost():
        return (LOST,)
    if size != os.fstat(handle).st_size:
        return (INVALID,)
    _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle, 0)
    _owners[address] = _owner(handle)
    return (OK,)


def cuMemSetAccess(address, _size, access, _count):
    return (INVALID,) if _PEERS and _owners[address] != _seen[access[0].location.id] else (OK,)


def cuMemUnmap(address, size):
    if lost():
        return (LOST,)
    _libc.mmap(address, size, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
    del _owners[address]
    return (OK,)


def cuMemAddressFree(address, size):
    _libc.munmap(address, size)
    return (OK,)


def cuMemHostRegister(_address, _nbytes, _flags):
    if lost():
        return (LOST,)
    return (OK,)


def cuMemHostUnregister(_address):
    if lost():
        return (LOST,)
    return (OK,)


def cuMemHostGetDevicePointer(address, _flags):
    return OK, address


def cuMemsetD8Async(address, byte, nbytes, _stream):
    ctypes.memset(address, byte, nbytes)
    return (OK,)


def cuMemcpy2DUnaligned(rows):
    for row in range(rows.Height):
        source, target = rows.srcDevice + row * rows.srcPitch, rows.dstDevice + row * rows.dstPitch
        ctypes.memmove(target, source, rows.WidthInBytes)
    return (OK,)


def cuMemAlloc(size):
    return OK, _alloc(size, "plain")


def cuMemAllocManaged(size, _flags):
    return OK, _alloc(size, "managed")


def cuMemAllocAsync(size, _stream):
    return OK, _alloc(size, "pool")


def _alloc(size, kind):
    fd = os.memfd_create(_name(_current[-1]))
    os.ftruncate(fd, size)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    _allocated[address] = (size, fd, kind, _current[-1])
    return address


def _found(address):
    return next((base for base, one in _allocated.items() if base <= address < base + one[0]), None)


def cuMemGetAddressRange(address):
    base = _found(address)
    return (OK, base, _allocated[base][0]) if base is not None else (INVALID, 0, 0)


def cuPointerGetAttribute(attribute, address):
    base = _found(address)
    kind, ordinal = _allocated[base][2:] if base is not None else ("virtual", 0)
    answers = {
        CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2,
        CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED: kind == "managed",
        CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: ordinal,
        CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: kind == "plain",
        CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: int(kind == "pool"),
    }
    return OK, answers[attribute]


def cuIpcGetMemHandle(address):
    size, fd, _kind, _ordinal = _allocated[address]
    handle = CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), struct.pack("<QQQ40x", os.getpid(), fd, size), 64)
    return OK, handle


def cuIpcOpenMemHandle(handle, _flags):
    pid, number, size = struct.unpack("<QQQ40x", ctypes.string_at(handle.getPtr(), 64))
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError:
        return INVALID, 0
    if pid == os.getpid() or size != os.fstat(fd).st_size:
        os.close(fd)
        return INVALID, 0
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    _allocated[address] = (size, fd, "opened", _current[-1])
    return OK, address


def cuIpcCloseMemHandle(address):
    size, fd, _kind, _ordinal = _allocated.pop(address)
    _libc.munmap(address, size)
    os.close(fd)
    return (OK,)


def cuMemcpyAsync(target, source, nbytes, _stream):
    ctypes.memmove(target, source, nbytes)
    return (OK,)
