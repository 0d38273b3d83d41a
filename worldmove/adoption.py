"""The write that adopts a world, handed to the ledger right behind the one that commits it.

They stay two writes, each durable by itself and in this order, and the second one replaces nothing but what
the first has written. Only the way back to the node in between is saved: its loop and the ledger's thread
would have to wake one another while the world stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worldmove.errors import NoWorkerError
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import SessionRecord
from worldmove.transport.base import quiet


class Adoption:
    """Of one move.

    Args:
        ledger: carries writes out in the order in which they are asked for.
        attended: whether there still is somebody to hand the world to; called in any thread.
    """

    def __init__(self, ledger: Ledger, attended: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._attended = attended
        self._ahead: tuple[SessionRecord, asyncio.Future[None]] | None = None

    @property
    def under_way(self) -> bool:
        """Whether it was asked for already, and nobody has heard what came of it."""
        return self._ahead is not None

    def follow(self, committed: SessionRecord, adopted: SessionRecord) -> None:
        """Asks for it behind a commit that is asked for in the same breath; `write` tells what came of it."""
        writing = asyncio.ensure_future(self._ledger.swap(committed, adopted, provided=self.check))
        # Where the commit failed nobody asks any more: the record then decides.
        self._ahead = adopted, quiet(writing)

    async def write(self, committed: SessionRecord, adopted: SessionRecord) -> None:
        """Returns when the record says so.

        Raises:
            LostRaceError: another record stands.
            NoWorkerError: it followed the commit, and there was nobody left by then; nothing was written.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == adopted:
            await asyncio.shield(ahead[1])
        else:
            await self._ledger.swap(committed, adopted)

    def check(self) -> None:
        """Raises `NoWorkerError` if there is nobody left to hand the world to."""
        if not self._attended():
            raise NoWorkerError("the standby's worker died before it could adopt")
