"""All sessions and standbys of one node.

The host owns memory, control pages and workers. It knows nothing of moves, of the ledger or of other
nodes: whoever drives a move asks for a slot and for its ranks, and says what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from worldmove import fingerprint as prints
from worldmove.errors import (
    AlreadyMovingError,
    ConflictError,
    FingerprintMismatchError,
    NoWorkerError,
    SessionExistsError,
    WorldMoveError,
)
from worldmove.hosting.door import Door, Entry
from worldmove.hosting.entrance import Entrance
from worldmove.hosting.folio import Folio
from worldmove.hosting.handback import Returns
from worldmove.hosting.lying import Lying
from worldmove.hosting.making import Name, Owner, make_slot, restore_slot
from worldmove.hosting.matching import ANY, RETRY_AFTER_MS, find_standby
from worldmove.hosting.memory import Arenas, check_made, take
from worldmove.hosting.ranks import Change
from worldmove.hosting.shelf import Found, Keeping, Shelf
from worldmove.hosting.slots import Slot
from worldmove.hosting.tickets import TicketBook
from worldmove.ipc import close_all
from worldmove.manifest import Manifest
from worldmove.memory.arena import free_arenas
from worldmove.memory.limits import check_descriptors
from worldmove.page.messages import Ended, Handback, Hello, Moved, Rejoin, Revise
from worldmove.placement import Wanted
from worldmove.tasks import Tasks
from worldmove.views import SessionSpec, Ticket

log = structlog.get_logger(__name__)


class Host:
    """Slots, and the door to them.

    Args:
        socket_path: where workers come; its directory must exist.
        incarnation: of this node, stands in every control page.
        arenas: allocates memory, for instance a `worldmove.memory.arena.MemoryBudget`.
        keeper: holds every slot's descriptors, so that they outlive this process; `None`: nobody does.
        on_change: called when ranks of a slot attached, were lost, left, started or revised.

    Attributes:
        sessions: slots by session id. standbys: slots by the standby's id, until adopted.
        returns: takes in sessions that workers hand back.
    """

    def __init__(
        self,
        *,
        socket_path: Path,
        incarnation: int,
        arenas: Arenas,
        keeper: Keeping | None,
        on_change: Callable[[Slot, Change], None],
    ) -> None:
        self.socket_path = socket_path
        self.incarnation = incarnation
        self._lying = Lying()
        self.sessions, self.standbys = self._lying.sessions, self._lying.standbys
        self._opening: set[str] = set()
        self._arenas = arenas
        self._shelf = Shelf(keeper)
        self._on_change = on_change
        self._tickets = TicketBook()
        self._entrance = Entrance(self._lying.by_key, self._tickets, self._shelf)
        self._door = Door(socket_path, self)
        self._freeing = Tasks(self._not_freed)
        self._folio = Folio()
        self._owner = Owner(self._changed, self._discard, self._folio)
        self.returns = Returns(incarnation, self._owner, self._check_away, self._take_back)

    @property
    def arenas(self) -> Arenas:
        """Who allocates and counts memory."""
        return self._arenas

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Everything that lies here: of a session that moves within the node, two."""
        return tuple(self._lying.by_key.values())

    def start(self) -> None:
        """Opens the door. Call `recover` first where a former incarnation may have left slots.

        Raises:
            ConfigError: the socket can't be made.
        """
        self._door.open()

    async def close(self) -> None:
        """The node goes, the worlds stay: workers generate on, and the keeper holds every descriptor."""
        await self._door.close()
        await self._shelf.close()
        # Not of a slot that was dropped and is still in use: nobody would ever fetch its page.
        lying = any(slot.pages.leaf is not None for slot in self._lying.by_key.values())
        for slot in list(self._lying.by_key.values()):
            slot.ranks.close()
            slot.close(self._arenas)
        with contextlib.suppress(
            WorldMoveError
        ):  # a keeper that is lost, or another node's, holds it no more
            await self._shelf.keep_folio(self._folio.key if lying else None)
        self._lying.clear()
        self._folio.close()
        await self._freeing.join()

    # Opening and closing

    async def open_session(
        self, spec: SessionSpec, session_id: str, epoch: int, *, seed: int | None = None
    ) -> tuple[Slot, tuple[Ticket, ...]]:
        """Makes the memory of a new session, and one ticket for each rank.

        Args:
            spec: what was registered.
            session_id: its id.
            epoch: its first one.
            seed: of its leaf digests; random if left out.

        Raises:
            SessionExistsError: the session lies here already.
            ManifestError: a region is malformed or its shared memory is not there.
            NoMemoryError: it does not fit, or there are not as many descriptors.
        """
        if session_id in self.sessions or session_id in self._opening:
            raise SessionExistsError(f"session {session_id!r} is on this node already", session_id=session_id)
        self._opening.add(session_id)
        try:
            slot = await self._open(spec, Name(session_id, session_id, seed), epoch)
        finally:
            self._opening.discard(session_id)
        return slot, self._issue(slot)

    async def open_standby(self, spec: SessionSpec) -> tuple[Slot, tuple[Ticket, ...]]:
        """Makes the memory of a standby; raises as `open_session`."""
        slot = await self._open(spec, Name(f"standby-{secrets.token_hex(8)}", None), 0)
        return slot, self._issue(slot)

    async def _open(self, spec: SessionSpec, name: Name, epoch: int) -> Slot:
        check_descriptors(1 + len({(r.rank, r.device, r.source.name) for r in spec.manifest.regions}))
        holding = await take(spec.manifest, self._arenas, "worldmove-arena")
        try:
            slot = make_slot(
                name, holding, spec.fingerprint, self._owner, incarnation=self.incarnation, epoch=epoch
            )
        except BaseException:
            self._arenas.release(holding.counted_bytes)
            self._discard(holding.fds)
            raise
        try:
            await self._shelf.put(slot)
        except BaseException:
            self._shelf.drop(slot)
            slot.ranks.close()
            slot.close(self._arenas)
            raise
        self._lying.add(slot)
        return slot

    async def recover(self) -> list[Slot]:
        """Takes over every slot that a former incarnation left with the keeper; call it before `start`.

        Each gets a new control page and is *fenced*: workers that generate go on and find this node by
        themselves, ranks that stand stay so until the caller, who asks the ledger, says `ranks.unfence()`,
        or closes the slot with what became of the session.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        former = await self._shelf.folios()
        slots: list[Slot] = []
        unread = 0
        try:
            async for some in self._shelf.found():
                restored = [self._restored(found, former) for found in some]
                good = [slot for slot in restored if slot is not None]
                await asyncio.gather(*map(self._shelf.put, good))
                unread += len(restored) - len(good)
                slots += good
        finally:
            close_all(list(former.values()))
        if not unread:
            await self._shelf.drop_folios(former)
        return slots

    def _restored(self, found: Found, folios: Mapping[str, int]) -> Slot | None:
        try:
            slot = restore_slot(found.record, found.fds, self.incarnation, self._owner, folios)
        except WorldMoveError as error:
            log.warning("slot.unreadable", slot=found.record.id, code=error.code, reason=error.message)
            return None
        self._arenas.adopt(slot.counted_bytes)
        self._lying.add(slot)
        return slot

    def close_slot(self, slot: Slot, answer: Moved | Ended) -> None:
        """Ends a session or standby on this node; each worker hears `answer` at its next boundary.

        The descriptors of this node and of the keeper go now (while `pinned`: then); workers have their own.
        """
        if not self._lying.remove(slot):
            return
        self._tickets.void(slot.key)
        self._shelf.drop(slot)
        slot.ranks.finish(answer)
        slot.ranks.retire()
        slot.close(self._arenas)

    def attach(self, session_id: str, fingerprint: Mapping[str, str]) -> tuple[Slot, tuple[Ticket, ...]]:
        """Tickets for another worker to take up the ranks that have none.

        Raises:
            NotFoundError: no such session here.
            FingerprintMismatchError: it would not generate the same bits.
            ConflictError: no rank is free, or one was left torn.
        """
        slot = self.session(session_id)
        fields = prints.differences(slot.fingerprint, fingerprint)
        if fields:
            raise FingerprintMismatchError(f"the worker differs in {fields}", fields=fields)
        vacant = slot.ranks.vacant
        if not vacant:
            raise ConflictError(f"session {session_id!r} has a worker for every rank")
        gone = {region.rank for region in slot.manifest.regions if region.source.kind == "cuda-ipc"}
        for rank in vacant:
            slot.ranks.check_free(rank)
            if rank in gone:
                raise ConflictError(f"rank {rank}'s memory was its worker's own, and has gone with it")
        return slot, tuple(Ticket(rank=r, token=self._tickets.issue(slot.key, r)) for r in vacant)

    def _issue(self, slot: Slot) -> tuple[Ticket, ...]:
        count = len(slot.secrets)
        return tuple(Ticket(rank=r, token=self._tickets.issue(slot.key, r)) for r in range(count))

    # Looking up, promising, handing over

    def session(self, session_id: str) -> Slot:
        """The slot of a session; `NotFoundError` if it does not lie here."""
        return self._lying.session(session_id)

    def latest_epoch(self, slot: Slot) -> int:
        """The epoch of a slot, or of the later one of its session that lies here."""
        return max(slot.ranks.page.epoch, self.sessions.get(slot.id, slot).ranks.page.epoch)

    def standby(self, standby_id: str) -> Slot:
        """The slot of a standby; `NotFoundError` if there is none."""
        return self._lying.standby(standby_id)

    def find_standby(self, manifest: Manifest, fingerprint: Mapping[str, str], wanted: Wanted = ANY) -> Slot:
        """A vacant standby that can take the session; raises as `matching.find_standby`."""
        return find_standby(self.standbys.values(), manifest, fingerprint, wanted)

    def bind(self, slot: Slot, move_id: str) -> None:
        """Promises a standby to a move.

        Raises:
            AlreadyMovingError: another move has it.
            NoWorkerError: its worker has gone meanwhile.
        """
        if slot.bound not in (None, move_id):
            raise AlreadyMovingError(f"{slot.id!r} is promised to another move", migration_id=slot.bound)
        if slot.session_id is not None or not slot.ranks.attended:
            raise NoWorkerError(f"standby {slot.id!r} waits no more", retry_after_ms=RETRY_AFTER_MS)
        slot.bound = move_id
        self._shelf.refresh(slot)

    def unbind(self, slot: Slot, move_id: str) -> None:
        """Takes a promise back, once the memory is wiped; nothing if another move has the standby."""
        if slot.bound == move_id:
            slot.bound = None
            self._shelf.refresh(slot)

    async def keep(self, slot: Slot) -> None:
        """Returns when the keeper holds the slot as it is now: to be awaited before a commit relies on it.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        await self._shelf.put(slot)

    async def use_keeper(self, keeper: Keeping) -> None:
        """Another keeper has taken the place of one that was lost, and gets every slot.

        Raises:
            ProcessLostError: that one is gone, too.
        """
        await self._shelf.use(keeper, list(self._lying.by_key.values()))

    def load(self, slot: Slot, block: int, host_states: Sequence[bytes]) -> None:
        """Writes block and host states into a bound standby's page, before the commit; nobody is told."""
        slot.ranks.load(block, tuple(host_states))

    def adopt(self, slot: Slot, session_id: str, epoch: int, session: Manifest, seed: int) -> None:
        """After the commit: the loaded standby is the session's worker from now on and may generate.

        Args:
            slot: the bound standby.
            session_id: whose it is now.
            epoch: the committed one.
            session: the manifest at the source, for revision, times and endpoint.
            seed: of the session.
        """
        self.standbys.pop(slot.id, None)
        slot.became(session_id, session, seed)
        self.sessions[session_id] = slot
        slot.ranks.adopt(session_id, epoch, slot.manifest.endpoint)
        self._shelf.refresh(slot)

    # The door's questions

    async def enter(self, first: Hello | Rejoin) -> Entry:
        """See `worldmove.hosting.door.Desk`."""
        return await self._entrance.enter(first)

    async def hand_back(self, first: Handback, fds: Sequence[int]) -> None:
        """See `worldmove.hosting.door.Desk`."""
        self._check_away(first)
        await self.returns.take_in(first, fds)

    async def farewell(self, first: Rejoin) -> Moved | Ended | None:
        """See `worldmove.hosting.door.Desk`."""
        held = self.sessions.get(first.session_id or "")
        return await self.returns.farewell(first, held.ranks.page.epoch if held else None)

    def _check_away(self, first: Handback) -> None:
        name, key = first.session_id, first.rejoin.slot
        if name in self.sessions or name in self._opening or key in self._lying.by_key:
            raise ConflictError(f"session {name!r} is on this node already")

    def _take_back(self, slot: Slot) -> None:
        self._arenas.adopt(slot.counted_bytes)
        self._lying.add(slot)
        self._shelf.refresh(slot)

    async def revise(self, slot: str, rank: int, revision: Revise, fds: Sequence[int]) -> None:
        """See `worldmove.hosting.door.Desk`."""
        held = self._lying.by_key.get(slot)
        if held is None:
            close_all(fds)
            return
        try:
            await check_made(rank, revision, fds, self._arenas)
        except BaseException:
            close_all(fds)
            raise
        if held.key not in self._lying.by_key:
            close_all(fds)
            return
        held.revise(rank, revision, fds, self._arenas)
        await self._shelf.put(held)
        if held.key in self._lying.by_key:
            held.ranks.page.set_revisions(rank, held.revisions[rank])

    def _discard(self, fds: Sequence[int]) -> None:
        """Closes descriptors beside the event loop: the last close of an arena takes a while."""
        self._freeing.spawn(free_arenas(fds))

    def _not_freed(self, error: BaseException) -> None:
        log.warning("arenas.free", reason=str(error))

    def _changed(self, slot: Slot, change: Change) -> None:
        if change == "attached" and slot.key in self._lying.by_key:
            # Former pages may have gone with the last worker that came back.
            self._shelf.refresh(slot)
        try:
            self._on_change(slot, change)
        except WorldMoveError as error:
            log.warning("slot.change", slot=slot.id, change=change, code=error.code, reason=error.message)
