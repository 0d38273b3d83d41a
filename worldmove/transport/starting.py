"""When a lane begins to answer what was pulled ahead: its world stands, as its page shows or the node says.

From the worker's stop to the lane three processes would have to wake one another; so the lane looks itself. A
page may show a stop that was for somebody else: at which block it was seen goes along with the bytes.
"""

from __future__ import annotations

import asyncio
import time

from worldmove.errors import FramingError, ValidationError
from worldmove.executor.messages import Stop
from worldmove.executor.signs import ARMED_S, Sign
from worldmove.transport.framing import UNSEEN

ALERT_S = 0.05
NAP_S = 50e-6
"""Between two looks, once the first `ALERT_S` are over; the event loop's own timers count milliseconds."""


class Start:
    """Of one lease; belongs to the running event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._block = UNSEEN
        self._page: tuple[Sign, Stop] | None = None
        self._looking: asyncio.Task[None] | None = None

    def watch(self, fd: int, nbytes: int, stop: Stop) -> None:
        """Takes a page, which `look` looks at; the descriptor stays the caller's.

        Raises:
            FramingError: there is one already, or a word lies outside it.
            TransportError: it can't be mapped.
        """
        if self._page is not None:
            raise FramingError("the lease has a page already")
        sign = Sign(fd, nbytes)
        try:
            sign.check(stop)
        except ValidationError as error:
            sign.close()
            raise FramingError(error.message) from error
        self._page = sign, stop

    def look(self) -> None:
        """The world was asked to stop: looks, without pause at first, until it does or the node says so."""
        if self._page is not None and self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(*self._page))

    def go(self) -> None:
        """The world stands, the node says so; nothing where that was seen already."""
        self._begun.set()

    @property
    def begun(self) -> bool:
        """Whether the lane may begin."""
        return self._begun.is_set()

    async def wait(self) -> int:
        """Returns when the lane may begin: the block at which its page was seen to stand, or `UNSEEN`."""
        await self._begun.wait()
        return self._block

    def close(self) -> None:
        """Looks no more."""
        if self._looking is not None:
            self._looking.cancel()
        if self._page is not None:
            self._page[0].close()
            self._page = None

    async def _look(self, sign: Sign, stop: Stop) -> None:
        began = time.monotonic()
        while not self._begun.is_set() and (waited := time.monotonic() - began) < ARMED_S:
            block = sign.block(stop)
            if block is not None:
                self._block = block
                self._begun.set()
                return
            if waited > ALERT_S:
                time.sleep(NAP_S)  # noqa: ASYNC251 - nothing else is under way in this process
            await asyncio.sleep(0)
