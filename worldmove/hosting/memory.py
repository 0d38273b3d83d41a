"""Where the regions of one session lie on this node: extents, descriptors, places, and their revisions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from worldmove.errors import ManifestError
from worldmove.hosting.shared import open_shared
from worldmove.ipc import close_all
from worldmove.manifest import REGION_ALIGN, Extent, LeafMap, Manifest, Place, Region, layout, validate
from worldmove.page.messages import Revise

HOST = "host"


class Arenas(Protocol):
    """What hosting needs of the memory budget (`worldmove.memory.arena.MemoryBudget`)."""

    async def allocate(self, sizes: Sequence[int], name: str) -> list[int]:
        """Makes arenas of host memory, all or none; `NoMemoryError` if they do not fit."""

    async def allocate_on(self, device: str, nbytes: int) -> int:
        """Makes an arena on a GPU; `ManifestError` if the node has no such, `NoMemoryError` if it is full."""

    def adopt(self, nbytes: int) -> None:
        """Counts memory that a worker made itself."""

    def release(self, nbytes: int) -> None:
        """Takes back what was counted."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory as it is at one revision; a later revision is another value.

    Attributes:
        extents: one for each allocation. `fds` are theirs, `counted` says which the budget counts.
        places: one for each region of the manifest.
        leaf_map: of the manifest.
    """

    manifest: Manifest
    extents: tuple[Extent, ...]
    places: tuple[Place, ...]
    fds: tuple[int, ...] = field(repr=False)
    counted: tuple[bool, ...] = field(repr=False)
    leaf_map: LeafMap = field(repr=False)

    @property
    def counted_bytes(self) -> int:
        """Bytes that the budget counts."""
        return sum(e.nbytes for e, counted in zip(self.extents, self.counted, strict=True) if counted)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Indices of a rank's extents."""
        return tuple(index for index, extent in enumerate(self.extents) if extent.rank == rank)


async def take(manifest: Manifest, arenas: Arenas, name: str) -> Holding:
    """Allocates what the manifest wants from the node and opens what it names.

    Raises:
        ManifestError: a region is malformed, or its shared memory is not there.
        NoMemoryError: the arenas do not fit; nothing stays allocated.
    """
    validate(manifest)
    own = tuple(region for region in manifest.regions if region.source.kind == "arena")
    extents, own_places = layout(own)
    with contextlib.ExitStack() as undo:
        shared, shared_fds, found = _open_all(manifest, len(extents))
        undo.callback(close_all, shared_fds)
        fds = await _allocate(extents, arenas, name)
        undo.pop_all()
    ours = iter(own_places)
    places = tuple(
        next(ours) if region.source.kind == "arena" else found[number]
        for number, region in enumerate(manifest.regions)
    )
    counted = (*(extent.device == HOST for extent in extents), *(False for _ in shared))
    return Holding(
        manifest, (*extents, *shared), places, (*fds, *shared_fds), counted, LeafMap(manifest.regions)
    )


async def _allocate(extents: Sequence[Extent], arenas: Arenas, name: str) -> list[int]:
    """One descriptor for each extent, in order; all or none."""
    sizes = [extent.nbytes for extent in extents if extent.device == HOST]
    made: list[int] = []
    try:
        by_number: dict[int, int] = {}
        for number, extent in enumerate(extents):
            if extent.device != HOST:
                by_number[number] = await arenas.allocate_on(extent.device, extent.nbytes)
                made.append(by_number[number])
        ours = iter(await arenas.allocate(sizes, name) if sizes else [])
    except BaseException:
        close_all(made)
        raise
    return [by_number[n] if n in by_number else next(ours) for n in range(len(extents))]


