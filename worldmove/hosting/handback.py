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
    WorldMoveError,
)
from worldmove.hosting.making import Owner, restore_slot
from worldmove.hosting.parts import check_part, kinds_of, own_regions
from worldmove.hosting.slots import Slot, SlotRecord
from worldmove.ipc import close_all
from worldmove.manifest import Extent, Manifest, Place, validate
from worldmove.page.control import ControlPage, open_own
from worldmove.page.messages import Ended, Handback, Moved, Rejoin

MAX_EPOCH = 1 << 53


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
        check: raises unless this node has the devices, and owns the session, at no later epoch than given.
        settle: goes on with a slot.
        whereabouts: what a rank is to be told of its session, given its epoch and that of the slot of the
            same session that is here, if any; `None` if the ledger does not say that it is over here.
    """

    check: Callable[[Handback, int], Awaitable[None]]
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
            await warrant.check(first, epoch)
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
    counted: list[bool] = []
    lying: dict[str, Place] = {}
    fds: list[int] = []
    for part in parts:
        base = len(extents)
        for region, place in zip(own_regions(part.first), part.first.places, strict=True):
            lying[region.name] = Place(base + place.extent, place.offset)
        kinds = kinds_of(part.first)
        extents += [
            Extent(part.rank, kind.device, size) for kind, size in zip(kinds, part.first.sizes, strict=True)
        ]
        counted += [kind.counted for kind in kinds]
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
        counted=tuple(counted),
        secrets=tuple(part.first.rejoin.secret for part in parts),
        revisions=tuple(part.first.revisions for part in parts),
    )
    return record, copies


def merged(firsts: Sequence[Handback]) -> Manifest:
    """One manifest out of all ranks': each is believed about its own regions.

    Raises:
        ManifestError: they don't fit together.
    """
    own = {region.name: region for first in firsts for region in own_regions(first)}
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


def _common(manifest: Manifest) -> tuple[Manifest, tuple[int, ...]]:
    """What all ranks know alike, whatever they have revised."""
    return msgspec.structs.replace(manifest, regions=(), revision=0), manifest.ranks
