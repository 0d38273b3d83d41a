"""What becomes of a worker at the door: who may come in, and what it is given."""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog

from worldmove.errors import ConflictError, NotFoundError, ProcessLostError, UnauthorizedError
from worldmove.hosting.door import Entry
from worldmove.hosting.shelf import Shelf
from worldmove.hosting.slots import Slot
from worldmove.hosting.tickets import TicketBook
from worldmove.ipc import close_all
from worldmove.page.messages import Hello, Rejoin

log = structlog.get_logger(__name__)


class Entrance:
    """Looks at tickets and secrets.

    Args:
        slots: of the host, by key.
        tickets: of the host.
        shelf: has the keeper hold a page before a worker gets it.
    """

    def __init__(self, slots: Mapping[str, Slot], tickets: TicketBook, shelf: Shelf) -> None:
        self._slots = slots
        self._tickets = tickets
        self._shelf = shelf

    async def enter(self, first: Hello | Rejoin) -> Entry:
        """See `worldmove.hosting.door.Desk`; raises as it."""
        if isinstance(first, Rejoin):
            return await self._reenter(first)
        key, rank = self._tickets.redeem(first.token)
        await self._turn_out(key)
        slot = self._slots.get(key)
        if slot is None:
            raise NotFoundError("the session or standby has ended")
        slot.ranks.check_free(rank)
        stopped = None if slot.session_id is None else slot.ranks.page.block(rank)
        return self._entry(slot, rank, slot.holding.of_rank(rank), stopped, waiting=slot.session_id is None)

    async def _reenter(self, first: Rejoin) -> Entry:
        self._check_secret(first)
        await self._turn_out(first.slot)
        slot = self._check_secret(first)
        stopped = first.block if first.stopped else None
        return self._entry(slot, first.rank, (), stopped, waiting=first.waiting)

    def _check_secret(self, first: Rejoin) -> Slot:
        slot = self._slots.get(first.slot)
        if slot is None:
            raise NotFoundError("the session or standby is not on this node")
        if not slot.knows(first.rank, first.secret):
            raise UnauthorizedError("the secret is not this rank's")
        return slot

    async def _turn_out(self, key: str) -> None:
        """A worker comes: the slot's page gets a descriptor of its own, which the keeper has first."""
        slot = self._slots.get(key)
        if slot is None or not slot.pages.move_out():
            return
        try:
            await self._shelf.put(slot)
        except ProcessLostError as error:
            # The next keeper gets every slot; until then nothing may lie in the place that was left.
            log.warning("shelf.keeper", reason=error.message)
        else:
            if self._slots.get(key) is slot:
                await self._shelf.vacate(slot.pages)

    def _entry(
        self, slot: Slot, rank: int, extents: tuple[int, ...], stopped: int | None, *, waiting: bool
    ) -> Entry:
        holding, welcome = slot.holding, slot.welcome(rank, extents)
        copies: list[int] = []
        try:
            copies.append(slot.pages.dup())
            copies += [os.dup(holding.fds[index]) for index in extents]
        except OSError as error:
            close_all(copies)
            raise ConflictError(f"descriptors can't be passed on: {error}") from error
        return Entry(slot.key, slot.ranks, rank, welcome, copies[0], tuple(copies[1:]), stopped, waiting)
