"""The destination's memory during a move: what is known of it, what is asked for, what has landed.

Landing, reading back and comparing are separate stages with bounded queues between them. A leaf counts as
there only when it was read back from this node's memory, after the world was paused: what was copied
live and kept is read once more while the last bytes still arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from worldmove import delta
from worldmove.arming import Armed
from worldmove.bringing import Bringing
from worldmove.counting import RoundCount, bytes_before, damages
from worldmove.digest import LeafTable, Leaves
from worldmove.directing import DirectPath
from worldmove.errors import ValidationError, WorldMoveError
from worldmove.hashing import RegionHashes
from worldmove.manifest import Span
from worldmove.messages import DamagedLeaf, TablePart
from worldmove.pacing import Duty
from worldmove.paths import LocalPath, Path
from worldmove.reading import Plan, Reader
from worldmove.rearranging import Rearranger, Tables
from worldmove.tasks import Tasks


class World(NamedTuple):
    """What enters a root beside the regions (`Reader.sum_up`)."""

    session_id: str
    epoch: int
    block: int
    host_states: tuple[bytes, ...]


class Inbound:
    """Receives one session into one memory.

    Errors of the work that it spawns go to `on_error`; the owner then aborts the path and calls `stop`.
    `on_landed` is told the bytes of each batch that has landed; `on_read` the bytes of what was here already,
    and the seconds in which they were read in the pause.

    Attributes:
        repair_bytes: what was sent again because it was damaged; no round counts it.
    """

    def __init__(
        self,
        reader: Reader,
        path: Path,
        on_error: Callable[[BaseException], None],
        on_landed: Callable[[int], None],
        on_read: Callable[[int, float], None] = lambda _nbytes, _seconds: None,
    ) -> None:
        self._reader = reader
        self._path = path
        self._landing = path if isinstance(path, LocalPath) else None
        self._tasks = Tasks(on_error)
        self._on_landed = on_landed
        self._on_read = on_read
        self._live_share = 1.0
        self._bringing = Bringing(
            reader,
            path,
            spawn=self._tasks.spawn,
            urgent=lambda: self._count.final or self._armed is not None,
            on_landed=self._note_batch,
            on_read=self._prove,
        )
        self._count = RoundCount(0, final=False, started=0.0)
        self._attempts: dict[int, int] = {}
        self.repair_bytes = 0
        count = reader.memory.leaf_map.count
        self._asked, self._proven = (np.zeros(count, dtype=np.bool_) for _ in range(2))
        self._own: LeafTable
        self._theirs: LeafTable
        self._hashes: RegionHashes
        self._rearranger: Rearranger
        self._everything: Plan | None = None
        self._armed: Armed | DirectPath | None = None
        self._expected: Leaves | None = None
        self._fresh = False
        self._hashing: asyncio.Task[None] | None = None
        self._digests: list[bytes] | None = None
        self._foreseen: tuple[World, str] | None = None
        self._equal = False

    async def open(self, *, arm: bool = False, live_share: float = 1.0) -> None:
        """Makes the tables: what lies here, what was read again in the pause, and the source's.

        Args:
            arm: has everything begin to come as soon as the world stands, if its devices can see that.
            live_share: of the time, in which live rounds may bring bytes.
        """
        self._live_share = live_share
        self._own = await self._reader.table()
        self._bringing.into(self._own)
        again = await self._reader.table()
        self._theirs = await self._reader.table()
        tables = Tables(self._own, again, self._theirs)
        self._rearranger = Rearranger(
            self._reader, tables, self._asked, self._ask, on_read=self._on_read, spawn=self._tasks.spawn
        )
        if self._landing is not None and self._landing.at_once:
            # A world that stands waits for none of this.
            leaf_map = self._reader.memory.leaf_map
            batches = delta.batches(leaf_map.whole(), leaf_map, self._path.batch_bytes)
            self._everything = self._landing.plan(batches, self._own)
            await self._reader.prepare(self._everything)
            if arm and self._landing.sign is not None:
                plan, self._everything = self._everything, None
                self._armed = self._landing.arm(plan, self._landing.sign, self._note_landed)
        elif arm and isinstance(self._path, DirectPath):
            everything = self._reader.memory.leaf_map.whole()
            await self._bringing.prepare(everything)
            if self._path.ahead:
                self._armed = self._path
                self._tasks.spawn(self._bringing.bring(everything, ahead=True))

    async def expect(self) -> None:
        """After the last live round: what is foreseen of the last one begins to come once the world stands.

        A wrong guess costs bytes: whatever is brought while it stands is right. Raises as `Reader.prepare`.
        """
        leaves = await self._rearranger.expect()
        spans = self._reader.memory.leaf_map.runs(leaves)
        if not spans:
            return
        if self._landing is not None and self._landing.sign is not None:
            plan = self._landing.plan(list(self._bringing.batches(spans)), self._own)
            await self._reader.prepare(plan)
            if self._may_begin(leaves):
                # A node takes a millisecond or two to note fifty runs one by one, while the world stands.
                self._armed = self._landing.arm(plan, self._landing.sign)
        elif isinstance(self._path, DirectPath) and self._path.ahead and self._may_begin(leaves):
            self._armed = self._path
            self._tasks.spawn(self._bringing.bring(spans, ahead=True))

    def _may_begin(self, leaves: Leaves) -> bool:
        if self._count.final:
            return False  # it stands already, and all of it is asked for as always
        self._own.forget(leaves)
        self._expected, self._bringing.duty = leaves, Duty(1.0)
        return True

    def start_round(self, number: int, *, final: bool) -> None:
        """Begins a round: asks for every leaf that was never read here; a final one reads the rest again."""
        self._bringing.duty = Duty(share := 1.0 if final else self._live_share)
        landed_at = self._count.landed_at if self._armed is not None else None  # before this word of it came
        self._count = RoundCount(
            number, final=final, started=time.monotonic(), share=share, landed_at=landed_at
        )
        self._digests = self._foreseen = None
        self._equal = self._fresh = False
        self._asked[:] = self._proven[:] = False
        self._theirs.forget()
        self._hashes = RegionHashes(self._reader, self._theirs, at_once=final)
        if self._armed is not None:
            self._armed.go()
            if self._expected is None:
                self._ask_all()
            else:
                self._tasks.spawn(self._came(self._armed, self._note_asked(self._expected)))
                self._ask(np.flatnonzero(~(self._own.known | self._asked)))
        elif self._own.known.any():
            self._ask(np.flatnonzero(~self._own.known))
        else:
            self._ask_all()
        self._rearranger.start_round(final=final)

    def plan(self, part: TablePart) -> None:
        """Takes a part of the source's table; plans what can be planned by it, and asks for what it has to.

        Raises:
            ValidationError: the part lies outside the session's leaves, or has come in this round already.
            FramingError: it is shown in a table that ends before.
        """
        count = part.leaves
        self._hashes.note(part.first, count)
        self._theirs.store(part.first, self._digests_of(part))
        self._proven[part.first : part.first + count] = False
        if self._fresh and self._asked[part.first : part.first + count].all():
            self._prove(part.first, count)
        self._rearranger.see(part.first, count)

    def _digests_of(self, part: TablePart) -> bytes:
        if not part.shown:
            return part.digests
        if self._landing is None or self._landing.shown is None:
            raise ValidationError("leaves are shown in a table that was not offered", field="shown")
        return self._landing.shown.rows(part.first, part.shown)

    async def close_round(self) -> RoundCount:
        """Returns when everything that was asked for has landed and was read back.

        In a final round the source's table is hashed meanwhile: where the two turn out to be equal, what was
        waited for is not computed again.
        """
        if self._count.final:
            self._hashing = self._tasks.spawn(self._hash())
        self._rearranger.finish()
        await self._tasks.join()
        self._rearranger.settle()
        self._proven &= self._asked
        self._count.copied_bytes = self._rearranger.copied_bytes
        return self._count

    async def shift_ahead(self, within_s: float = inf) -> None:
        """After a live round: see `Rearranger.shift_ahead`."""
        await self._rearranger.shift_ahead(within_s)

    @property
    def arrived(self) -> bool:
        """Whether all that was armed has come."""
        return self._armed is None or bool(self._own.known.all())

    async def confirm(self, block: int) -> None:
        """Brings everything again if it had begun to come before the world stood at `block`.

        A world may stand for somebody else, at an earlier block, and go on.
        """
        armed, self._armed = self._armed, None
        if armed is not None and not await armed.stood_at(block):
            self._bring_again()
            await self._tasks.join()

    def _bring_again(self) -> None:
        leaf_map, expected = self._reader.memory.leaf_map, self._expected
        spans = leaf_map.whole() if expected is None else leaf_map.runs(expected)
        rows = slice(None) if expected is None else expected
        came = np.flatnonzero(self._own.known) if expected is None else expected[self._own.known[expected]]
        self._count.again(came.size, sum(span.length for span in leaf_map.runs(came)))
        self._own.forget(expected)
        self._proven[rows] = False
        self._tasks.spawn(self._bringing.bring(spans))

    def damaged(self) -> Leaves:
        """Leaves whose bytes here differ from the source's table."""
        proven = bool(self._proven.all())  # row by row as they were read back, and none was written since
        wrong = np.empty(0, dtype=np.int64) if proven else self._own.differing(self._theirs)
        self._equal = wrong.size == 0
        return wrong

    async def repair(self) -> None:
        """Asks once more for the damaged leaves, and reads them back."""
        wrong = self.damaged()
        for leaf in wrong.tolist():
            self._attempts[leaf] = self._attempts.get(leaf, 0) + 1
        self._own.forget(wrong)
        self._proven[wrong] = False
        spans = self._reader.memory.leaf_map.runs(wrong)
        self.repair_bytes += sum(span.length for span in spans)
        self._tasks.spawn(self._bringing.bring(spans))
        await self._tasks.join()

    def damages(self) -> tuple[DamagedLeaf, ...]:
        """What had to be sent again in this move, by region and leaf of the region; the first 10,000."""
        return damages(self._attempts, self._reader.memory)

    async def foresee(self, world: World) -> None:
        """Computes the root of what the source's table says, while the last bytes still arrive.

        `root` takes it if memory, read back, has turned out to equal that table, and not otherwise.
        """
        if self._hashing is not None:
            await asyncio.wait({self._hashing})
        if self._digests is not None:
            self._foreseen = world, self._sum_up(self._digests, world)

    async def root(self, world: World) -> str:
        """The root (hex) of what lies in memory here."""
        if self._equal and self._foreseen is not None and self._foreseen[0] == world:
            return self._foreseen[1]
        digests = self._digests if self._equal else None
        if digests is None:
            digests = await self._reader.region_digests(self._own, urgent=True)
        return self._sum_up(digests, world)

    def _sum_up(self, digests: Sequence[bytes], world: World) -> str:
        return self._reader.sum_up(digests, **world._asdict())

    @property
    def count(self) -> RoundCount:
        """What the last round took."""
        return self._count

    @property
    def kept_bytes(self) -> int:
        """Bytes of the state that the last round neither sent nor copied."""
        moved = self._count.bytes - self._count.again_bytes + self._count.copied_bytes
        return max(self._reader.memory.leaf_map.total - moved, 0)

    async def _hash(self) -> None:
        # Whoever needs it and doesn't find it asks again, and hears what is wrong.
        with contextlib.suppress(WorldMoveError):
            self._digests = await self._hashes.all()

    async def stop(self) -> None:
        """Cancels all work; memory is quiet once the path and the executors are, too."""
        await self._tasks.cancel()

    def _ask(self, leaves: Leaves) -> None:
        if leaves.size == 0:
            return
        self._own.forget(leaves)
        self._tasks.spawn(self._bringing.bring(self._note_asked(leaves)))

    def _note_asked(self, leaves: Leaves) -> list[Span]:
        self._asked[leaves] = True
        self._count.asked_at = self._count.asked_at or time.monotonic()
        spans = self._reader.memory.leaf_map.runs(leaves)
        self._count.leaves += int(leaves.size)
        self._count.bytes += sum(span.length for span in spans)
        return spans

    def _ask_all(self) -> None:
        """As `_ask`, without a list of every leaf: nothing is known but what comes in this round."""
        leaf_map = self._reader.memory.leaf_map
        self._fresh = True
        self._asked[:] = True
        self._count.asked_at = self._count.started
        self._count.leaves += leaf_map.count
        self._count.bytes += leaf_map.total
        plan, self._everything = self._everything, None
        if self._armed is not None:
            self._tasks.spawn(self._arrived(self._armed))
        elif self._landing is None or plan is None or self._count.share < 1.0:
            self._tasks.spawn(self._bringing.bring(leaf_map.whole()))
        else:
            self._tasks.spawn(self._landing.land_planned(plan, self._note_landed, urgent=self._count.final))

    def _note_landed(self, first: int, count: int) -> None:
        leaf_map = self._reader.memory.leaf_map
        self._count.landed_at = time.monotonic()
        self._on_landed(bytes_before(leaf_map, first + count) - bytes_before(leaf_map, first))
        self._prove(first, count)

    def _note_batch(self, nbytes: int) -> None:
        self._count.landed_at = time.monotonic()
        self._on_landed(nbytes)

    def _prove(self, first: int, count: int) -> None:
        """Leaves that were read back in this round are compared with what the source says of them."""
        self._proven[first : first + count] = self._own.differing(self._theirs, first, count).size == 0

    async def _arrived(self, armed: Armed | DirectPath) -> None:
        await armed.ended()
        if isinstance(armed, Armed) and not armed.whole:
            # It has waited for too long, or an executor died: asked for now, and not after the table.
            self._armed = None
            self._bring_again()
        started = self._count.started
        self._count.started = self._count.asked_at = min(started, armed.began or started)

    async def _came(self, armed: Armed | DirectPath, spans: Sequence[Span]) -> None:
        await self._arrived(armed)
        if isinstance(armed, DirectPath) or not armed.whole:
            return  # each batch is noted by itself
        self._count.landed_at = time.monotonic()
        self._on_landed(sum(span.length for span in spans))
