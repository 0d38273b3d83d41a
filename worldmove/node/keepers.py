"""The node's keeper, and the next one where it is lost: everybody else still holds what it held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from worldmove.errors import FencedError, LedgerError, ProcessLostError
from worldmove.hosting.host import Host
from worldmove.ledger.base import Ledger
from worldmove.memory.keeping import Keeper

RETRY_S = 0.2
log = structlog.get_logger(__name__)


class Keepers:
    """One keeper after another, at one path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keeper: Keeper | None = None

    @property
    def pid(self) -> int:
        """Of the present keeper; 0 before there is one."""
        return self._keeper.pid if self._keeper is not None else 0

    async def start(self) -> Keeper:
        """Claims the keeper that a former incarnation left, or starts one; nobody else changes it any more.

        Raises:
            ProcessLostError: it cannot be started.
        """
        self._keeper = await Keeper.start(self._path, claim=True)
        return self._keeper

    async def mind(self, host: Host, ledger: Ledger, on_replaced: Callable[[], None]) -> None:
        """Replaces every keeper that is lost, and gives the next one all slots; returns when fenced.

        Until then the worlds live on what this node and the workers hold: only both deaths together would
        take a world.

        Args:
            host: whose slots they are.
            ledger: asked first: an incarnation that is fenced must not claim its successor's keeper.
            on_replaced: called when another keeper holds everything.
        """
        while self._keeper is not None:
            reason = await asyncio.shield(self._keeper.lost)
            log.warning("keeper lost", reason=reason.message)
            await self._keeper.close()
            try:
                await ledger.renew()
                await host.use_keeper(await self.start())
            except FencedError:
                return
            except (LedgerError, ProcessLostError) as error:
                log.warning("keeper not replaced", reason=error.message)
                await asyncio.sleep(RETRY_S)
            else:
                log.info("keeper replaced", pid=self.pid)
                on_replaced()

    async def close(self) -> None:
        """Hangs up; the keeper goes on holding what it holds."""
        if self._keeper is not None:
            await self._keeper.close()
