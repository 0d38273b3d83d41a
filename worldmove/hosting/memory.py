"""Where the regions of one session lie on this node: extents, descriptors, places, and their revisions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from worldmove.errors import ManifestError
from worldmove.hosting.foreign import check_handles, open_foreign
from worldmove.ipc import close_all
from worldmove.manifest import HOST, REGION_ALIGN, Extent, LeafMap, Manifest, Place, Region, layout, validate
from worldmove.page.messages import Revise


class Arenas(Protocol):
    """What hosting needs of the memory budget (`worldmove.memory.arena.MemoryBudget`)."""

    async def allocate(self, sizes: Sequence[int], name: str) -> list[int]:
        """Makes arenas of host memory, all or none; `NoMemoryError` if they do not fit."""

    async def allocate_on(self, device: str, nbytes: int) -> int:
        """Makes an arena on a GPU; `ManifestError` if the node has no such, `NoMemoryError` if it is full."""

    async def check_on(self, device: str, fd: int, nbytes: int) -> None:
        """Checks that a GPU can map memory that a worker made; `ValidationError` if not."""

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
        ManifestError: a region is malformed, or memory of the stack's own is not there.
        NoMemoryError: the arenas do not fit; nothing stays allocated.
    """
    validate(manifest)
    own = tuple(region for region in manifest.regions if region.source.kind == "arena")
    extents, own_places = layout(own)
    with contextlib.ExitStack() as undo:
        foreign = open_foreign(manifest, len(extents))
        undo.callback(close_all, foreign.fds)
        await check_handles(foreign, arenas.check_on)
        fds = await _allocate(extents, arenas, name)
        undo.pop_all()
    ours = iter(own_places)
    places = tuple(
        next(ours) if region.source.kind == "arena" else foreign.places[number]
        for number, region in enumerate(manifest.regions)
    )
    counted = (*(extent.device == HOST for extent in extents), *(False for _ in foreign.extents))
    return Holding(
        manifest,
        (*extents, *foreign.extents),
        places,
        (*fds, *foreign.fds),
        counted,
        LeafMap(manifest.regions),
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


def revised(old: Holding, rank: int, revision: Revise, fds: Sequence[int]) -> Holding:
    """The holding after a rank's revision. Touches no descriptor: see `retired` for those not used any more.

    Args:
        old: before.
        rank: the only one whose regions may change.
        revision: what it says; its extents count in `fds`.
        fds: checked by the caller to be what it says: sealed and large enough, or memory of that GPU.

    Raises:
        ManifestError: another rank's region, an unknown name, a place outside its extent, or a manifest
            that is not valid.
    """
    fresh = fresh_extents(rank, revision)
    regions, places = _merge(old, rank, revision)
    manifest = msgspec.structs.replace(
        old.manifest, regions=tuple(regions), revision=old.manifest.revision + 1
    )
    validate(manifest)
    if len(manifest.ranks) != len(old.manifest.ranks):
        raise ManifestError(f"rank {rank} would be left without a region", field="drop")
    extents = (*old.extents, *fresh)
    used = sorted({place.extent for place in places})
    renumbered = {extent: number for number, extent in enumerate(used)}
    all_fds = (*old.fds, *fds)
    all_counted = (*old.counted, *(extent.device == HOST for extent in fresh))
    return Holding(
        manifest,
        tuple(extents[index] for index in used),
        tuple(Place(renumbered[place.extent], place.offset) for place in places),
        tuple(all_fds[index] for index in used),
        tuple(all_counted[index] for index in used),
        LeafMap(manifest.regions),
    )


def fresh_extents(rank: int, revision: Revise) -> tuple[Extent, ...]:
    """The memory that a revision brings; without `devices` all of it is the host's.

    Raises:
        ManifestError: there is not one device for each extent.
    """
    devices = revision.devices or (HOST,) * len(revision.extents)
    if len(devices) != len(revision.extents):
        raise ManifestError(
            f"a revision names {len(devices)} devices for {len(revision.extents)} extents", field="devices"
        )
    return tuple(
        Extent(rank, device, nbytes) for device, nbytes in zip(devices, revision.extents, strict=True)
    )


async def check_made(rank: int, revision: Revise, fds: Sequence[int], arenas: Arenas) -> None:
    """Has each GPU map the memory that a worker made on it: a descriptor itself does not tell.

    Raises:
        ManifestError: this node has no such GPU.
        ValidationError: a GPU can't map what there is for it.
    """
    for fd, extent in zip(fds, fresh_extents(rank, revision), strict=False):
        if extent.device != HOST:
            await arenas.check_on(extent.device, fd, extent.nbytes)


def _merge(old: Holding, rank: int, revision: Revise) -> tuple[list[Region], list[Place]]:
    gone, put, fresh = set(revision.drop), revision.put, fresh_extents(rank, revision)
    coming = {item.region.name: item for item in put}
    if len(coming) != len(put) or gone & coming.keys():
        raise ManifestError("a revision names a region twice", field="put")
    for item in put:
        inside = 0 <= item.extent < len(fresh) and item.offset >= 0 and item.offset % REGION_ALIGN == 0
        here = inside and item.region.device == fresh[item.extent].device
        here = here and item.region.device in (HOST, *old.manifest.gpus)
        if item.region.rank != rank or not here or item.region.source.kind != "arena":
            raise ManifestError(f"region {item.region.name!r} can't be placed by rank {rank}", field="put")
        if item.offset + item.region.nbytes > fresh[item.extent].nbytes:
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
