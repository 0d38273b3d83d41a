"""Regions whose memory the serving stack has allocated itself on a GPU: recognised, described, kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from worldmove.cuda.ipc import export, pid_namespace
from worldmove.errors import ManifestError, ValidationError
from worldmove.manifest import HOST, Region, Source


def own_region(region: Region, array: Any) -> Region:
    """The region with its source: memory of this process, opened by others by a handle (`cuda-ipc`).

    Args:
        region: what to register; its device may be left at `host`: that of the array is put in.
        array: a tensor of PyTorch, or anything with `__cuda_array_interface__`; contiguous, of its size.

    Raises:
        ManifestError: the array is no such, has another size, lies on another device, or in memory without
            a handle: managed, of a pool (`cudaMallocAsync`), or virtual (`expandable_segments`); the message
            says which, and `details["field"]` is `memory`.
        DeviceError: CUDA's driver refuses.
    """
    try:
        address, nbytes = _extent(array)
        if nbytes != region.nbytes:
            raise ValidationError(f"it has {nbytes} bytes, the region {region.nbytes}")  # noqa: TRY301
        found = export(address, nbytes)
    except ValidationError as error:
        raise ManifestError(f"memory of region {region.name!r}: {error.message}", field="memory") from error
    if region.device not in (HOST, found.device):
        raise ManifestError(
            f"memory of region {region.name!r} lies on {found.device}, and device is {region.device!r}",
            field="memory",
        )
    source = Source("cuda-ipc", None, found.offset, found.handle, pid_namespace())
    return replace(region, device=found.device, source=source)


def own_regions(regions: Iterable[Region], memory: Mapping[str, Any]) -> tuple[Region, ...]:
    """Regions, each whose name `memory` has with its source; raises as `own_region`."""
    given = tuple(regions)
    unknown = sorted(memory.keys() - {region.name for region in given})
    if unknown:
        raise ManifestError(f"memory names {unknown}, which are no regions", field="memory")
    return tuple(
        own_region(region, memory[region.name]) if region.name in memory else region for region in given
    )


def address_of(array: Any) -> int:
    """The device pointer of an array that `own_region` has accepted."""
    return _extent(array)[0]


def _extent(array: Any) -> tuple[int, int]:
    """Address and bytes.

    Raises:
        ValidationError: it is no contiguous array on a GPU.
    """
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        # PyTorch: its bf16 tensors have no array interface.
        if array.device.type != "cuda" or not array.is_contiguous():
            raise ValidationError("a contiguous tensor on a GPU is allowed")
        return int(array.data_ptr()), int(array.numel()) * int(array.element_size())
    face = getattr(array, "__cuda_array_interface__", None)
    if face is None:
        raise ValidationError("a tensor of PyTorch or an array with `__cuda_array_interface__` is allowed")
    item = int(face["typestr"][2:])
    nbytes = item
    strides = face.get("strides")
    for axis in reversed(range(len(face["shape"]))):
        if strides is not None and face["shape"][axis] > 1 and strides[axis] != nbytes:
            raise ValidationError("a contiguous array is allowed")
        nbytes *= face["shape"][axis]
    return int(face["data"][0]), nbytes
