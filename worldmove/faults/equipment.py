"""What a node has beside everything else when it was started with `--faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import structlog

from worldmove.config import Settings
from worldmove.faults.armory import Armory
from worldmove.faults.door import SOCKET, FaultDoor
from worldmove.faults.ledger import FaultyLedger, as_ledger
from worldmove.faults.points import parse
from worldmove.faults.rig import Rig
from worldmove.ledger.base import Ledger


class Equipment:
    """The armed faults of a node, the socket where more are armed, and what makes them happen.

    Attributes:
        rig: for the node's moves; it is there once the equipment is started.

    Raises:
        ConfigError: the option names a fault that is unknown.
    """

    rig: Rig

    def __init__(self, settings: Settings, keeper: Callable[[], int]) -> None:
        self._armory = Armory(parse(settings.faults))
        self._door = FaultDoor(settings.run_dir / SOCKET, self._armory)
        self._keeper = keeper

    @classmethod
    def of(cls, settings: Settings, keeper: Callable[[], int]) -> Self | None:
        """The equipment of a node, or `None` where the option was not given."""
        return cls(settings, keeper) if settings.faults else None

    async def start(self, ledger: Ledger) -> Ledger:
        """Listens for names; returns the ledger as the node is to use it."""
        faulty = FaultyLedger(ledger, self._on_error)
        self.rig = Rig(self._armory, faulty, self._keeper)
        await self._door.start()
        return as_ledger(faulty)

    async def close(self) -> None:
        """Stops listening."""
        await self._door.close()

    def _on_error(self, error: BaseException) -> None:
        structlog.get_logger().warning("a late call of the ledger failed", error=str(error))
