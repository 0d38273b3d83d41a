"""What has to be so before a move may be committed, beside the bytes: prepared while they still arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf

from worldmove.errors import DeadlineError, LedgerError, NoWorkerError
from worldmove.ledger.base import Ledger
from worldmove.sessions import Berth
from worldmove.tasks import Tasks

SIGN_OF_LIFE_S = 0.2
"""How old a worker's answer may be when its world is verified, and the keeper's when its world stops."""


class Readiness:
    """The keeper has the slot, and the standby's worker has given a sign of life.

    Args:
        work: runs what this starts; errors go its own way.
        fail: gives the move up, told a code and a message.
        timeout_s: how long a worker may take.
    """

    def __init__(self, work: Tasks, fail: Callable[[str, str], None], timeout_s: float) -> None:
        self._work = work
        self._fail = fail
        self._timeout_s = timeout_s
        self._keeping: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._kept_at = -inf
        self._heard_at = -inf

    def begin(self, berth: Berth) -> None:
        """The world stops soon, or stands: keeper and worker take their time beside that, not after it.

        What is on its way, or has been answered just now, is not asked for again.
        """
        if _over(self._keeping) and _old(self._kept_at):
            self._keeping = self._work.spawn(self._keep(berth))
        if _over(self._hearing) and _old(self._heard_at):
            self._hearing = self._work.spawn(self._hear(berth))

    async def reached(self, berth: Berth) -> bool:
        """Whether all is as it has to be; where it is not, the move has been given up."""
        if _over(self._hearing) and _old(self._heard_at):
            # The last bytes took long: what was true when the world stopped may be so no more.
            self._hearing = self._work.spawn(self._hear(berth))
        tasks = [task for task in (self._keeping, self._hearing) if task is not None]
        if pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending)
        return all(_done_well(task) for task in tasks)

    async def _keep(self, berth: Berth) -> None:
        await berth.keep()
        self._kept_at = time.monotonic()

    async def _hear(self, berth: Berth) -> None:
        """Nothing is committed to a worker that gives no sign of life: its world would stand."""
        try:
            await berth.answer(self._timeout_s)
        except (DeadlineError, NoWorkerError) as error:
            self._fail("worker-lost", f"the standby's worker: {error.message}")
            raise
        self._heard_at = time.monotonic()


async def warm(ledger: Ledger, session_id: str) -> None:
    """The ledger reads the record before the commit needs it, if it can; the commit hears of it if not."""
    with contextlib.suppress(LedgerError):
        await ledger.warm(session_id)


def _over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


def _old(answered_at: float) -> bool:
    return time.monotonic() - answered_at > SIGN_OF_LIFE_S


def _done_well(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
