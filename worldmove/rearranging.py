"""Leaves that are at the destination already: kept where they are, or copied to where they belong.

In the last round they are read again: a leaf counts as there only when it was read, in the pause, where it
lies then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, NamedTuple

import numpy as np

from worldmove import delta
from worldmove.delta.choosing import Chooser
from worldmove.delta.columns import merged
from worldmove.delta.foreseeing import Foresight
from worldmove.delta.geometry import Flags, Geometry, Longs, steps_of
from worldmove.delta.plan import DeltaPlan, ordered
from worldmove.digest import LeafTable, Rows
from worldmove.errors import NoMemoryError, ValidationError
from worldmove.reading import Plan, Reader

READ_BYTES = 16 << 20
"""What is read again goes to the executors in pieces of this size: leaves that land are read in between.

On a GPU they are read beside it anyway.
"""


class Tables(NamedTuple):
    """What lies here, what was read again in the pause, and the source's."""

    own: LeafTable
    again: LeafTable
    theirs: LeafTable


class Rearranger:
    """Makes what is here already what the source's table says, as far as that goes without any bytes.

    Args:
        reader: of the memory.
        tables: whose `own` and `again` this keeps in step with it.
        asked: bool, by leaf, what is sent in this round: kept by the owner.
        ask: asks for leaves to be sent; called as soon as nobody needs their old content.
        on_read: told the bytes of what was read again, and the seconds that it took.
        spawn: runs work that the owner waits for.

    Attributes:
        copied: bool, by leaf: what was copied in this round. copied_bytes: how much of it.
    """

    def __init__(
        self,
        reader: Reader,
        tables: Tables,
        asked: Flags,
        ask: Callable[[Longs], None],
        *,
        on_read: Callable[[int, float], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        memory = reader.memory
        steps = steps_of(memory.manifest.regions)
        self._geometry = Geometry(memory.leaf_map, steps, reader.devices)
        self._chooser = Chooser(self._geometry, tables.own, tables.theirs)
        self._foresight = Foresight(self._geometry)
        self._reader = reader
        self._tables = tables
        self._asked = asked
        self._ask = ask
        self._on_read = on_read
        self._spawn = spawn
        self._final = False
        self._moving = 0
        self._complete = False
        self._kept: tuple[Longs, Plan] | None = None
        self._copied_s = 0.0
        self._turn = asyncio.Lock()  # there is one scratch
        self._planned = np.zeros(self._geometry.count, dtype=np.bool_)
        self._reread = np.zeros(self._geometry.count, dtype=np.bool_)
        self.copied = np.zeros(self._geometry.count, dtype=np.bool_)
        self.copied_bytes = 0

    async def expect(self) -> Longs:
        """Has GPUs get ready to read again what is not expected to be sent in the last round.

        Returns:
            Leaves that are; what lies there is needed by nobody.

        Raises:
            ProcessLostError: an executor ended meanwhile.
        """
        known = self._tables.own.known
        expected = self._foresight.expected(known)
        kept = np.flatnonzero(known & ~expected)
        if kept.size and self._geometry.on_gpu[kept].all():
            plan = self._reader.plan_read(self._tables.again, self._reader.memory.leaf_map.runs(kept))
            await self._reader.prepare(plan)
            self._kept = kept, plan
        return np.flatnonzero(expected)

    def start_round(self, *, final: bool) -> None:
        """Begins a round; a last one reads what is here again, unless it expects that to be moved."""
        self._final = final
        self._complete = False
        self._moving = 0
        moving = bool(self.copied.any()) and not self._foresight.ahead
        for flags in (self._planned, self._reread, self.copied):
            flags[:] = False
        self.copied_bytes = 0
        self._chooser.begin(in_place=self._foresight.ahead)
        self._foresight.begin()
        self._copied_s = 0.0
        if final and not moving:
            self._read_again()

    def see(self, first: int, count: int) -> None:
        """Some leaves of the source's table have come: plans what can be planned by now.

        Raises:
            ValidationError: it was planned by what they were before.
        """
        if self._planned[first : first + count].any():
            raise ValidationError("a part of a table that was complete", field="first")
        if self._asked.all():
            return
        if not self._asked[first : first + count].all():
            self._ask(self._chooser.see(first, count, self._asked))
        self._plan(self._chooser.ready(first, count) & ~self._planned)

    def finish(self) -> None:
        """Nothing more comes of the table."""
        self._plan(~self._planned)
        self._complete = True
        self._read_moved()

    def settle(self) -> None:
        """All work of the round has ended; what was not read when it had to be counts as unknown."""
        if self._planned.any():
            self._chooser.end(copied=int(self.copied.sum()), sent=int(self._asked.sum()))
        if not self._final:
            self._foresight.end(self._asked)
            return
        self._tables.own.take_over(self._tables.again, ~(self._asked | self.copied))

    async def shift_ahead(self, within_s: float = inf) -> None:
        """Between live rounds: moves on by a stride what has moved by strides, before anybody waits for it.

        What the next round's search takes is made ready behind that, once: it knows memory as it is then.

        Args:
            within_s: nothing is moved where the last copies took longer: blocks would go by meanwhile.

        Raises:
            ProcessLostError: an executor ended meanwhile; what was to move counts as unknown.
        """
        targets = self._foresight.targets(self._tables.own.known)
        if targets.size and self._copied_s <= within_s:
            await self._shift(targets)
        self._chooser.prepare()

    async def _shift(self, targets: Longs) -> None:
        own, began = self._tables.own, time.monotonic()
        origins = targets + self._geometry.step[targets]
        runs = merged(self._geometry, targets, origins)
        moves, moved = ordered(self._geometry, runs), own.rows[origins]
        own.forget(targets)
        async with self._turn:
            for stage in range(moves.count):
                await self._reader.rearrange(moves.moves(stage), ordered=moves.ordered(stage), urgent=False)
        own.rows[targets] = moved
        own.known[targets] = True
        self._foresight.ahead = True
        self._copied_s = time.monotonic() - began

    def _plan(self, leaves: Flags) -> None:
        """Plans these leaves, apart from all others: what is copied, and what is asked for."""
        if not (leaves & ~self._asked).any():
            return
        self._planned |= leaves
        if not (self._tables.own.unequal(self._tables.theirs) & leaves & ~self._asked).any():
            return  # as it was foreseen
        made = self._chooser.plan(self._asked | ~leaves)
        self.copied |= made.copied
        self._foresight.note(made.runs)
        self.copied_bytes += int(made.runs.nbytes(self._geometry).sum())
        own = self._tables.own
        moved = None if self._final else own.rows[made.origins]
        # Whatever ends this in the middle: no row says of memory what isn't so.
        own.known &= ~made.copied
        self._ask(made.asks(0))
        if made.schedule.count:
            self._moving += 1
            self._spawn(self._carry_out(made, moved))

    async def _carry_out(self, made: DeltaPlan, moved: Rows | None) -> None:
        """Moves leaves about, and asks for others as soon as their old content is needed no more.

        The rows of a live round are those that the leaves had at their old places: it is only planned by
        them.
        """
        own, schedule = self._tables.own, made.schedule
        async with self._turn:
            began = time.monotonic()
            for stage in range(schedule.count):
                ordered = schedule.ordered(stage)
                try:
                    await self._reader.rearrange(schedule.moves(stage), ordered=ordered, urgent=self._final)
                except NoMemoryError:
                    self._send_instead(made, stage)
                    break
                if moved is not None:
                    done = np.searchsorted(made.targets, schedule.writes(stage))
                    own.rows[made.targets[done]] = moved[done]
                    own.known[made.targets[done]] = True
                self._ask(made.asks(stage + 1))
            self._copied_s += time.monotonic() - began
        self._moving -= 1
        self._read_moved()

    def _send_instead(self, made: DeltaPlan, stage: int) -> None:
        """A GPU has no room for a scratch: nothing is copied from this stage on, so old content is free."""
        stages = range(stage, made.schedule.count)
        left = np.unique(np.concatenate([made.schedule.writes(each) for each in stages]))
        self.copied[left] = False
        self.copied_bytes -= self._geometry.bytes_of(left)
        self._ask(left)
        for each in stages:
            self._ask(made.asks(each + 1))

    def _read_moved(self) -> None:
        """Reads what is here, once nothing moves any more: what is to land waits for the moves."""
        if self._final and self._complete and not self._moving:
            self._spawn(self._read(self._tables.own, np.flatnonzero(self.copied)))
            self._read_again()

    def _read_again(self) -> None:
        """Reads what is kept and was not read in this round, beside what still arrives."""
        left = self._tables.own.known & ~(self._reread | self._asked | self.copied)
        self._reread |= left
        self._spawn(self._read(self._tables.again, np.flatnonzero(left)))

    async def _read(self, table: LeafTable, leaves: Longs) -> None:
        on_gpu = self._geometry.on_gpu[leaves]
        if on_gpu.any():
            await self._read_at_once(table, leaves[on_gpu])
        leaf_map = self._reader.memory.leaf_map
        for batch in delta.batches(leaf_map.runs(leaves[~on_gpu]), leaf_map, READ_BYTES):
            start = time.monotonic()
            await self._reader.read(table, batch, urgent=True)
            self._on_read(sum(span.length for span in batch), time.monotonic() - start)

    async def _read_at_once(self, table: LeafTable, leaves: Longs) -> None:
        start = time.monotonic()
        kept, self._kept = self._kept, None
        if kept is not None and table is self._tables.again and np.array_equal(kept[0], leaves):
            plan = kept[1]
        else:
            plan = self._reader.plan_read(table, self._reader.memory.leaf_map.runs(leaves))
        await self._reader.perform(plan, urgent=True)
        self._on_read(self._geometry.bytes_of(leaves), time.monotonic() - start)
