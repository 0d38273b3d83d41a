"""The spare copy of a session's memory: its state at one boundary, whole or marked as not whole.

A spare has memory for the same regions, and a *cover*: a control page that says of which boundary the copy is
and holds the host states of it. While a copy is made the cover says that there is none; the world stands at
a boundary meanwhile, so its own memory is whole. At any moment one of the two can be taken up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from worldmove.errors import ConflictError, FramingError
from worldmove.hosting.memory import Arenas, Holding, take
from worldmove.ipc import close_all
from worldmove.manifest import HOST, Extent, LeafMap, Manifest, Place
from worldmove.page.control import ControlPage, create_page
from worldmove.placement import placed


class SpareRecord(msgspec.Struct, frozen=True):
    """What the keeper holds beside a spare's descriptors: the cover's, then those of its extents."""

    manifest: Manifest
    extents: tuple[Extent, ...]
    places: tuple[Place, ...]


class Spare:
    """One spare copy.

    Args:
        holding: its memory.
        cover_fd: of its cover; both belong to the spare.

    Attributes:
        turn: held by whoever reads or writes the copy.
    """

    def __init__(self, holding: Holding, cover_fd: int) -> None:
        self.holding = holding
        self.turn = asyncio.Lock()
        self._cover_fd = cover_fd
        self._cover = ControlPage(cover_fd)

    @classmethod
    async def make(cls, manifest: Manifest, arenas: Arenas) -> Spare:
        """Allocates one for a session; it holds nothing yet.

        Raises:
            NoMemoryError: it does not fit.
        """
        holding = await take(placed(manifest), arenas, "worldmove-spare")
        try:
            cover = create_page(len(manifest.ranks), manifest.host_state_bytes, incarnation=0, epoch=0)
        except BaseException:
            arenas.release(holding.counted_bytes)
            close_all(holding.fds)
            raise
        return cls(holding, cover)

    @classmethod
    def restore(cls, record: SpareRecord, fds: Sequence[int]) -> Spare:
        """The spare that a record describes; owns `fds`.

        Raises:
            FramingError: the first descriptor is no cover; all are closed.
        """
        if len(fds) != 1 + len(record.extents):
            close_all(fds)
            raise FramingError(f"a spare of {len(record.extents)} extents came with {len(fds)} descriptors")
        counted = tuple(extent.device == HOST for extent in record.extents)
        places, extents = record.places, record.extents
        holding = Holding(
            record.manifest, extents, places, tuple(fds[1:]), counted, LeafMap(record.manifest.regions)
        )
        try:
            return cls(holding, fds[0])
        except BaseException:
            close_all(fds)
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors as `SpareRecord` says."""
        return (self._cover_fd, *self.holding.fds)

    @property
    def record(self) -> SpareRecord:
        """For the keeper."""
        return SpareRecord(self.holding.manifest, self.holding.extents, self.holding.places)

    @property
    def block(self) -> int | None:
        """The boundary that the copy is of; `None` while it is not whole, and before the first one."""
        block = self._cover.block(0)
        return block if self._cover.has_host_state(0, block) else None

    def fits(self, manifest: Manifest) -> bool:
        """Whether the copy has the shape of a session's regions as they are now."""
        mine = [(r.name, r.dtype, r.shape, r.rank, r.device) for r in self.holding.manifest.regions]
        theirs = [(r.name, r.dtype, r.shape, r.rank, r.device) for r in manifest.regions]
        return mine == theirs

    def begin(self) -> None:
        """The copy is about to be written over: from now on it is not whole."""
        self._cover.forget_host_states(0)
        self._cover.fence()

    def commit(self, block: int, host_states: Sequence[bytes]) -> None:
        """The copy is that of `block`. What makes it whole is written last."""
        for rank in reversed(range(self._cover.ranks)):
            self._cover.publish(rank, block)
            self._cover.forget_host_states(rank)
            self._cover.fence()
            self._cover.put_host_state(rank, block, host_states[rank])

    def host_states(self) -> tuple[bytes, ...]:
        """Of every rank, at `block`.

        Raises:
            ConflictError: the copy is not whole.
        """
        block = self.block
        if block is None:
            raise ConflictError("the spare copy is not whole")
        return tuple(self._cover.host_state(rank, block) for rank in range(self._cover.ranks))

    def close(self, arenas: Arenas) -> tuple[int, ...]:
        """Gives the spare up; returns the descriptors that are to be closed."""
        self._cover.close()
        arenas.release(self.holding.counted_bytes)
        return self.fds
