"""Sessions that their workers hand back: node and keeper had died together, and the memory lives on.

A node that knows nothing of a session can't check a worker's secret. It relies on the kernel, which says that
the worker is a process of the node's user, and on the ledger, which says that the session is this node's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from worldmove.errors import (
    ConflictError,
    FramingError,
    ManifestError,
    NotFoundError,
    ProtocolError,
    WorldMoveError,
)
from worldmove.hosting.making import Owner, restore_slot
from worldmove.hosting.slots import Slot, SlotRecord, check_sealed
from worldmove.ipc import close_all
from worldmove.manifest import REGION_ALIGN, Extent, Manifest, Place, Region, validate
from worldmove.page.control import HEADER_BYTES, MAX_BLOCK, ControlPage, open_own
from worldmove.page.messages import Ended, Handback, Moved, Rejoin

KEY_CHARS = 16
SECRET_CHARS = 32, 64
MAX_FINGERPRINT = 64
MAX_FINGERPRINT_TEXT = 4096
MAX_EPOCH = 1 << 53
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, stat(2)."""


class Part(NamedTuple):
    """What one rank hands back: its page (an opening of the node's own), then its extents."""

    first: Handback
    fds: tuple[int, ...]
    epoch: int
    incarnation: int

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.first.rejoin.rank


class Warrant(NamedTuple):
    """What the node adds.

    Attributes:
        check: raises unless this node owns the session, at no later epoch than that given.
        settle: goes on with a slot.
        whereabouts: what a rank is to be told of its session, given its epoch and that of the slot of the
            same session that is here, if any; `None` if the ledger does not say that it is over here.
    """

    check: Callable[[str, int], Awaitable[None]]
    settle: Callable[[Slot], None]
    whereabouts: Callable[[str, int, int | None], Awaitable[Moved | Ended | None]]


class _Gathering:
    """The parts of one session, as they come."""

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, part: Part) -> None:
        mine = part.first
        for other in self.parts.values():
            theirs = other.first
            if other.rank == part.rank and theirs.rejoin.secret != mine.rejoin.secret:
                raise ConflictError(f"another worker hands rank {part.rank} back")
            if (theirs.rejoin.slot, _common(theirs.manifest)) != (mine.rejoin.slot, _common(mine.manifest)):
                raise ConflictError("the ranks do not hand the same session back")
            if theirs.fingerprint != mine.fingerprint or other.epoch != part.epoch:
                raise ConflictError("the ranks differ in fingerprint or epoch")
        self.parts[part.rank] = part

    @property
    def whole(self) -> bool:
        return len(self.parts) == len(next(iter(self.parts.values())).first.manifest.ranks)


class Returns:
    """Takes parts in, and makes a slot of them when all ranks of a session are there.

    Args:
        incarnation: of this node.
        owner: of the slots.
        check_away: raises a `ConflictError` if the host has the session or the slot.
        place: puts a slot into the host's tables.

    Attributes:
        warrant: of the node; without one everything is refused.
    """

    def __init__(
        self,
        incarnation: int,
        owner: Owner,
        check_away: Callable[[Handback], None],
        place: Callable[[Slot], None],
    ) -> None:
        self.warrant: Warrant | None = None
        self._incarnation = incarnation
        self._owner = owner
        self._check_away = check_away
        self._place = place
        self._gatherings: dict[str, _Gathering] = {}

    async def take_in(self, first: Handback, fds: Sequence[int]) -> None:
        """Returns when the session is a slot of this node; all ranks have to be there at once for that.

        Args:
            first: what a worker says.
            fds: its page and its extents; they stay the caller's.

        Raises:
            NotFoundError, LedgerError: the ledger does not say that this session is this node's.
            ManifestError, ProtocolError, FramingError: what was said contradicts itself or the descriptors.
            ConflictError: the ranks contradict one another, or the session is here already.
        """
        warrant = self.warrant
        if warrant is None:
            raise NotFoundError("sessions are not taken back here")
        check_part(first, fds)
        page = open_own(fds[0])
        try:
            epoch, incarnation = _read_page(first, page)
            await warrant.check(first.session_id, epoch)
            await self._gather(Part(first, (page, *fds[1:]), epoch, incarnation), warrant)
        finally:
            close_all([page])

    async def farewell(self, rank: Rejoin, held: int | None) -> Moved | Ended | None:
        """What a rank hears whose slot is not here.

        Args:
            rank: what it says of itself. It can't prove it: whoever is let in at the door may know.
            held: epoch of the slot of the same session that is here.
        """
        warrant = self.warrant
        if warrant is None or rank.session_id is None:
            return None
        return await warrant.whereabouts(rank.session_id, rank.epoch, held)

    async def _gather(self, part: Part, warrant: Warrant) -> None:
        name = part.first.session_id
        gathering = self._gatherings.setdefault(name, _Gathering())
        try:
            gathering.add(part)
            if gathering.whole:
                self._gatherings.pop(name)
                self._make(gathering, warrant)
            await asyncio.shield(gathering.done)
        finally:
            if gathering.parts.get(part.rank) is part:
                del gathering.parts[part.rank]
            if not gathering.parts and self._gatherings.get(name) is gathering:
                del self._gatherings[name]

    def _make(self, gathering: _Gathering, warrant: Warrant) -> None:
        parts = [gathering.parts[rank] for rank in sorted(gathering.parts)]
        try:
            self._check_away(parts[0].first)
            record, fds = gathered(parts)
            slot = restore_slot(record, fds, self._incarnation, self._owner)
            for part in parts:
                slot.ranks.page.set_revisions(part.rank, part.first.revisions)
            self._place(slot)
            warrant.settle(slot)
        except WorldMoveError as error:
            gathering.done.set_exception(error)
        else:
            gathering.done.set_result(None)


