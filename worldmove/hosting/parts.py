"""What one rank hands back, checked against itself and its descriptors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from worldmove.errors import ManifestError, ProtocolError
from worldmove.hosting.shared import check_shared
from worldmove.hosting.slots import check_sealed
from worldmove.manifest import HOST, REGION_ALIGN, Place, Region, validate
from worldmove.page.control import HEADER_BYTES, MAX_BLOCK
from worldmove.page.messages import Handback

KEY_CHARS = 16
SECRET_CHARS = 32, 64
MAX_FINGERPRINT = 64
MAX_FINGERPRINT_TEXT = 4096
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, stat(2)."""


class Kind(NamedTuple):
    """What an extent is: an arena on a device, or what a serving stack made itself, under its name."""

    device: str
    source: Literal["arena", "shm", "cuda-ipc"]
    name: str | None

    @property
    def counted(self) -> bool:
        """Whether the budget of host memory counts it."""
        return self.device == HOST and self.source == "arena"


def own_regions(first: Handback) -> list[Region]:
    """The rank's own, in the order of its places."""
    return [region for region in first.manifest.regions if region.rank == first.rejoin.rank]


def kinds_of(first: Handback) -> list[Kind]:
    """What each extent is, by the regions that lie in it.

    Raises:
        ManifestError: not one place for each region; an extent without one, or with several kinds of them.
    """
    regions, places = own_regions(first), first.places
    if len(regions) != len(places) or {place.extent for place in places} != set(range(len(first.sizes))):
        raise ManifestError("not one place for each region, or an extent without one", field="places")
    found: dict[int, Kind] = {}
    for region, place in zip(regions, places, strict=True):
        shared = region.source.kind != "arena"
        name = (region.source.name or "").removeprefix("/") if shared else None
        kind = Kind(region.device, region.source.kind, name)
        if found.setdefault(place.extent, kind) != kind:
            raise ManifestError(f"region {region.name!r} lies in memory of another kind", field="places")
    return [found[number] for number in range(len(first.sizes))]


def check_part(first: Handback, fds: Sequence[int]) -> None:
    """Checks one rank's words against themselves and its descriptors.

    What a descriptor of GPU memory is only CUDA can say: one that is something else fails in the executor
    that maps it, and the move that wanted it is aborted.

    Raises:
        ManifestError: the manifest is not valid, a region lies outside its extent or over another one; an
            arena of host memory is not sealed, too small, or not there in full; shared memory is too small.
        ProtocolError: anything else that can't be.
    """
    rejoin, manifest = first.rejoin, first.manifest
    validate(manifest)
    key = rejoin.slot
    named = len(key) == KEY_CHARS and not set(key) - set("0123456789abcdef")
    secret = SECRET_CHARS[0] <= len(rejoin.secret) <= SECRET_CHARS[1] and rejoin.secret.isascii()
    ranked = 0 <= rejoin.rank < len(manifest.ranks) and 0 <= rejoin.block <= MAX_BLOCK
    if not (named and secret and ranked and 0 <= first.revisions <= MAX_BLOCK):
        raise ProtocolError("a handback names no slot, rank, block or secret that could be")
    texts = [text for item in first.fingerprint.items() for text in item]
    if len(first.fingerprint) > MAX_FINGERPRINT or any(len(text) > MAX_FINGERPRINT_TEXT for text in texts):
        raise ProtocolError("the fingerprint is longer than one can be")
    if len(fds) != 1 + len(first.sizes):
        raise ProtocolError(f"{len(fds)} descriptors for a page and {len(first.sizes)} extents")
    kinds = kinds_of(first)
    if any(kind.source == "cuda-ipc" for kind in kinds):
        raise ManifestError("memory that was named by a handle can't be handed back", field="regions")
    _check_places(own_regions(first), first.places, first.sizes)
    check_sealed(fds[:1], (HEADER_BYTES,))
    for kind, fd, nbytes in zip(kinds, fds[1:], first.sizes, strict=True):
        _check_extent(kind, fd, nbytes)


def _check_extent(kind: Kind, fd: int, nbytes: int) -> None:
    if kind.source == "shm":
        check_shared(fd, nbytes, f"shared memory {kind.name!r}", "extents")
    elif kind.device == HOST:
        check_sealed([fd], [nbytes])
        if os.fstat(fd).st_blocks * _BLOCK_BYTES < nbytes:
            raise ManifestError(f"an extent of {nbytes} bytes is not allocated", field="extents")
    elif nbytes <= 0:
        raise ManifestError(f"an extent has {nbytes} bytes", field="extents")


def _check_places(regions: Sequence[Region], places: Sequence[Place], sizes: Sequence[int]) -> None:
    ends = [0] * len(sizes)
    for place, region in sorted(zip(places, regions, strict=True), key=lambda both: both[0]):
        if region.source.kind == "arena":
            fits = place.offset >= ends[place.extent] and place.offset % REGION_ALIGN == 0
        else:
            # Where a stack has put it in memory of its own: wherever that is, as at registration.
            fits = place.offset == region.source.offset
        ends[place.extent] = place.offset + region.nbytes
        if not fits or ends[place.extent] > sizes[place.extent]:
            raise ManifestError(f"region {region.name!r} can't lie where it is said to", field="places")
