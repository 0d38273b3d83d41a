"""What a lane process holds of the move that it is leased to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from worldmove.transport.exchange import Exchange
from worldmove.transport.faults import Faults
from worldmove.transport.slots import SlotTable
from worldmove.transport.starting import Start
from worldmove.transport.table import RegionTable


@runtime_checkable
class Holding(Protocol):
    """A source that can be told to wait."""

    def hold(self, start: Callable[[], Awaitable[int]]) -> None:
        """What is pulled from now on is read when `start` has returned: at which block, or `UNSEEN`."""


class Held:
    """Everything of one move; `wanted` are its questions to the node.

    `paced`: it asks before it sends; `held`: it reads nothing before `start`.
    """

    def __init__(self, move_id: str, table: RegionTable | SlotTable) -> None:
        self.move_id = move_id
        self.table = table
        self.wanted: dict[int, asyncio.Future[None]] = {}
        self.token: bytes | None = None
        self.paced = False
        self.held = False
        self.start = Start()
        self.faults = Faults()
        self.exchange: Exchange | None = None
        self.running: asyncio.Task[None] | None = None
