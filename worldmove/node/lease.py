"""The node's claim to its name: renewed, given back at the end, or lost to a later incarnation."""

from __future__ import annotations

import asyncio

import structlog

from worldmove.errors import FencedError, LedgerError
from worldmove.ledger.base import Ledger

RENEW_S = 1.0
log = structlog.get_logger(__name__)


class Lease:
    """What this incarnation is to the others, while its ledger answers.

    Attributes:
        lost: set when a later incarnation has claimed the name. This one can change nothing any more, and
            the only thing left to do is to go: the worlds are the other one's.
    """

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    async def keep(self, ledger: Ledger) -> None:
        """Renews it until it is lost; an outage of the ledger ends nothing."""
        while True:
            try:
                await ledger.renew()
            except FencedError:
                log.error("a later incarnation has claimed this node's name; this one ends")  # noqa: TRY400
                self.lost.set()
                return
            except LedgerError as error:
                log.warning("ledger does not answer", error=str(error))
            await asyncio.sleep(RENEW_S)

    async def end(self, ledger: Ledger) -> None:
        """Gives the name back, and closes the ledger."""
        try:
            await ledger.resign()
        except LedgerError as error:
            log.warning("the name was not given back", error=str(error))
        await ledger.close()
