"""Accepting connections at a listening socket, also when descriptors have run out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import structlog

from worldmove.shortage import SHORTAGES

REST_S = 0.2
"""How long nobody is let in after the system had no descriptor, or no memory, for a connection."""

log = structlog.get_logger(__name__)


class Acceptor:
    """Takes connections in as they come, on the running event loop.

    A shortage leaves the caller in the queue, and the socket readable: without a rest the loop would do
    nothing but fail to accept. Callers wait meanwhile, and are let in once something was closed.

    Args:
        listener: listening and non-blocking; stays the caller's.
        take: called with each connection, which is its from then on.
    """

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Begins to accept."""
        self._resting = None
        self._loop.add_reader(self._listener.fileno(), self.accept)

    def accept(self) -> None:
        """Accepts everybody who waits now."""
        while not self._stopped:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._rest(error)
                    return
                # This caller has gone already; the next one may be there.
                continue
            self._take(sock)

    def _rest(self, error: OSError) -> None:
        log.warning("connections wait", reason=str(error))
        if self._resting is None:
            self._loop.remove_reader(self._listener.fileno())
            self._resting = self._loop.call_later(REST_S, self.start)

    def stop(self) -> None:
        """Accepts nobody any more; to be called before the listener is closed."""
        self._stopped = True
        if self._resting is not None:
            self._resting.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