def _open_all(manifest: Manifest, first: int) -> tuple[list[Extent], list[int], dict[int, Place]]:
    """One extent for each shared object and rank; its index counts on from `first`."""
    extents: list[Extent] = []
    fds: list[int] = []
    index: dict[tuple[int, str], int] = {}
    places: dict[int, Place] = {}
    try:
        for number, region in enumerate(manifest.regions):
            name = region.source.name
            if region.source.kind != "shm" or name is None:
                continue
            key = (region.rank, name.removeprefix("/"))
            needed = max(region.source.offset + region.nbytes, 1)
            if key not in index:
                fd, size = open_shared(name, needed, f"regions[{number}].source.name")
                fds.append(fd)
                index[key] = first + len(extents)
                extents.append(Extent(region.rank, region.device, size))
            _check_inside(number, name, needed, extents[index[key] - first].nbytes)
            places[number] = Place(index[key], region.source.offset)
    except BaseException:
        close_all(fds)
        raise
    return extents, fds, places


def _check_inside(number: int, name: str, needed: int, size: int) -> None:
    if size < needed:
        raise ManifestError(
            f"regions[{number}] ends at byte {needed} of {name!r}, which has {size}",
            field=f"regions[{number}].source.offset",
        )


def revised(old: Holding, rank: int, revision: Revise, fds: Sequence[int]) -> Holding:
    """The holding after a rank's revision. Touches no descriptor: see `retired` for those not used any more.

    Args:
        old: before.
        rank: the only one whose regions may change.
        revision: what it says; its extents count in `fds`.
        fds: checked by the caller to be sealed and large enough.

    Raises:
        ManifestError: another rank's region, an unknown name, a place outside its extent, or a manifest
            that is not valid.
    """
    sizes = revision.extents
    regions, places = _merge(old, rank, revision)
    manifest = msgspec.structs.replace(
        old.manifest, regions=tuple(regions), revision=old.manifest.revision + 1
    )
    validate(manifest)
    if len(manifest.ranks) != len(old.manifest.ranks):
        raise ManifestError(f"rank {rank} would be left without a region", field="drop")
    extents = (*old.extents, *(Extent(rank, "host", size) for size in sizes))
    used = sorted({place.extent for place in places})
    renumbered = {extent: number for number, extent in enumerate(used)}
    all_fds = (*old.fds, *fds)
    all_counted = (*old.counted, *(True for _ in sizes))
    return Holding(
        manifest,
        tuple(extents[index] for index in used),
        tuple(Place(renumbered[place.extent], place.offset) for place in places),
        tuple(all_fds[index] for index in used),
        tuple(all_counted[index] for index in used),
        LeafMap(manifest.regions),
    )


def _merge(old: Holding, rank: int, revision: Revise) -> tuple[list[Region], list[Place]]:
    gone, put, sizes = set(revision.drop), revision.put, revision.extents
    coming = {item.region.name: item for item in put}
    if len(coming) != len(put) or gone & coming.keys():
        raise ManifestError("a revision names a region twice", field="put")
    for item in put:
        inside = 0 <= item.extent < len(sizes) and item.offset >= 0 and item.offset % REGION_ALIGN == 0
        here = item.region.source.kind == "arena" and item.region.device == HOST
        if item.region.rank != rank or not here or not inside:
            raise ManifestError(f"region {item.region.name!r} can't be placed by rank {rank}", field="put")
        if item.offset + item.region.nbytes > sizes[item.extent]:
            raise ManifestError(f"region {item.region.name!r} lies outside its extent", field="put")
    regions: list[Region] = []
    places: list[Place] = []
    for region, place in zip(old.manifest.regions, old.places, strict=True):
        new = coming.pop(region.name, None)
        if (new is not None or region.name in gone) and region.rank != rank:
            raise ManifestError(f"region {region.name!r} is not rank {rank}'s", field="put")
        if region.name in gone:
            gone.discard(region.name)
            continue
        regions.append(new.region if new else region)
        places.append(Place(len(old.extents) + new.extent, new.offset) if new else place)
    if gone:
        raise ManifestError(f"no regions {sorted(gone)} to drop", field="drop")
    for new in coming.values():
        regions.append(new.region)
        places.append(Place(len(old.extents) + new.extent, new.offset))
    return regions, places


def retired(old: Holding, new: Holding) -> Iterator[tuple[int, int]]:
    """Descriptors of `old` that `new` does not use, each with the bytes that the budget counted for it."""
    for fd, extent, counted in zip(old.fds, old.extents, old.counted, strict=True):
        if fd not in new.fds:
            yield fd, extent.nbytes if counted else 0