def check_part(first: Handback, fds: Sequence[int]) -> None:
    """Checks one rank's words against themselves and its descriptors.

    Raises:
        ManifestError: the manifest is not valid, a region lies outside its extent or over another one, or an
            extent is not sealed, too small, or not there in full.
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
    if any(r.source.kind != "arena" or r.device != "host" for r in manifest.regions):
        raise ManifestError("only arenas in host memory can be handed back", field="regions")
    if len(fds) != 1 + len(first.sizes):
        raise ProtocolError(f"{len(fds)} descriptors for a page and {len(first.sizes)} extents")
    _check_places(_own(first), first.places, first.sizes)
    check_sealed(fds, (HEADER_BYTES, *first.sizes))
    for fd, nbytes in zip(fds[1:], first.sizes, strict=True):
        if os.fstat(fd).st_blocks * _BLOCK_BYTES < nbytes:
            raise ManifestError(f"an extent of {nbytes} bytes is not allocated", field="extents")


def _check_places(regions: Sequence[Region], places: Sequence[Place], sizes: Sequence[int]) -> None:
    if len(regions) != len(places) or {place.extent for place in places} != set(range(len(sizes))):
        raise ManifestError("not one place for each region, or an extent without one", field="places")
    ends = [0] * len(sizes)
    for place, region in sorted(zip(places, regions, strict=True), key=lambda both: both[0]):
        over = place.offset < ends[place.extent] or place.offset % REGION_ALIGN != 0
        ends[place.extent] = place.offset + region.nbytes
        if over or ends[place.extent] > sizes[place.extent]:
            raise ManifestError(f"region {region.name!r} can't lie where it is said to", field="places")


def _read_page(first: Handback, fd: int) -> tuple[int, int]:
    """Epoch and incarnation of a page that must be this session's."""
    page = ControlPage(fd)
    try:
        manifest = first.manifest
        fits = page.ranks == len(manifest.ranks) and page.host_state_bytes == manifest.host_state_bytes
        if not fits or page.session_id != first.session_id or page.epoch > MAX_EPOCH:
            raise FramingError("the control page is not that of this session")
        return page.epoch, page.incarnation
    finally:
        page.close()


def gathered(parts: Sequence[Part]) -> tuple[SlotRecord, list[int]]:
    """The slot that all ranks' parts describe, as the keeper would have held it.

    Args:
        parts: one for each rank, in order.

    Returns:
        The record and its descriptors, pages first, which the caller owns.

    Raises:
        ManifestError: the ranks' regions don't fit together.
        ConflictError: descriptors can't be had.
    """
    manifest = merged([part.first for part in parts])
    extents: list[Extent] = []
    lying: dict[str, Place] = {}
    fds: list[int] = []
    for part in parts:
        base = len(extents)
        for region, place in zip(_own(part.first), part.first.places, strict=True):
            lying[region.name] = Place(base + place.extent, place.offset)
        extents += [Extent(part.rank, "host", nbytes) for nbytes in part.first.sizes]
        fds += part.fds[1:]
    pages = _pages(parts)
    copies: list[int] = []
    try:
        for fd in [*pages, *fds]:
            copies.append(os.dup(fd))  # noqa: PERF401 - those before one that fails are to be closed
    except OSError as error:
        close_all(copies)
        raise ConflictError(f"descriptors can't be taken over: {error}") from error
    any_part = parts[0].first
    record = SlotRecord(
        key=any_part.rejoin.slot,
        id=any_part.session_id,
        session_id=any_part.session_id,
        bound=None,
        seed=secrets.randbits(64),
        pages=len(pages),
        fingerprint=any_part.fingerprint,
        manifest=manifest,
        extents=tuple(extents),
        places=tuple(lying[region.name] for region in manifest.regions),
        counted=(True,) * len(extents),
        secrets=tuple(part.first.rejoin.secret for part in parts),
        revisions=tuple(part.first.revisions for part in parts),
    )
    return record, copies


def merged(firsts: Sequence[Handback]) -> Manifest:
    """One manifest out of all ranks': each is believed about its own regions.

    Raises:
        ManifestError: they don't fit together.
    """
    own = {region.name: region for first in firsts for region in _own(first)}
    if len(own) != sum(len(first.places) for first in firsts):
        raise ManifestError("two ranks have a region of one name", field="regions")
    known = [region.name for region in firsts[0].manifest.regions if region.name in own]
    order = dict.fromkeys([*known, *own])
    manifest = msgspec.structs.replace(
        firsts[0].manifest,
        regions=tuple(own[name] for name in order),
        revision=max(first.manifest.revision for first in firsts),
    )
    validate(manifest)
    return manifest


def _pages(parts: Sequence[Part]) -> list[int]:
    """One descriptor for each different page, the newest first; each rank may have come back to another."""
    found: dict[tuple[int, int], int] = {}
    for part in sorted(parts, key=lambda part: part.incarnation, reverse=True):
        about = os.fstat(part.fds[0])
        found.setdefault((about.st_dev, about.st_ino), part.fds[0])
    return list(found.values())


def _own(first: Handback) -> list[Region]:
    return [region for region in first.manifest.regions if region.rank == first.rejoin.rank]


def _common(manifest: Manifest) -> tuple[Manifest, tuple[int, ...]]:
    """What all ranks know alike, whatever they have revised."""
    return msgspec.structs.replace(manifest, regions=(), revision=0), manifest.ranks
