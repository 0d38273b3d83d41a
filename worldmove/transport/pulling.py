"""A pull that is under way, and what its messages have in common."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Pulling:
    """One pull under way: completes when its last byte has landed."""

    def __init__(self, nbytes: int, chunks: int) -> None:
        self.nbytes = nbytes
        self.left = chunks
        self.over = asyncio.Event()
        self.landed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.landed.add_done_callback(lambda done: done.cancelled() or done.exception())


class Sized(Protocol):
    """What travels as one message."""

    @property
    def nbytes(self) -> int:
        """Its length."""
