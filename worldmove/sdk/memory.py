"""The regions of one rank, mapped into the serving stack's process."""

from __future__ import annotations

import importlib
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worldmove.cuda.memory import Device
from worldmove.errors import ManifestError, NotFoundError, ValidationError
from worldmove.ipc import map_shared
from worldmove.manifest import HOST, RAW_DTYPES, Place, Region, numpy_dtype
from worldmove.sdk.gpu import GpuExtent, OwnExtent, view
from worldmove.sdk.own import address_of

Array = npt.NDArray[Any]


class Descriptor:
    """A descriptor of an extent, open as long as a region lies there: a node may have lost all of them.

    Args:
        fd: copied.
        nbytes: of the extent.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = os.dup(fd)
        self.nbytes = nbytes
        weakref.finalize(self, os.close, self.fd)


class Mapped(NamedTuple):
    """One region where it lies. The mapping lives as long as anybody has a view of it."""

    region: Region
    mapping: mmap.mmap | GpuExtent | OwnExtent
    offset: int
    kept: Descriptor


class RankMemory:
    """Looks regions up by name and views them. Addresses stay the same until a region is resized.

    Args:
        own: memory that the stack has allocated itself, by region: it is viewed where it is.
    """

    def __init__(self, own: Mapping[str, Any] | None = None) -> None:
        self._own = dict(own or {})
        self._regions: dict[str, Mapped] = {}
        self._devices: dict[str, Device] = {}

    def map(self, placed: Iterable[tuple[Region, int, int]], extents: Mapping[int, tuple[int, int]]) -> None:
        """Maps extents, populated, and places regions in them.

        Args:
            placed: regions with their extent and the offset in it.
            extents: descriptor and bytes of each extent; the descriptors stay the caller's.

        Raises:
            TransportError: a descriptor is smaller than announced.
            DeviceError: an extent on a GPU can't be mapped here.
        """
        placed = tuple(placed)
        own = {
            region.name: OwnExtent(self.device(region.device), address_of(array), array)
            for region, _, _ in placed
            if region.source.kind == "cuda-ipc" and (array := self._own.get(region.name)) is not None
        }
        devices = {extent: region.device for region, extent, _ in placed if region.name not in own}
        mappings = {
            index: self._map(device, *extents[index]) for index, device in devices.items() if index in extents
        }
        kept = {index: Descriptor(fd, nbytes) for index, (fd, nbytes) in extents.items()}
        for region, extent, offset in placed:
            if region.name in own:
                self._regions[region.name] = Mapped(region, own[region.name], 0, kept[extent])
            else:
                self._regions[region.name] = Mapped(region, mappings[extent], offset, kept[extent])

    def _map(self, device: str, fd: int, nbytes: int) -> mmap.mmap | GpuExtent:
        if device == HOST:
            return map_shared(fd, nbytes, populate=True)
        return GpuExtent(self.device(device), fd, nbytes)

    def device(self, uuid: str) -> Device:
        """A GPU on which regions lie, or are about to.

        Raises:
            DeviceError: this process can't see it.
        """
        if uuid not in self._devices:
            self._devices[uuid] = Device(uuid)
        return self._devices[uuid]

    def synchronize(self) -> None:
        """Returns when every GPU that owns regions has done all that this process gave it, on every stream.

        Raises:
            DeviceError: some of it failed: nothing can be said about the state.
        """
        for device in self._devices.values():
            device.synchronize()

    @property
    def names(self) -> tuple[str, ...]:
        """The rank's regions."""
        return tuple(self._regions)

    def region(self, name: str) -> Region:
        """What the manifest says of a region of this rank; `NotFoundError` if there is none."""
        return self._mapped(name).region

    def places(self, names: Iterable[str]) -> tuple[list[Descriptor], list[Place]]:
        """Extents, and where each region lies in them; the descriptors stay this object's."""
        mapped = [self._mapped(name) for name in names]
        extents = list(dict.fromkeys(each.kept for each in mapped))
        return extents, [Place(extents.index(each.kept), each.offset) for each in mapped]

    def drop(self, names: Sequence[str]) -> None:
        """Forgets regions; views that exist stay valid."""
        for name in names:
            del self._regions[name]

    def clear(self) -> None:
        """Forgets everything; memory goes when the last view does."""
        self._regions.clear()

    def _mapped(self, name: str) -> Mapped:
        mapped = self._regions.get(name)
        if mapped is None:
            raise NotFoundError(f"this rank has no region {name!r}")
        return mapped

    def array(self, name: str) -> Array:
        """The region as a NumPy array: bf16 as uint16, fp8 as uint8.

        Raises:
            ValidationError: it lies on a GPU.
        """
        region, mapping, offset, _ = self._mapped(name)
        if not isinstance(mapping, mmap.mmap):
            raise ValidationError(f"region {name!r} lies on a GPU, which NumPy can't view", field="like")
        return np.ndarray(region.shape, dtype=numpy_dtype(region.dtype), buffer=mapping, offset=offset)

    def view(self, name: str, like: str | None) -> Any:
        """The region as an array of another library.

        Args:
            name: of the region.
            like: `numpy` or `torch` for host memory, `cupy` or `torch` for a GPU's; `None`: a NumPy array,
                or a `GpuArray`.

        Raises:
            ValidationError: the library is unknown, missing, or can't view such memory or this dtype.
        """
        region, mapping, offset, _ = self._mapped(name)
        if not isinstance(mapping, mmap.mmap):
            return view(region, mapping, offset, like)
        if like is None or like == "numpy":
            return self.array(name)
        if like == "cupy":
            raise ValidationError(
                f"region {name!r} lies in host memory, which CuPy can't view; allowed: 'numpy', 'torch'",
                field="like",
            )
        if like != "torch":
            raise ValidationError(f"like is {like!r}; allowed: 'numpy', 'torch'", field="like")
        return self._torch(name)

    def _torch(self, name: str) -> Any:
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise ValidationError("like is 'torch', which is not installed", field="like") from error
        region = self.region(name)
        array = self.array(name)
        try:
            if region.dtype not in RAW_DTYPES:
                return torch.from_numpy(array)
            return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, region.dtype))
        except (TypeError, AttributeError) as error:
            raise ValidationError(
                f"torch has no type for region {name!r} of dtype {region.dtype!r}: {error}", field="like"
            ) from error


def as_region(given: Region | Mapping[str, Any]) -> Region:
    """A region from itself or from a mapping with the same fields.

    Raises:
        ManifestError: a field is unknown, missing or of the wrong type.
    """
    if isinstance(given, Region):
        return given
    if not isinstance(given, Mapping):
        raise ManifestError(
            f"a region is {given!r}; a `Region`, or a mapping with its fields, is allowed", field="regions"
        )
    unknown = given.keys() - set(Region.__struct_fields__)
    if unknown:
        raise ManifestError(f"a region has no fields {sorted(unknown)}", field="regions")
    try:
        return msgspec.convert(dict(given), Region)
    except msgspec.ValidationError as error:
        raise ManifestError(f"region {given.get('name')!r}: {error}", field="regions") from error


def copy_common(old: Array, new: Array) -> None:
    """Copies what a resized region keeps: the common corner, or the common prefix where dimensions differ."""
    if old.ndim == new.ndim:
        corner = tuple(slice(0, min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))
        new[corner] = old[corner]
    else:
        count = min(old.size, new.size)
        new.reshape(-1)[:count] = old.reshape(-1)[:count]
