"""Changing a rank's regions in the worker: allocates, copies, and describes the change for the node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from worldmove.errors import ManifestError
from worldmove.manifest import HOST, Extent, Manifest, Region, Source, itemsize, layout, validate
from worldmove.memory.arena import create_arena
from worldmove.page.messages import Put, Revise
from worldmove.sdk.corner import corner
from worldmove.sdk.memory import RankMemory, as_region, copy_common


class Change(NamedTuple):
    """What a stack asks for."""

    add: tuple[Region | Mapping[str, Any], ...]
    drop: tuple[str, ...]
    resize: dict[str, Sequence[int]]


def make_revision(
    manifest: Manifest, rank: int, memory: RankMemory, change: Change
) -> tuple[Manifest, Revise, list[int]] | None:
    """Carries a change out in this process.

    Returns:
        The new manifest, the message for the node (not numbered yet), and the descriptors that go with
        it, which the caller owns; `None` if the change changes nothing.

    Raises:
        ManifestError: the manifest would not be valid, or a region is not this rank's.
        NoMemoryError: the new memory does not fit; nothing has changed.
    """
    _check_names(manifest, rank, change)
    resized = {name: _resized(manifest, name, shape) for name, shape in change.resize.items()}
    resized = {name: region for name, region in resized.items() if region != memory.region(name)}
    added = [_added(given, rank) for given in change.add]
    if not (resized or added or change.drop):
        return None
    regions = [resized.get(r.name, r) for r in manifest.regions if r.name not in change.drop]
    revised = msgspec.structs.replace(manifest, regions=(*regions, *added), revision=manifest.revision + 1)
    validate(revised)
    _check_devices(manifest, *resized.values(), *added)
    if len(revised.ranks) != len(manifest.ranks):
        raise ManifestError(f"rank {rank} would be left without a region", field="drop")
    fresh = (*resized.values(), *added)
    extents, places = layout(fresh)
    fds: list[int] = []
    try:
        for extent in extents:
            fds.append(_create(memory, extent))  # noqa: PERF401 - what there is when one fails is closed
        memory.synchronize()
        old = {name: (memory.region(name), memory.view(name, None)) for name in resized}
        memory.map(
            [(region, *place) for region, place in zip(fresh, places, strict=True)],
            {index: (fd, extent.nbytes) for index, (fd, extent) in enumerate(zip(fds, extents, strict=True))},
        )
        _fill(memory, fresh, old)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    memory.drop(change.drop)
    put = tuple(Put(region, *place) for region, place in zip(fresh, places, strict=True))
    sizes = tuple(extent.nbytes for extent in extents)
    devices = tuple(extent.device for extent in extents)
    return revised, Revise(0, change.drop, put, sizes, devices), fds


def _create(memory: RankMemory, extent: Extent) -> int:
    if extent.device == HOST:
        return create_arena(extent.nbytes, "worldmove-revision")
    return memory.device(extent.device).create(extent.nbytes)


def _fill(memory: RankMemory, fresh: Iterable[Region], old: Mapping[str, tuple[Region, Any]]) -> None:
    """Clears new memory on GPUs, and copies what resized regions keep; all of it is there afterwards."""
    for region in fresh:
        before = old.get(region.name)
        if region.device == HOST:
            if before is not None:
                copy_common(before[1], memory.array(region.name))
            continue
        device, address = memory.device(region.device), memory.view(region.name, None).address
        if region.nbytes:
            device.clear(address, region.nbytes)
        if before is None:
            continue
        item, addresses = itemsize(region.dtype), (before[1].address, address)
        for rows in corner(before[0].shape, region.shape, item, addresses):
            device.copy_rows(rows)
    memory.synchronize()


def _check_names(manifest: Manifest, rank: int, change: Change) -> None:
    mine = {region.name for region in manifest.regions if region.rank == rank}
    unknown = sorted((set(change.drop) | change.resize.keys()) - mine)
    if unknown:
        raise ManifestError(f"regions {unknown} are not rank {rank}'s", field="regions", fields=unknown)
    twice = sorted(set(change.drop) & change.resize.keys())
    if twice or len(set(change.drop)) != len(change.drop):
        raise ManifestError(f"regions {twice or list(change.drop)} are named twice", field="regions")


def _check_devices(manifest: Manifest, *fresh: Region) -> None:
    """A session does not come to a device that it had no region on: its fingerprint would not cover it."""
    allowed = (HOST, *manifest.gpus)
    for region in fresh:
        if region.device not in allowed:
            raise ManifestError(
                f"region {region.name!r} lies on {region.device!r}; allowed: host memory and the devices of "
                f"the session's regions, {list(allowed)}",
                field="device",
            )


def _resized(manifest: Manifest, name: str, shape: Sequence[int]) -> Region:
    old = next(region for region in manifest.regions if region.name == name)
    # Memory of its own: what was shared under a name keeps its old size.
    return msgspec.structs.replace(old, shape=tuple(int(size) for size in shape), source=Source())


def _added(given: Region | Mapping[str, Any], rank: int) -> Region:
    region = as_region(given if isinstance(given, Region) else {"rank": rank, **given})
    if region.rank != rank or region.source.kind != "arena":
        raise ManifestError(
            f"region {region.name!r} must be of rank {rank} and in memory that the SDK allocates", field="add"
        )
    return region
