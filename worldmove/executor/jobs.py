"""The order of work: parts that wait, parts that run, and which memory they touch. No processes here."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from worldmove.errors import WorldMoveError
from worldmove.executor.messages import Done, Piece, Request


class Part:
    """A slice of a job, small enough for one executor.

    Args:
        make: builds the request from a call number.
        keys: the memory that it touches.
        nbytes: how much of it.
        pieces: what is digested, where anybody wants to know.
    """

    def __init__(
        self,
        make: Callable[[int], Request],
        keys: frozenset[int],
        nbytes: int,
        pieces: list[Piece] | None = None,
    ) -> None:
        self.make = make
        self.keys = keys
        self.nbytes = nbytes
        self.pieces = pieces or []
        self.done: Done | None = None


class Job:
    """What one caller waits for.

    Attributes:
        ended: completes when all parts are done, or fails with the first error.
    """

    def __init__(
        self, parts: Sequence[Part], *, urgent: bool, on_part: Callable[[list[Piece]], None] | None
    ) -> None:
        self.parts = parts
        self.urgent = urgent
        self.on_part = on_part
        self.left = len(parts)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Board:
    """All jobs of a pool: urgent ones first, and within each class in the order of their arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, Part]] = []
        self._jobs: dict[Part, Job] = {}
        self._waiting: dict[Job, dict[Part, None]] = {}
        self._number = 0
        self._touching: Counter[int] = Counter()
        self._quiet: defaultdict[int, list[asyncio.Future[None]]] = defaultdict(list)
        self._idle: list[asyncio.Future[None]] = []

    def add(self, job: Job) -> None:
        """Queues all parts of `job`."""
        self._waiting[job] = dict.fromkeys(job.parts)
        for part in job.parts:
            self._number += 1
            self._jobs[part] = job
            self._touching.update(part.keys)
            heapq.heappush(self._heap, (not job.urgent, self._number, part))

    def take(self) -> Part | None:
        """The part to run next, or `None` where nothing waits."""
        while self._heap:
            _, _, part = heapq.heappop(self._heap)
            job = self._jobs.get(part)
            if job is not None:
                waiting = self._waiting[job]
                del waiting[part]
                if not waiting:
                    del self._waiting[job]
                return part
        return None

    def finish(self, part: Part, outcome: Done | BaseException) -> None:
        """Notes that a taken part runs no more, and tells its job."""
        job = self._jobs[part]
        self._remove(part)
        if job.ended.done():
            return
        if isinstance(outcome, BaseException):
            self.drop(job, outcome)
            return
        part.done = outcome
        job.left -= 1
        if job.on_part is not None:
            try:
                job.on_part(part.pieces)
            except Exception as error:  # noqa: BLE001 - the caller's own; it goes back to the caller
                self.drop(job, error)
                return
        if job.left == 0:
            job.ended.set_result(None)

    def drop(self, job: Job, error: BaseException | None = None) -> None:
        """Takes back what still waits of `job`; with `error` the job fails with it. What runs, runs on."""
        for part in self._waiting.pop(job, {}):
            self._remove(part)
        if error is not None and not job.ended.done():
            job.ended.set_exception(error)

    def drop_all(self, error: WorldMoveError) -> None:
        """Fails every job of which something waits."""
        for job in list(self._waiting):
            self.drop(job, error)

    def touches(self, key: int) -> bool:
        """Whether a waiting or running part touches memory `key`."""
        return self._touching[key] > 0

    async def quiet(self, key: int) -> None:
        """Returns when no waiting or running part touches memory `key`."""
        while self.touches(key):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._quiet[key].append(future)
            await future

    async def idle(self) -> None:
        """Returns when nothing waits and nothing runs."""
        while self._jobs:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(future)
            await future

    def _remove(self, part: Part) -> None:
        del self._jobs[part]
        for key in part.keys:
            self._touching[key] -= 1
            if self._touching[key] == 0:
                del self._touching[key]
                _wake(self._quiet.pop(key, []))
        if not self._jobs:
            idle, self._idle = self._idle, []
            _wake(idle)


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
