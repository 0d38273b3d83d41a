"""The write that adopts a world, in the ledger's one transaction with the one that commits it.

They stay two swaps, checked in this order, and the second replaces nothing but what the first has written.
Only what lay between is saved: a second durable write, and a node's loop and its ledger's thread that wake
one another while the world stands. Where nobody is left to hand the world to, the commit stands alone.
"""

from __future__ import annotations

from collections.abc import Callable

from worldmove.errors import NoWorkerError
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import SessionRecord


class Adoption:
    """Of one move.

    Args:
        ledger: where it is written.
        attended: whether there still is somebody to hand the world to; called in any thread.
    """

    def __init__(self, ledger: Ledger, attended: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._attended = attended
        self._written: SessionRecord | None = None

    async def commit(
        self, moving: SessionRecord, committed: SessionRecord, adopted: SessionRecord | None
    ) -> SessionRecord:
        """Writes both (the first alone, without a second), and returns which of them stands.

        Raises:
            LostRaceError: another record stands; neither was written.
        """
        if adopted is None:
            await self._ledger.swap(moving, committed)
            return committed
        refused = await self._ledger.swap_then(moving, committed, adopted, provided=self.check)
        if refused is not None:
            return committed
        self._written = adopted
        return adopted

    def stands(self, record: SessionRecord) -> bool:
        """Whether `record` is the adopted one that `commit` has written."""
        return record == self._written

    def check(self) -> None:
        """Raises `NoWorkerError` if there is nobody left to hand the world to."""
        if not self._attended():
            raise NoWorkerError("the standby's worker died before it could adopt")
