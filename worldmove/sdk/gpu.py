"""Regions on a GPU, mapped into the serving stack's process and viewed by its own library, without a copy."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from typing import Any

from worldmove.cuda.memory import Device, Window
from worldmove.errors import DeviceError, ValidationError
from worldmove.manifest import RAW_DTYPES, Region, numpy_dtype

LIBRARIES = ("cupy", "torch")


class GpuExtent:
    """Memory of a GPU where this process sees it; unmapped once nobody has a view of it any more.

    Attributes:
        device: whose.
        address: the device pointer of its first byte; stays the same.
    """

    def __init__(self, device: Device, fd: int, nbytes: int) -> None:
        mapping = device.map(fd, nbytes)
        self.device = device
        self.address = mapping.address
        # When the process ends, the driver takes back everything by itself, and may be gone before us.
        weakref.finalize(self, _unmap, device, mapping).atexit = False


def _unmap(device: Device, mapping: Window) -> None:
    # A lost context has no work that could still write, and no mappings either.
    with contextlib.suppress(DeviceError):
        device.synchronize()
        mapping.close()


class OwnExtent:
    """A region's memory that the serving stack has allocated itself, and keeps, in this process.

    Attributes:
        device: whose.
        address: the device pointer of the region's first byte.
    """

    def __init__(self, device: Device, address: int, array: Any) -> None:
        self.device = device
        self.address = address
        self._array = array


Extent = GpuExtent | OwnExtent


class GpuArray:
    """A region on a GPU, for any library that understands `__cuda_array_interface__` (version 3).

    bf16 and fp8 are presented as unsigned integers of their size. It keeps the memory alive.
    """

    def __init__(self, extent: Extent, offset: int, shape: tuple[int, ...], typestr: str) -> None:
        self._extent = extent
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": typestr,
            "data": (extent.address + offset, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    @property
    def address(self) -> int:
        """The device pointer."""
        return int(self.__cuda_array_interface__["data"][0])

    @property
    def ordinal(self) -> int:
        """The device's number in this process."""
        return self._extent.device.info.ordinal


def view(region: Region, extent: Extent, offset: int, like: str | None) -> Any:
    """The region as `GpuArray`, or as an array of another library.

    Args:
        region: what the manifest says of it.
        extent: where it lies.
        offset: of its first byte there.
        like: `None`, `cupy` or `torch`.

    Raises:
        ValidationError: the library is unknown or missing, or can't view GPU memory or this dtype.
    """
    array = GpuArray(extent, offset, region.shape, numpy_dtype(region.dtype).str)
    if like is None:
        return array
    if like not in LIBRARIES:
        raise ValidationError(
            f"region {region.name!r} lies on a GPU; like is {like!r}; allowed: {list(LIBRARIES)}",
            field="like",
        )
    try:
        library = importlib.import_module(like)
    except ImportError as error:
        raise ValidationError(f"like is {like!r}, which is not installed", field="like") from error
    return _torch(library, region, extent, offset) if like == "torch" else _cupy(library, array)


def _cupy(cupy: Any, array: GpuArray) -> Any:
    with cupy.cuda.Device(array.ordinal):
        return cupy.asarray(array)


def _torch(torch: Any, region: Region, extent: Extent, offset: int) -> Any:
    device = f"cuda:{extent.device.info.ordinal}"
    raw = RAW_DTYPES.get(region.dtype)
    try:
        kind = getattr(torch, region.dtype) if raw else None
        if region.nbytes == 0:
            return torch.empty(region.shape, dtype=kind or getattr(torch, region.dtype), device=device)
        # As signed integers, which every version of PyTorch takes in.
        typestr = f"<i{raw}" if raw else numpy_dtype(region.dtype).str
        array = GpuArray(extent, offset, region.shape, typestr)
        tensor = torch.as_tensor(array, device=device)
    except (TypeError, AttributeError) as error:
        raise ValidationError(
            f"torch has no type for region {region.name!r} of dtype {region.dtype!r}: {error}", field="like"
        ) from error
    if tensor.data_ptr() != array.address:
        raise ValidationError(f"torch made a copy of region {region.name!r} instead of a view", field="like")
    return tensor.view(kind) if kind is not None else tensor
