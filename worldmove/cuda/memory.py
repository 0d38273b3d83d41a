"""GPU memory by descriptor: made on a device, passed on like any other descriptor, mapped by whoever has it.

An allocation of CUDA's virtual memory lives as long as somebody holds a descriptor or a mapping of it, also
when the process that made it was killed and only a process without CUDA holds the descriptor. Its size can't
be read from the descriptor (`fstat` knows nothing of it): whoever passes it on says how much was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from worldmove.cuda.driver import Current, DeviceInfo, bindings, call, devices, find
from worldmove.cuda.ipc import Opened, read_card
from worldmove.errors import NoMemoryError


class Rows(NamedTuple):
    """`height` rows of `width` bytes each; from one row to the next it is a pitch, at either end."""

    source: int
    target: int
    width: int
    height: int
    source_pitch: int
    target_pitch: int


class Device:
    """One GPU, with its primary context kept alive: the one that CuPy and PyTorch use, too.

    Attributes:
        info: which one.
    """

    def __init__(self, uuid: str) -> None:
        """Finds the device.

        Raises:
            DeviceError: it is not here, or has no room for a context.
        """
        self.info: DeviceInfo = find(uuid)
        self._driver = bindings()
        self._device = call(self._driver, "cuDeviceGet", self.info.ordinal)
        self._context = call(self._driver, "cuDevicePrimaryCtxRetain", self._device)
        self._granularity = int(
            call(
                self._driver,
                "cuMemGetAllocationGranularity",
                self._properties(),
                self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def room(self, nbytes: int) -> int:
        """Bytes that an allocation of `nbytes` takes."""
        return -(-nbytes // self._granularity) * self._granularity

    def free(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        with Current(self._driver, self._context):
            free, total = call(self._driver, "cuMemGetInfo")
        return int(free), int(total)

    def access(self, others: Sequence[str]) -> list[bool | None]:
        """Whether this device has peer access to each of these, by UUID; `None`: this process can't see it.

        Raises:
            DeviceError: the driver refuses.
        """
        seen = {device.uuid: device.ordinal for device in devices()}
        return [self._access(seen[other]) if other in seen else None for other in others]

    def _access(self, ordinal: int) -> bool:
        driver = self._driver
        other = call(driver, "cuDeviceGet", ordinal)
        return ordinal == self.info.ordinal or bool(
            call(driver, "cuDeviceCanAccessPeer", self._device, other)
        )

    def create(self, nbytes: int) -> int:
        """Allocates at least `nbytes`, contents undefined.

        Returns:
            A descriptor that the caller owns; it is not inherited by children.

        Raises:
            NoMemoryError: the device has not that much; says how much it has.
            DeviceError: the driver refuses for another reason.
        """
        driver, kind = self._driver, self._descriptor_kind()
        try:
            handle = call(driver, "cuMemCreate", self.room(nbytes), self._properties(), 0)
        except NoMemoryError as error:
            free = self.free()[0]
            raise NoMemoryError(
                f"{self.room(nbytes)} bytes of {self.info.uuid} are needed, {free} are available",
                required_bytes=self.room(nbytes),
                available_bytes=free,
            ) from error
        try:
            fd = int(call(driver, "cuMemExportToShareableHandle", handle, kind, 0))
        finally:
            call(driver, "cuMemRelease", handle)
        os.set_inheritable(fd, False)
        return fd

    def map(self, fd: int, nbytes: int) -> Window:
        """Maps memory for use by this device, which may be another one's that it can reach.

        Args:
            fd: of `create`, in whatever process and on whatever device, or a card (`worldmove.cuda.ipc`);
                stays the caller's.
            nbytes: as given to `create`; of a card, as much as is wanted.

        Raises:
            DeviceError: it is no descriptor of GPU memory, has another size, or the device can't reach it.
            NoMemoryError: no room for the page tables.
        """
        handle = read_card(fd)
        if handle is not None:
            return Opened(self._driver, self._context, handle, nbytes)
        return Mapping(self._driver, self.info.ordinal, fd, self.room(nbytes), self._descriptor_kind())

    def allocate(self, nbytes: int) -> int:
        """Plain memory, contents undefined, for this process alone; it goes with the process.

        It is the kind that libraries can export (CUDA IPC) or register (RDMA), as `create`'s is not.

        Returns:
            Its address.

        Raises:
            NoMemoryError: the device has not that much.
        """
        with Current(self._driver, self._context):
            return int(call(self._driver, "cuMemAlloc", nbytes))

    def register(self, address: int, nbytes: int) -> int:
        """Locks host memory of this process, so that the device reads and writes it directly.

        Args:
            address: where the mapping begins, a multiple of a page.
            nbytes: how much of it.

        Returns:
            Its address as the device sees it.

        Raises:
            DeviceError: the driver refuses.
        """
        with Current(self._driver, self._context):
            call(
                self._driver, "cuMemHostRegister", address, nbytes, self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
            )
            return int(call(self._driver, "cuMemHostGetDevicePointer", address, 0))

    def unregister(self, address: int) -> None:
        """Undoes `register`; nothing of the device's may be using the memory any more."""
        with Current(self._driver, self._context):
            call(self._driver, "cuMemHostUnregister", address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy between addresses that this device can reach; done after `synchronize`.

        Raises:
            DeviceError: the driver refuses.
        """
        driver = self._driver
        with Current(driver, self._context):
            call(
                driver,
                "cuMemcpyAsync",
                driver.CUdeviceptr(target),
                driver.CUdeviceptr(source),
                nbytes,
                driver.CUstream(0),
            )

    def clear(self, address: int, nbytes: int) -> None:
        """Begins to set bytes to zero; done after `synchronize`.

        Raises:
            DeviceError: the driver refuses.
        """
        driver = self._driver
        with Current(driver, self._context):
            call(driver, "cuMemsetD8Async", driver.CUdeviceptr(address), 0, nbytes, driver.CUstream(0))

    def copy_rows(self, rows: Rows) -> None:
        """Begins to copy rows between addresses of this device; done after `synchronize`.

        Raises:
            DeviceError: the driver refuses.
        """
        driver = self._driver
        kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        wanted = driver.CUDA_MEMCPY2D()
        wanted.srcMemoryType, wanted.dstMemoryType = kind, kind
        wanted.srcDevice, wanted.dstDevice = driver.CUdeviceptr(rows.source), driver.CUdeviceptr(rows.target)
        wanted.srcPitch, wanted.dstPitch = rows.source_pitch, rows.target_pitch
        wanted.WidthInBytes, wanted.Height = rows.width, rows.height
        with Current(driver, self._context):
            call(driver, "cuMemcpy2DUnaligned", wanted)

    def synchronize(self) -> None:
        """Returns when everything is done that this process has given this device to do, on every stream.

        Raises:
            DeviceError: some of it failed; the context is lost.
        """
        with Current(self._driver, self._context):
            call(self._driver, "cuCtxSynchronize")

    def _descriptor_kind(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_kind()
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.info.ordinal
        return properties


class Mapping:
    """Memory where this process sees it, until `close`.

    Attributes:
        address: the device pointer. nbytes: of the mapping, a multiple of the device's granularity.
    """

    def __init__(self, driver: Any, ordinal: int, fd: int, nbytes: int, kind: Any) -> None:
        self.nbytes = nbytes
        self.address = 0
        self._driver = driver
        self._mapped = False
        handle = call(driver, "cuMemImportFromShareableHandle", fd, kind)
        try:
            self.address = int(call(driver, "cuMemAddressReserve", nbytes, 0, driver.CUdeviceptr(0), 0))
            call(driver, "cuMemMap", self._pointer, nbytes, 0, handle, 0)
            self._mapped = True
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = ordinal
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call(driver, "cuMemSetAccess", self._pointer, nbytes, [access], 1)
        except BaseException:
            self.close()
            raise
        finally:
            # The mapping holds the memory from now on.
            call(driver, "cuMemRelease", handle)

    @property
    def _pointer(self) -> Any:
        return self._driver.CUdeviceptr(self.address)

    def close(self) -> None:
        """Unmaps it; nothing may be using it any more.

        Raises:
            DeviceError: the driver refuses, since the context is lost.
        """
        address, self.address = self.address, 0
        if not address:
            return
        pointer = self._driver.CUdeviceptr(address)
        if self._mapped:
            call(self._driver, "cuMemUnmap", pointer, self.nbytes)
        call(self._driver, "cuMemAddressFree", pointer, self.nbytes)


Window = Mapping | Opened
"""GPU memory where this process sees it, until `close`; both have `address` and `nbytes`."""
