"""The control page of a slot, and those of former incarnations of the node that workers may still hold."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from worldmove.errors import ConflictError, ProtocolError
from worldmove.hosting.folio import Folio, Place
from worldmove.ipc import close_all, sealed_memfd
from worldmove.page.control import MAX_BLOCK, ControlPage, RankState


class Leaf(NamedTuple):
    """A page's place, and the folio that it is in."""

    folio: Folio
    place: Place


class Pages:
    """Owns the descriptors and mappings of a slot's pages.

    A worker writes into the page that it was given last. One that has not come back since the node started
    again still publishes in a former page, and locks its rank there; its area is copied on when asked for.

    Args:
        fds: of the page in force, and of earlier ones, the newest first.
        leaf: where the page in force lies, if that is in a folio; all `fds` are then of earlier ones.
        recovered: a former incarnation of the node has left the slot.
    """

    def __init__(self, fds: Sequence[int], leaf: Leaf | None = None, *, recovered: bool = False) -> None:
        self.recovered = recovered
        self._leaf = leaf
        self._left: Leaf | None = None
        self._ended = False
        self._fds = list(fds)
        self._pages: list[ControlPage] = []
        try:
            self._pages += [leaf.folio.open(leaf.place)] if leaf is not None else []
            self._pages += [ControlPage(each) for each in self._fds]
        except BaseException:
            self.close()
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        """Of all pages that have one, the page in force first."""
        return tuple(self._fds)

    @property
    def leaf(self) -> Leaf | None:
        """Where the page in force lies, if that is in a folio."""
        return self._leaf

    @property
    def former(self) -> bool:
        """Whether there are earlier pages."""
        return len(self._pages) > 1

    def move_out(self) -> bool:
        """Gives the page in force a descriptor of its own, which a worker may have.

        Returns:
            Whether it lay in a folio until now, or the keeper has not heard that it does no more: it is to
            be told, and `vacate` is due then.

        Raises:
            TransportError: there is no descriptor, or no memory, for it.
        """
        if self._leaf is not None:
            fd = sealed_memfd("worldmove-page", self._leaf.place.nbytes)
            try:
                self.page.copy_to(fd)
                page = ControlPage(fd)
            except BaseException:
                close_all([fd])
                raise
            self._pages[0].close()
            self._pages[0] = page
            self._fds.insert(0, fd)
            self._left, self._leaf = self._leaf, None
        return self._left is not None

    def vacate(self) -> str | None:
        """No record names the place any more that the page has left, or leaves when it is closed.

        Returns:
            The key of a folio in which no page lies any more.
        """
        if self._leaf is not None and not self.closed:
            self._ended = True
            return None
        if self._leaf is not None:
            self._left, self._leaf = self._leaf, None
        if self._left is None:
            return None
        left, self._left = self._left, None
        return left.folio.free(left.place)

    @property
    def page(self) -> ControlPage:
        """The page in force."""
        return self._pages[0]

    @property
    def closed(self) -> bool:
        """Whether nothing is mapped any more."""
        return not self._pages

    def occupied(self, rank: int) -> bool:
        """Whether a living process has the rank's memory in its hands, connected or not."""
        return any(page.occupied(rank) for page in self._pages)

    def left_well(self, rank: int) -> bool:
        """Whether a rank without a worker was left in the state of its last boundary, with its host state."""
        block = self.page.block(rank)
        remembered = block == 0 or self.page.has_host_state(rank, block)
        return remembered and self.page.consistent(rank)

    def check_left(self, rank: int, *, seated: bool) -> None:
        """Checks that nobody has a rank in his hands, and that it was left in the state of a boundary.

        Raises:
            ConflictError: its last worker lives (`seated`: is connected), or left it in the middle of a
                block or without the host state of its last one.
        """
        if seated or self.occupied(rank):
            raise ConflictError(f"rank {rank} is in the hands of a worker", rank=rank)
        if not self.left_well(rank):
            raise ConflictError(
                f"rank {rank}'s worker left in the middle of a block, or without its host state", rank=rank
            )

    def quiet(self, rank: int, *, foreign: bool) -> bool:
        """Whether, beside that, nobody writes any more.

        Args:
            rank: one without a worker.
            foreign: the serving stack holds its memory by itself, so it may write before it ever came.
        """
        page = self.page
        untouched = page.state(rank) is RankState.VACANT and not page.marks(rank)
        return self.left_well(rank) and not self.occupied(rank) and not (untouched and foreign)

    def host_state(self, rank: int, block: int) -> bytes:
        """Of a rank that stands at `block`; empty for a world that has not generated a block yet.

        Raises:
            ConflictError: the page holds none for this block.
        """
        if block == 0 and not self.page.has_host_state(rank, 0):
            return b""
        return self.page.host_state(rank, block)

    def load(self, block: int, host_states: Sequence[bytes]) -> None:
        """Writes what a session brings along, for ranks that wait.

        Raises:
            ProtocolError: the number of host states is not that of the ranks, or the block is out of range.
            ManifestError: a host state is longer than the page's slots.
        """
        if len(host_states) != self.page.ranks or not 0 <= block <= MAX_BLOCK:
            raise ProtocolError(
                f"{len(host_states)} host states at block {block} for {self.page.ranks} ranks"
            )
        for rank, state in enumerate(host_states):
            self.page.forget_host_states(rank)
            self.page.put_host_state(rank, block, state)
            self.page.publish(rank, block)
            self.page.set_state(rank, RankState.STOPPED)

    def go_back(self, block: int, host_states: Sequence[bytes]) -> None:
        """Memory has been brought back to an earlier boundary: ranks without workers stand there from now on.

        Raises:
            ConflictError: a living process has a rank in its hands.
        """
        hands = [rank for rank in range(self.page.ranks) if self.occupied(rank)]
        if hands:
            raise ConflictError(f"ranks {hands} are in the hands of workers", ranks=hands)
        self.forget_former()
        self.load(block, host_states)

    def look_back(self, rank: int) -> None:
        """Brings what a rank wrote last, in whichever page, into the page in force.

        Progress never falls, so the page that is furthest is the one that the worker holds, or held.
        """
        furthest = max(self._pages, key=lambda page: page.progress(rank))
        if furthest is not self.page and furthest.progress(rank) > self.page.progress(rank):
            self.page.copy_rank(furthest, rank)
        elif holder := next((page for page in self._pages[1:] if page.occupied(rank)), None):
            self.page.copy_rank(holder, rank)

    def last_stop(self, began: float) -> float:
        """`time.monotonic()` when the last rank stopped, by its own reading of the same clock.

        Args:
            began: when the pause was asked for; a reading that can't be true counts as now.
        """
        now = time.monotonic()
        last = max(self.page.stopped_ns(rank) for rank in range(self.page.ranks)) / 1e9
        return last if began <= last <= now else now

    def forget_former(self) -> None:
        """Lets go of former pages: every worker has the one in force."""
        for page in self._pages[1:]:
            page.close()
        kept = 0 if self._leaf is not None else 1
        close_all(self._fds[kept:])
        del self._pages[1:], self._fds[kept:]

    def dup(self) -> int:
        """A copy of the descriptor of the page in force, which the caller owns; after `move_out`."""
        return os.dup(self._fds[0])

    def close(self) -> None:
        """Unmaps and closes everything; once more is nothing."""
        for page in self._pages:
            page.close()
        close_all(self._fds)
        self._pages.clear()
        self._fds.clear()
        if self._ended:
            self._ended = False
            self.vacate()
