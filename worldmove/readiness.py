"""What has to be so before a move may be committed, beside the bytes: prepared while they still arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from worldmove.errors import DeadlineError, LedgerError, NoWorkerError
from worldmove.ledger.base import Ledger
from worldmove.sessions import Berth
from worldmove.tasks import Tasks

SIGN_OF_LIFE_S = 0.2
"""How old a worker's answer may be when its world is verified."""


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
        self._heard_at = 0.0

    def begin(self, berth: Berth) -> None:
        """The world stands: keeper and worker take their time beside the last bytes, not after them."""
        self._keeping = self._work.spawn(berth.keep())
        self._hearing = self._work.spawn(self._hear(berth))

    async def reached(self, berth: Berth) -> bool:
        """Whether all is as it has to be; where it is not, the move has been given up."""
        if self._heard_at and time.monotonic() - self._heard_at > SIGN_OF_LIFE_S:
            # The last bytes took long: what was true when the world stopped may be so no more.
            self._hearing = self._work.spawn(self._hear(berth))
        tasks = [task for task in (self._keeping, self._hearing) if task is not None]
        if pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending)
        return all(_done_well(task) for task in tasks)

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


def _done_well(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
