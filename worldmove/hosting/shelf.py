"""Puts every slot's descriptors into the keeper, so that worlds outlive the node, and finds them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import structlog

from worldmove.errors import FramingError, ProcessLostError, WorldMoveError
from worldmove.hosting.folio import Folio
from worldmove.hosting.pages import Pages
from worldmove.hosting.slots import Slot, SlotRecord
from worldmove.ipc import close_all
from worldmove.tasks import Tasks

log = structlog.get_logger(__name__)

FDS_PER_KEY = 200
AT_ONCE = 64
"""Slots that are asked for at once when a node starts."""
PATIENCE_S = 3.0
"""How long registrations and commits wait for another keeper when one is lost."""
_PREFIX = "slot/"
_FOLIOS = "pages/"


class Keeping(Protocol):
    """What hosting needs of the keeper (`worldmove.memory.keeping.Keeper`)."""

    async def put(self, key: str, meta: bytes, fds: Sequence[int]) -> None:
        """Holds descriptors under a key, in place of what was there."""

    async def get(self, key: str) -> tuple[bytes, list[int]]:
        """Gives them back; the descriptors are the caller's."""

    async def drop(self, key: str) -> None:
        """Closes what is held under a key."""

    async def keys(self) -> Sequence[str]:
        """Everything that is held."""


class _Part(msgspec.Struct, frozen=True):
    """What stands beside one key's descriptors; the record stands with part 0."""

    parts: int
    record: SlotRecord | None = None


class Found(NamedTuple):
    """A slot of a former incarnation. The descriptors (pages, then extents) are the caller's."""

    record: SlotRecord
    fds: list[int]


