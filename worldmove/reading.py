"""Reading a session's memory into leaf tables, through the executors. The node itself hashes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from worldmove.delta.columns import SCRATCH, Move
from worldmove.digest import LeafTable, hash_bytes, region_heads, root
from worldmove.errors import ProcessLostError, ValidationError
from worldmove.executor.devices import Pools
from worldmove.executor.jobs import Part
from worldmove.executor.messages import CopyPiece, Piece
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.memory import Holding
from worldmove.manifest import Span
from worldmove.scratches import Scratches, goes_a_short_way
from worldmove.tasks import each

OnRead = Callable[[int, int], None]
"""Called with (first leaf, number of leaves) as parts of a reading are done."""

INLINE_BYTES = 64 << 10
INLINE_REGIONS = 512
"""A table as small as this is hashed here, in a tenth of a millisecond; to ask an executor takes longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Work that is known beforehand, down to the executors' requests; done once.

    Attributes:
        table: what is read goes there.
        parts: for each pool, its parts.
        leaves: the (first, count) of the leaves that a list of pieces has, by the list's `id`.
    """

    table: LeafTable
    parts: list[tuple[ExecutorPool, list[Part]]]
    leaves: dict[int, list[tuple[int, int]]]

    def note(self, done: list[Piece], on_read: OnRead | None) -> None:
        """Part of it is done: its leaves are known."""
        for first, count in self.leaves[id(done)]:
            self.table.learn(first, count)
            if on_read is not None:
                on_read(first, count)

    def single_parts(self) -> list[Plan]:
        """The same work, a request at a time."""
        return [Plan(self.table, [(pool, [part])], self.leaves) for pool, some in self.parts for part in some]


HOST = "host"
FILL_TRIES = 5


class Reader:
    """One memory at one revision, attached to the executors, with tables for what was read.

    Each extent is worked on by the executors of its own device, which also hold every table; the host's
    hold them too, since they hash.
    """

    def __init__(self, memory: Holding, pools: Pools, seed: int) -> None:
        self.memory = memory
        self.seed = seed
        self._pools = pools
        self._devices = sorted({HOST, *(extent.device for extent in memory.extents)})
        self._keys: dict[tuple[int, str], int] = {}
        self._tables: list[tuple[LeafTable, dict[str, int]]] = []
        self._scratches = Scratches(pools)
        self._heads = region_heads(memory.manifest.regions)
        self._edges: list[int] = memory.leaf_map.first.tolist()

    async def open(self, *, writable: bool = True, towards: Holding | None = None) -> None:
        """Maps the extents in the executors; undone if it fails.

        Args:
            writable: false maps them read-only.
            towards: another memory with the same manifest, which this one will be copied to: then each
                extent is mapped by those devices that its regions go to, and by no other.

        Raises:
            ManifestError: an extent lies on a device that this node has not.
        """
        try:
            for number, device in self._homes(towards):
                extent, fd = self.memory.extents[number], self.memory.fds[number]
                pool, on_device = self._pools.of(device), extent.device != HOST
                key = await pool.attach(fd, extent.nbytes, writable=writable, device=on_device)
                self._keys[number, device] = key
        except BaseException:
            await self.close()
            raise

    def _homes(self, towards: Holding | None) -> list[tuple[int, str]]:
        """Which extents are mapped by which devices."""
        if towards is None:
            return [(number, extent.device) for number, extent in enumerate(self.memory.extents)]
        pairs = zip(self.memory.places, towards.places, strict=True)
        return sorted({(mine.extent, towards.extents[theirs.extent].device) for mine, theirs in pairs})

    def all_spans(self) -> list[Span]:
        """Every byte of every region."""
        return self.memory.leaf_map.whole()

    async def table(self) -> LeafTable:
        """A new table, all leaves unknown, that executors can write; lives as long as the reader."""
        table = LeafTable(self.memory.leaf_map.count)
        keys: dict[str, int] = {}
        self._tables.append((table, keys))
        try:
            for device in self._devices:
                keys[device] = await self._pools.of(device).attach(table.fd, table.nbytes, writable=True)
        except BaseException:
            self._tables.remove((table, keys))
            await self._drop(keys.items())
            table.close()
            raise
        return table

    async def read(
        self, table: LeafTable, spans: Sequence[Span], *, urgent: bool, on_read: OnRead | None = None
    ) -> None:
        """Digests leaf-aligned spans of memory, as they are now, into `table`.

        Raises:
            ProcessLostError: an executor ended meanwhile; some leaves may not have been read.
        """
        await self.perform(self.plan_read(table, spans), urgent=urgent, on_read=on_read)

    def plan_read(self, table: LeafTable, spans: Sequence[Span], *, few: bool = False) -> Plan:
        """What `read` does, for `prepare` and `perform`; `few`: in few parts, each of which is waited for."""
        pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for span in spans:
            device, piece = self._piece(span)
            pieces[device].append(piece)
        keys = self._keys_of(table)
        pools = {device: self._pools.of(device) for device in pieces}
        return _plan(
            table,
            [
                (pools[device], pools[device].plan_digest(keys[device], self.seed, some, few=few))
                for device, some in pieces.items()
            ],
        )

    async def prepare(self, plan: Plan) -> None:
        """Has executors get ready for a plan: what its pieces need is on the device by then."""
        await each([pool.prepare(parts) for pool, parts in plan.parts])

    async def perform(
        self,
        plan: Plan,
        *,
        urgent: bool,
        on_read: OnRead | None = None,
    ) -> None:
        """Does what was planned; arguments and errors as `read`."""

        def part(done: list[Piece]) -> None:
            plan.note(done, on_read)

        await each([pool.perform(parts, urgent=urgent, on_part=part) for pool, parts in plan.parts])

    async def land(self, source: Reader, table: LeafTable, spans: Sequence[Span], *, urgent: bool) -> None:
        """Copies leaf-aligned spans as `copy_from` does, and reads each back as `read` does."""
        await self.perform(self.plan_land(source, table, [spans]), urgent=urgent)

    def plan_land(self, source: Reader, table: LeafTable, batches: Iterable[Sequence[Span]]) -> Plan:
        """What `land` does with each of these batches, for `prepare` and `perform`."""
        parts: defaultdict[str, list[Part]] = defaultdict(list)
        for batch in batches:
            for device, some in self._landing(source, table, batch):
                parts[device] += some
        return _plan(table, [(self._pools.of(device), some) for device, some in parts.items()])

    def _landing(
        self, source: Reader, table: LeafTable, spans: Sequence[Span]
    ) -> Iterator[tuple[str, list[Part]]]:
        copies: defaultdict[str, list[CopyPiece]] = defaultdict(list)
        reads: defaultdict[str, list[Piece]] = defaultdict(list)
        for span in spans:
            device, piece = self._piece(span)
            theirs = source.memory.places[span.region]
            there = source._key(theirs.extent, device), theirs.offset + span.offset
            copies[device].append(CopyPiece(*there, piece.key, piece.offset, span.length))
            reads[device].append(piece)
        keys = self._keys_of(table)
        for device, some in copies.items():
            yield device, self._pools.of(device).plan_land(some, reads[device], keys[device], self.seed)

    async def copy_from(self, source: Reader, spans: Sequence[Span], *, urgent: bool) -> None:
        """Copies spans of another memory, opened `towards` this one, into this one, by its own devices."""
        pieces: defaultdict[str, list[CopyPiece]] = defaultdict(list)
        for span in spans:
            theirs = source.memory.places[span.region]
            mine = self.memory.places[span.region]
            device = self.memory.extents[mine.extent].device
            pieces[device].append(
                CopyPiece(
                    source._key(theirs.extent, device),
                    theirs.offset + span.offset,
                    self._key(mine.extent, device),
                    mine.offset + span.offset,
                    span.length,
                )
            )
        await each([self._pools.of(device).copy(some, urgent=urgent) for device, some in pieces.items()])

    @property
    def devices(self) -> list[str]:
        """For each region the device that it lies on, which copies within it."""
        return [self.memory.extents[place.extent].device for place in self.memory.places]

    async def rearrange(self, moves: Sequence[Move], *, ordered: bool, urgent: bool) -> None:
        """Moves bytes within this memory, through a scratch where a move says so.

        Args:
            moves: of one stage of a schedule; each within one device.
            ordered: they depend on their order.
            urgent: as in `read`.

        Raises:
            NoMemoryError: a GPU has no room for a scratch, and one is needed; nothing was moved.
            ProcessLostError: an executor ended meanwhile; the targets are undefined.
        """
        devices = self.devices
        groups: defaultdict[str, list[Move]] = defaultdict(list)
        for move in moves:
            groups[devices[move.source if move.source != SCRATCH else move.target]].append(move)
        scratches = {}
        for device, some in groups.items():  # all of them first: what began would have to be waited for
            needed = any(SCRATCH in (move.source, move.target) for move in some)
            useful = any(map(goes_a_short_way, some))
            scratches[device] = await self._scratches.of(device, needed=needed, useful=useful)
        await each(
            [
                self._shift(device, some, scratches[device], ordered=ordered, urgent=urgent)
                for device, some in groups.items()
            ]
        )

    async def _shift(
        self, device: str, moves: Sequence[Move], scratch: int, *, ordered: bool, urgent: bool
    ) -> None:
        pool = self._pools.of(device)

        def spot(region: int, offset: int) -> tuple[int, int]:
            return (scratch, offset) if region == SCRATCH else self.locate(region, offset)[1:]

        pieces = [
            CopyPiece(
                *spot(move.source, move.source_offset), *spot(move.target, move.target_offset), move.length
            )
            for move in moves
        ]
        if device == HOST and not ordered:
            await pool.copy(pieces, urgent=urgent)
        else:
            await pool.copy(pieces, urgent=urgent, order=self._scratches.room(device) or True)

    async def region_digests(
        self, table: LeafTable, regions: Iterable[int] | None = None, *, urgent: bool = False
    ) -> list[bytes]:
        """BLAKE2b-256 of the leaf digests of each of these regions, in manifest order of all of them."""
        if regions is None and (digests := self.small_digests(table)) is not None:
            return digests
        wanted = range(len(self._edges) - 1) if regions is None else regions
        ranges = [(self._edges[each], self._edges[each + 1] - self._edges[each]) for each in wanted]
        return await self._pools.host.region_digests(self._keys_of(table)[HOST], ranges, urgent=urgent)

    def small(self, table: LeafTable) -> bool:
        """Whether a table is so small that it is hashed here."""
        return table.nbytes <= INLINE_BYTES and len(self._edges) <= INLINE_REGIONS

    def small_digests(self, table: LeafTable) -> list[bytes] | None:
        """The same without waiting, if `table` is so small that it is hashed here; else `None`."""
        return table.hashes(self._edges) if self.small(table) else None

    def sum_up(
        self,
        digests: Sequence[bytes],
        *,
        session_id: str,
        epoch: int,
        block: int,
        host_states: Sequence[bytes],
    ) -> str:
        """The root (hex) of regions with these digests, together with every rank's host state."""
        value = root(
            session_id=session_id,
            epoch=epoch,
            block=block,
            seed=self.seed,
            regions=self.memory.manifest.regions,
            region_digests=digests,
            state_digests=[hash_bytes(state) for state in host_states],
            heads=self._heads,
        )
        return value.hex()

    async def fill(self, byte: int) -> None:
        """Overwrites the regions; what lies beside them in the same extents is somebody else's.

        An executor that dies meanwhile is replaced and all of it done again: memory that is not wiped could
        be lent to nobody any more.

        Raises:
            ProcessLostError: executors die again and again, or the node goes.
        """
        for left in reversed(range(FILL_TRIES)):
            try:
                await self._fill(byte)
            except ProcessLostError:
                if not left:
                    raise
            else:
                return

    async def _fill(self, byte: int) -> None:
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.memory.extents]
        for place, region in zip(self.memory.places, self.memory.manifest.regions, strict=True):
            ranges[place.extent].append((place.offset, region.nbytes))
        for (number, device), key in self._keys.items():
            await self._pools.of(device).fill(key, byte, ranges[number])

    async def close(self) -> None:
        """Waits until no executor touches this memory, then unmaps it there."""
        mapped = [(device, key) for (_, device), key in self._keys.items()]
        self._keys.clear()
        mapped += self._scratches.take()
        tables, self._tables = self._tables, []
        for _, keys in tables:
            mapped += keys.items()
        await self._drop(mapped)
        for table, _ in tables:
            table.close()

    async def _drop(self, mapped: Iterable[tuple[str, int]]) -> None:
        for device, key in mapped:
            pool = self._pools.of(device)
            await pool.settle(key)
            await pool.detach(key)

    def locate(self, region: int, offset: int) -> tuple[str, int, int]:
        """Where a byte of a region lies: its device, and key and offset there.

        Raises:
            ValidationError: the memory is not open.
        """
        place = self.memory.places[region]
        device = self.memory.extents[place.extent].device
        return device, self._key(place.extent, device), place.offset + offset

    def _key(self, extent: int, device: str) -> int:
        key = self._keys.get((extent, device))
        if key is None:
            raise ValidationError(f"extent {extent} is not mapped on {device!r}", field="extent")
        return key

    def _keys_of(self, table: LeafTable) -> dict[str, int]:
        return next(keys for known, keys in self._tables if known is table)

    def _piece(self, span: Span) -> tuple[str, Piece]:
        place = self.memory.places[span.region]
        device = self.memory.extents[place.extent].device
        first, _ = self.memory.leaf_map.leaves_of(span)
        leaf = int(self.memory.leaf_map.leaf_bytes[span.region])
        key = self._key(place.extent, device)
        return device, Piece(key, place.offset + span.offset, span.length, leaf, first)


def _plan(table: LeafTable, parts: list[tuple[ExecutorPool, list[Part]]]) -> Plan:
    leaves = {id(part.pieces): _leaf_ranges(part.pieces) for _, some in parts for part in some}
    return Plan(table, parts, leaves)


def _leaf_ranges(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Merges the leaves of pieces into contiguous ranges, so that small regions travel together."""
    if not pieces:
        return []
    first = np.array([piece.first_leaf for piece in pieces], dtype=np.int64)
    count = np.array([-(-piece.length // piece.leaf_bytes) for piece in pieces], dtype=np.int64)
    order = np.argsort(first)
    first, count = first[order], count[order]
    breaks = np.flatnonzero(first[1:] != first[:-1] + count[:-1]) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(first)]]) - 1
    return [(int(first[a]), int(first[b] + count[b] - first[a])) for a, b in zip(starts, stops, strict=True)]
