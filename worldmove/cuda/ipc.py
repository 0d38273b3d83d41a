"""GPU memory that a serving stack has allocated itself, opened elsewhere: legacy IPC handles of CUDA.

Memory in WorldMove is a descriptor. A handle is none, but 64 bytes, so it travels on a *card*: a sealed
memory file that holds it. `worldmove.cuda.memory.Device.map` takes a card like any other descriptor of GPU
memory. It keeps nothing alive: the memory goes with the process that allocated it.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from worldmove.cuda.driver import Current, bindings, call, devices
from worldmove.errors import DeviceError, ValidationError

HANDLE_BYTES = 64
_MAGIC = b"WMCUDAIPC\0\0\0\0\0\0\1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_ON_DEVICE = 2


class Export(NamedTuple):
    """Where bytes lie, for other processes.

    Attributes:
        device: UUID of the GPU.
        handle: of the allocation, base64.
        offset: of the bytes in it. room: bytes from there to its end.
    """

    device: str
    handle: str
    offset: int
    room: int


def pid_namespace() -> int:
    """The PID namespace of this process, as a number: handles can be opened within one only."""
    return Path("/proc/self/ns/pid").stat().st_ino


def decode(handle: str) -> bytes:
    """The bytes of a handle.

    Raises:
        ValueError: it is not 64 bytes in base64.
    """
    raw = base64.b64decode(handle, validate=True)
    if len(raw) != HANDLE_BYTES:
        raise ValueError(f"it has {len(raw)} bytes; {HANDLE_BYTES} are allowed")
    return raw


def make_card(handle: bytes) -> int:
    """A descriptor of a handle, which the caller owns."""
    fd = os.memfd_create("worldmove-cuda-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, _MAGIC + handle)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_card(fd: int) -> bytes | None:
    """The handle on a card; `None` where the descriptor is of something else."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    found = os.pread(fd, len(_MAGIC) + HANDLE_BYTES + 1, 0)
    right = len(found) == len(_MAGIC) + HANDLE_BYTES and found.startswith(_MAGIC)
    return found[len(_MAGIC) :] if right else None


def export(address: int, nbytes: int) -> Export:
    """What other processes need to open memory of this one.

    Args:
        address: a device pointer of this process.
        nbytes: from there on, which must lie in one allocation.

    Raises:
        ValidationError: it has no handle. Memory of a kind that can't have one is named: managed memory, that
            of a pool (`cudaMallocAsync`), virtual memory (as PyTorch's `expandable_segments`), host memory.
        DeviceError: the driver refuses.
    """
    driver = bindings()
    _check_kind(driver, address)
    ordinal = int(_ask(driver, "DEVICE_ORDINAL", address))
    context = call(driver, "cuDevicePrimaryCtxRetain", call(driver, "cuDeviceGet", ordinal))
    with Current(driver, context):
        base, size = call(driver, "cuMemGetAddressRange", driver.CUdeviceptr(address))
        handle = call(driver, "cuIpcGetMemHandle", driver.CUdeviceptr(int(base)))
    offset = address - int(base)
    room = int(size) - offset
    if nbytes > room:
        raise ValidationError(f"{nbytes} bytes are needed, its allocation has {room} from there on")
    raw = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    return Export(devices()[ordinal].uuid, base64.b64encode(raw).decode(), offset, room)


def _check_kind(driver: Any, address: int) -> None:
    try:
        on_device = int(_ask(driver, "MEMORY_TYPE", address)) == _ON_DEVICE
    except DeviceError as error:
        raise ValidationError(f"it is no memory of a GPU: {error.message}") from error
    kind = None
    if bool(_ask(driver, "IS_MANAGED", address)):
        kind = "managed memory (cudaMallocManaged)"
    elif not on_device:
        kind = "host memory"
    elif int(_ask(driver, "MEMPOOL_HANDLE", address)):
        kind = "memory of a pool (cudaMallocAsync)"
    elif not bool(_ask(driver, "IS_LEGACY_CUDA_IPC_CAPABLE", address)):
        kind = "virtual memory (cuMemCreate, as PyTorch's expandable_segments allocates)"
    if kind is not None:
        raise ValidationError(
            f"it is {kind}, which has no IPC handle; allowed: memory of cudaMalloc, or arenas of the node"
        )


def _ask(driver: Any, attribute: str, address: int) -> Any:
    kind = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
    return call(driver, "cuPointerGetAttribute", kind, driver.CUdeviceptr(address))


class Opened:
    """Another process's memory where this one sees it, until `close`.

    Attributes:
        address: the device pointer. nbytes: how much of it was asked for.
    """

    def __init__(self, driver: Any, context: Any, handle: bytes, nbytes: int) -> None:
        """Opens it under `context`: that of the device which will use it, its own or a peer.

        Raises:
            DeviceError: the handle can't be opened here: its process has ended, is this very one, or lives in
                another PID namespace; or the memory is smaller than `nbytes`.
        """
        self.nbytes = nbytes
        self.address = 0
        self._driver = driver
        self._context = context
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        lazily = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with Current(driver, context):
            self.address = int(call(driver, "cuIpcOpenMemHandle", opened, lazily))
            try:
                size = int(call(driver, "cuMemGetAddressRange", driver.CUdeviceptr(self.address))[1])
                if size < nbytes:
                    raise DeviceError(f"memory of {size} bytes was opened; {nbytes} are needed")  # noqa: TRY301
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Gives it back; nothing may be using it any more.

        Raises:
            DeviceError: the driver refuses, since the context is lost.
        """
        address, self.address = self.address, 0
        if address:
            with Current(self._driver, self._context):
                call(self._driver, "cuIpcCloseMemHandle", self._driver.CUdeviceptr(address))