class Shelf:
    """The keeper as hosting uses it: the newest state of a slot is written, writes of one slot in turn.

    A keeper that is lost fails no slot: worlds go on, and `use` fills the next one.
    """

    def __init__(self, keeper: Keeping | None) -> None:
        self._keeper = keeper
        self._renewed = asyncio.Event()
        self._locks: dict[str, asyncio.Lock] = {}
        self._parts: dict[str, int] = {}
        self._folios: set[str] = set()
        self._sent: set[str] = set()
        self._gone: WeakSet[Slot] = WeakSet()
        self._tasks = Tasks(self._failed)

    async def use(self, keeper: Keeping, slots: Sequence[Slot]) -> None:
        """Another keeper takes the place of one that was lost, and holds all slots."""
        self._keeper = keeper
        self._folios.clear()
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()
        for slot in slots:
            await self._put(slot)

    async def put(self, slot: Slot) -> None:
        """Writes the slot as it is now.

        Raises:
            ProcessLostError: the keeper is gone, and no other one has come within `PATIENCE_S`.
        """
        renewed = self._renewed
        try:
            await self._put(slot)
        except ProcessLostError:
            if not await self._another(renewed):
                raise
            await self._put(slot)

    async def _another(self, renewed: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await renewed.wait()
        except TimeoutError:
            return False
        return True

    async def _put(self, slot: Slot) -> None:
        lock = self._locks.setdefault(slot.key, asyncio.Lock())
        async with lock:
            if self._keeper is None or slot in self._gone:
                return
            if slot.pages.leaf is not None:
                await self._put_folio(slot.pages.leaf.folio)
            with slot.pinned():
                fds = list(slot.all_fds)
                chunks = [fds[at : at + FDS_PER_KEY] for at in range(0, len(fds), FDS_PER_KEY)]
                before = self._parts.get(slot.key, 0)
                self._parts[slot.key] = max(before, len(chunks))
                for number, chunk in enumerate(chunks):
                    part = _Part(len(chunks), slot.record() if number == 0 else None)
                    await self._keeper.put(_key(slot.key, number), msgspec.msgpack.encode(part), chunk)
            for number in range(len(chunks), before):
                await self._keeper.drop(_key(slot.key, number))
            self._parts[slot.key] = len(chunks)

    async def _put_folio(self, folio: Folio) -> None:
        """Before any record that names a place in it."""
        if self._keeper is not None and folio.key not in self._folios:
            key = folio.key
            self._sent.add(key)  # whoever waits for it may be cancelled, and it is held all the same
            await self._keeper.put(f"{_FOLIOS}{key}", b"", [folio.fd])
            self._folios.add(key)

    async def vacate(self, pages: Pages) -> None:
        """The keeper has no record any more that names the place which a page has left, or will leave."""
        empty = pages.vacate()
        if empty in self._folios:
            await self.drop_folios([empty])

    async def keep_folio(self, key: str | None) -> None:
        """Only this one is held, or none: a keeper that holds nothing can end.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        await self.drop_folios((self._folios | self._sent) - {key})

    async def folios(self) -> dict[str, int]:
        """Every folio that former incarnations left with the keeper; the descriptors are the caller's.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        found: dict[str, int] = {}
        if self._keeper is None:
            return found
        for key in await self._keeper.keys():
            if key.startswith(_FOLIOS):
                _, fds = await self._keeper.get(key)
                close_all(fds[1:])
                found[key.removeprefix(_FOLIOS)] = fds[0]
        return found

    async def drop_folios(self, keys: Iterable[str]) -> None:
        """No record names a place in these any more.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        for key in list(keys):
            self._folios.discard(key)
            self._sent.discard(key)
            if self._keeper is not None:
                await self._keeper.drop(f"{_FOLIOS}{key}")

    def refresh(self, slot: Slot) -> None:
        """Writes the slot soon, without being waited for."""
        self._tasks.spawn(self._refreshed(slot))

    async def _refreshed(self, slot: Slot) -> None:
        await asyncio.sleep(0)  # what is to be told to a peer goes first: a world may stand until it is heard
        await self.put(slot)

    def drop(self, slot: Slot) -> None:
        """Lets the keeper forget a slot, after whatever is being written of it."""
        # For good: a write that waits for its turn behind the drop would bring the slot back.
        self._gone.add(slot)
        self._tasks.spawn(self._drop(slot))

    async def _drop(self, slot: Slot) -> None:
        key = slot.key
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                for number in range(self._parts.pop(key, 0)):
                    if self._keeper is not None:
                        await self._keeper.drop(_key(key, number))
        finally:
            self._locks.pop(key, None)
            # Only now: a record that was left over would name another session's page.
            await self.vacate(slot.pages)

    async def found(self) -> AsyncIterator[list[Found]]:
        """Every slot that a former incarnation left with the keeper, some at a time.

        Raises:
            ProcessLostError: the keeper is gone.
        """
        if self._keeper is None:
            return
        first = [key for key in await self._keeper.keys() if key.startswith(_PREFIX) and key.endswith("/0")]
        names = [key.removeprefix(_PREFIX).removesuffix("/0") for key in first]
        for start in range(0, len(names), AT_ONCE):
            # Asked for together: one answer after another costs two changes of process each.
            some = await asyncio.gather(*map(self._find, names[start : start + AT_ONCE]))
            yield [found for found in some if found is not None]

    async def _find(self, key: str) -> Found | None:
        if self._keeper is None:
            return None
        fds: list[int] = []
        record: SlotRecord | None = None
        try:
            number, parts = 0, 1
            while number < parts:
                meta, more = await self._keeper.get(_key(key, number))
                fds += more
                part = msgspec.msgpack.decode(meta, type=_Part)
                record = part.record or record
                parts = part.parts
                number += 1
            _check_whole(key, record, fds)
        except (WorldMoveError, msgspec.MsgspecError) as error:
            # Left half written by a node that died in the middle: what is there is no world.
            log.warning("shelf.unreadable", slot=key, reason=str(error))
            close_all(fds)
            return None
        except BaseException:
            close_all(fds)
            raise
        self._parts[key] = parts
        return None if record is None else Found(record, fds)

    async def close(self) -> None:
        """Finishes what is being written."""
        await self._tasks.join()

    def _failed(self, error: BaseException) -> None:
        log.warning("shelf.keeper", reason=str(error))


def _check_whole(key: str, record: SlotRecord | None, fds: Sequence[int]) -> None:
    if record is None or (record.pages < 1 and record.leaf is None) or len(fds) != _descriptors(record):
        raise FramingError(f"slot {key} is not whole")


def _descriptors(record: SlotRecord) -> int:
    spare = 1 + len(record.spare.extents) if record.spare is not None else 0
    return record.pages + len(record.extents) + spare


def _key(slot: str, part: int) -> str:
    return f"{_PREFIX}{slot}/{part}"
