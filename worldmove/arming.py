"""Work on a GPU that begins by itself as soon as a world stands.

A world that is not copied live stands from its worker's stop until everything has been brought. So what is
to be done then is given to executors beforehand: they look at the world's control page and begin. The node,
which hears of the stop a little later, says so too (`go`), for worlds whose page doesn't tell. What was begun
counts only if it was begun at the very block at which the world was paused (`stood_at`); otherwise it is done
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Self

from worldmove.errors import FramingError, WorldMoveError
from worldmove.executor.jobs import Part
from worldmove.executor.messages import Piece, Stop
from worldmove.executor.pool import ExecutorPool
from worldmove.executor.work import armed_parts
from worldmove.page.control import HEADER_BYTES, RankState
from worldmove.page.looking import stop_words
from worldmove.reading import OnRead, Plan
from worldmove.sealing import unsealed
from worldmove.tasks import each

ARMED_PARTS = 8
"""So many parts of a plan are armed, milliseconds of work; the rest follows when the first is done.

They take places in the executor's queue while the world still generates.
"""


class Sign:
    """A control page, looked at by executors."""

    def __init__(self) -> None:
        self._stops: list[tuple[ExecutorPool, Stop]] = []

    @classmethod
    async def open(cls, fd: int, pools: Iterable[ExecutorPool]) -> Self:
        """Shows a page to the executors of some pools, which all can look; `fd` stays the caller's.

        Raises:
            FramingError: it is no control page, or nothing that can be read at any time.
            WorldMoveError: an executor can't map it.
        """
        if (wrong := unsealed(fd, HEADER_BYTES)) is not None:
            raise FramingError(f"the control page {wrong}")
        words = stop_words(fd)
        sign = cls()
        try:
            for pool in pools:
                key = await pool.attach(fd, words.nbytes, writable=False, watched=True)
                stop = Stop(key, words.pause_at, words.ranks, RankState.STOPPED)
                sign._stops.append((pool, stop))
        except BaseException:
            await sign.close()
            raise
        return sign

    def of(self, pool: ExecutorPool) -> Stop:
        """How a pool's executors see the stop."""
        return next(stop for known, stop in self._stops if known is pool)

    def release(self, *, begin: bool) -> None:
        """Everything that waits for this page begins, or is dropped; never waits."""
        for pool, stop in self._stops:
            pool.release(stop.key, begin=begin)

    async def close(self) -> None:
        """Has executors look no more, once nothing waits for the page."""
        stops, self._stops = self._stops, []
        for pool, stop in stops:
            await pool.settle(stop.key)
            await pool.detach(stop.key)


class Armed:
    """A plan that begins by itself.

    Args:
        plan: every pool of it is a GPU's.
        sign: shown to each of them. It belongs to this.
    """

    def __init__(self, plan: Plan, sign: Sign) -> None:
        self._plan = plan
        self._sign = sign
        self._first: list[Part] = []
        self._left = sum(len(parts) for _, parts in plan.parts)
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest: list[asyncio.Task[None]] = []
        self._working: asyncio.Task[None] | None = None
        self._dropped = False

    def start(self, on_read: OnRead | None = None) -> None:
        """Arms it; `on_read` as for `Reader.read`."""
        self._working = asyncio.ensure_future(self._work(on_read))
        self._working.add_done_callback(self._over)

    def go(self) -> None:
        """The world stands, the source's node says so: what has not begun begins."""
        if self._working is not None and not self._working.done():
            self._sign.release(begin=True)

    def drop(self) -> None:
        """Begins nothing any more; never waits."""
        self._dropped = True
        self._sign.release(begin=False)

    @property
    def whole(self) -> bool:
        """Whether all of it is done; false after `ended`: some of it was given up."""
        return self._left == 0

    @property
    def began(self) -> float | None:
        """`time.monotonic()` when an executor saw the stop; `None` where none has said so."""
        return min((at / 1e9 for _, at in self._seen()), default=None)

    def _seen(self) -> list[tuple[int, int]]:
        """Block and time that executors saw. There are none of what began on the node's word."""
        done = [part.done.sizes for part in self._first if part.done is not None]
        return [(sizes[0], sizes[1]) for sizes in done if len(sizes) == 2]

    async def ended(self) -> None:
        """Returns when nothing waits or is under way: at once when the last part is done."""
        if self._working is not None:
            await asyncio.shield(self._all)

    def _over(self, _work: asyncio.Task[None]) -> None:
        if not self._all.done():
            self._all.set_result(None)

    async def stood_at(self, block: int) -> bool:
        """Whether all of it was done while the world stood at `block`; returns when nothing of it waits."""
        if self._working is None:
            return False
        await self.ended()
        if self._left:
            if not self._working.cancelled() and not isinstance(self._working.exception(), WorldMoveError):
                self._working.result()
            return False
        return all(seen == block for seen, _ in self._seen())

    async def close(self) -> None:
        """Drops what has not begun, waits for what has, and lets go of the page."""
        if self._working is not None:
            if not self._working.done():
                self.drop()
            await asyncio.wait({self._working})
            if not self._working.cancelled():
                self._working.exception()
        await self._sign.close()

    async def _work(self, on_read: OnRead | None) -> None:
        try:
            await each([self._in(pool, parts, on_read) for pool, parts in self._plan.parts])
        finally:
            if self._rest:
                await asyncio.wait(self._rest)
        await each([_joined(task) for task in self._rest])

    async def _in(self, pool: ExecutorPool, parts: Sequence[Part], on_read: OnRead | None) -> None:
        stop = self._sign.of(pool)
        first = armed_parts(parts[:ARMED_PARTS], stop)
        self._first += first
        rest = list(parts[ARMED_PARTS:])

        def later(done: list[Piece]) -> None:
            self._plan.note(done, on_read)
            self._left -= 1
            if not self._left:
                self._all.set_result(None)

        def part(done: list[Piece]) -> None:
            if rest and not self._dropped:
                following, rest[:] = list(rest), []
                self._rest.append(asyncio.ensure_future(pool.perform(following, urgent=True, on_part=later)))
            later(done)

        await pool.perform(first, urgent=True, on_part=part)


async def _joined(task: asyncio.Task[None]) -> None:
    await task
