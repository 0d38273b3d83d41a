"""Where a state's blocks lie in a world's regions: in place, copied to their own, or copied to the spill.

A block that lies inside a region stays where it is. Any other one is copied when the state is wanted: to the
region of its own name, where that is free and large enough (a tensor that the stack has replaced); else to
its device's *spill* region, at the first gap (a tensor that has appeared, or has grown).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from worldmove.cuda.driver import devices, find
from worldmove.errors import ValidationError
from worldmove.manifest import REGION_ALIGN, Region
from worldmove.torch.walk import HOST, Block, layout_of

SPILL = "~spill."
SPILL_STEP = 1 << 20


class Home(NamedTuple):
    """Where a block belongs; `copy`: its bytes have yet to be brought there."""

    region: str
    offset: int
    copy: bool


class Placement(NamedTuple):
    """Homes of blocks in their order; `wanted`: how large a device's spill must be that has no room.

    Where a device is in `wanted`, the homes of its blocks are not all known.
    """

    homes: list[Home | None]
    wanted: dict[Any, int]


class Arena:
    """The regions of one rank as bytes.

    Args:
        view: a region by name and library, `World.tensor` or `Standby.tensor`.
        regions: of the session; those of other ranks are left out.
        rank: whose.
    """

    def __init__(
        self, view: Callable[[str, str | None], Any], regions: Iterable[Region], rank: int = 0
    ) -> None:
        self.regions = {region.name: region for region in regions if region.rank == rank}
        self.rank = rank
        self._raw = {name: _raw(view, region) for name, region in self.regions.items() if region.nbytes}
        order = sorted((raw.data_ptr(), name) for name, raw in self._raw.items())
        self._starts = [start for start, _ in order]
        self._names = [name for _, name in order]

    def raw(self, name: str) -> Any:
        """A region as a `uint8` tensor.

        Raises:
            ValidationError: there is no such region, or it is empty.
        """
        raw = self._raw.get(name)
        if raw is None:
            raise ValidationError(f"the host state refers to region {name[:128]!r}", field="host_state")
        return raw

    def part(self, name: str, offset: int, nbytes: int) -> Any:
        """Bytes of a region as a `uint8` tensor with a storage of its own.

        Raises:
            ValidationError: they are not there.
        """
        raw = self.raw(name)
        if not 0 <= offset <= offset + nbytes <= raw.numel():
            raise ValidationError(
                f"the host state refers to bytes {offset} to {offset + nbytes} of region {name!r}, "
                f"which has {raw.numel()}",
                field="host_state",
            )
        if raw.device == HOST:
            return torch.from_numpy(raw.numpy()[offset : offset + nbytes])
        return torch.as_tensor(_Slice(raw, offset, nbytes), device=raw.device)

    def spill(self, device: Any) -> str | None:
        """The name of a device's spill region, if it has one."""
        for name, raw in self._raw.items():
            if is_spill(name) and raw.device == device:
                return name
        return None

    def place(self, blocks: Sequence[Block]) -> Placement:
        """Finds each block's home; changes nothing."""
        homes = [self._inside(block) for block in blocks]
        used: dict[str, list[tuple[int, int]]] = defaultdict(list)
        spilled: dict[Any, int] = defaultdict(int)
        full: set[Any] = set()
        for block, home in zip(blocks, homes, strict=True):
            if home is not None:
                used[home.region].append((home.offset, home.offset + block.nbytes))
        for number, block in enumerate(blocks):
            home = homes[number] or self._named(block, used)
            if home is None or is_spill(home.region):
                spilled[block.device] += -(-block.nbytes // REGION_ALIGN) * REGION_ALIGN
            if home is None:
                home = self._gap(block, used)
            if home is None:
                full.add(block.device)
            elif home.copy:
                used[home.region].append((home.offset, home.offset + block.nbytes))
            homes[number] = home
        return Placement(homes, {device: spilled[device] for device in full})

    def _inside(self, block: Block) -> Home | None:
        at = bisect_right(self._starts, block.start) - 1
        if at < 0:
            return None
        name, start = self._names[at], self._starts[at]
        raw = self._raw[name]
        if raw.device != block.device or block.end > start + raw.numel():
            return None
        return Home(name, block.start - start, copy=False)

    def _named(self, block: Block, used: dict[str, list[tuple[int, int]]]) -> Home | None:
        for path in block.paths:
            name = prefix(self.rank) + path
            raw = self._raw.get(name)
            if raw is not None and not used[name] and raw.device == block.device:
                return Home(name, 0, copy=True) if raw.numel() >= block.nbytes else None
        return None

    def _gap(self, block: Block, used: dict[str, list[tuple[int, int]]]) -> Home | None:
        name = self.spill(block.device)
        if name is None:
            return None
        at = 0
        for start, end in sorted(used[name]):
            if start - at >= block.nbytes:
                break
            at = max(at, -(-end // REGION_ALIGN) * REGION_ALIGN)
        return Home(name, at, copy=True) if at + block.nbytes <= self._raw[name].numel() else None

    def copy(self, block: Block, home: Home) -> None:
        """Brings a block's bytes to its home, on its device; does not wait for a GPU."""
        raw = self.raw(home.region)
        for start, end, owner in {
            (leaf.start, leaf.end): (leaf.start, leaf.end, leaf.value) for leaf in block.leaves
        }.values():
            at = home.offset + start - block.start
            raw[at : at + end - start].copy_(_bytes(block.device, start, end, owner))


class _Slice:
    """Bytes of a GPU's memory as torch takes them in without a copy; it keeps `raw` alive."""

    def __init__(self, raw: Any, offset: int, nbytes: int) -> None:
        self._raw = raw
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (raw.data_ptr() + offset, False),
            "strides": None,
            "version": 3,
        }


def regions_of(blocks: Sequence[Block], rank: int, stride_of: Callable[[str], int | None]) -> list[Region]:
    """A region for each block.

    Args:
        blocks: of a state.
        rank: whose state it is.
        stride_of: what a rolling cache shifts by, in bytes, by the region's name.
    """
    found = []
    for block in blocks:
        dtype, shape = layout_of(block)
        name = prefix(rank) + block.name
        where = device_name(block.device)
        found.append(Region(name, dtype, shape, device=where, rank=rank, stride_bytes=stride_of(name)))
    return found


def spill_regions(devices_in_use: Sequence[Any], nbytes: int, rank: int) -> list[Region]:
    """A spill region for each device."""
    return [
        Region(f"{prefix(rank)}{SPILL}{number}", "uint8", (nbytes,), device=device_name(device), rank=rank)
        for number, device in enumerate(devices_in_use)
    ]


def is_spill(name: str) -> bool:
    """Whether a region is a spill: no path of a state has a tilde in it."""
    return SPILL in name


def prefix(rank: int) -> str:
    """What the names of a rank's regions begin with, so that those of all ranks differ."""
    return f"r{rank}:" if rank else ""


def device_name(device: Any) -> str:
    """A torch device as a manifest names it.

    Raises:
        DeviceError: CUDA's driver can't be asked.
        ValidationError: the device is not there.
    """
    if device == HOST:
        return "host"
    for info in devices():
        if info.ordinal == device.index:
            return info.uuid
    raise ValidationError(f"device {device} is not here", field="state")


def torch_device(name: str) -> Any:
    """The torch device that a manifest names; `DeviceError` if it is not here."""
    return HOST if name == "host" else torch.device("cuda", find(name).ordinal)


def _raw(view: Callable[[str, str | None], Any], region: Region) -> Any:
    if region.device == "host":
        return torch.from_numpy(view(region.name, None).reshape(-1).view(np.uint8))
    return view(region.name, "torch").reshape(-1).view(torch.uint8)


def _bytes(device: Any, start: int, end: int, owner: Any) -> Any:
    """The memory of a leaf's storage as a `uint8` tensor; `owner` keeps it alive meanwhile."""
    if device == HOST:
        memory = (ctypes.c_ubyte * (end - start)).from_address(start)
        return torch.frombuffer(memory, dtype=torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(owner.untyped_storage(), 0, (end - start,), (1,))
