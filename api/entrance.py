"""Who is let in at the node's port, before a byte of theirs is believed: so many, and for so long.

The web server itself counts a connection once TLS is agreed on. Whoever never finishes that handshake would
not be counted at all, and could take every descriptor of the node without a token.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from contextlib import suppress

import uvicorn
from uvicorn.server import ServerState

from api.limits import site_of
from worldmove.listening import Acceptor

CONNECTION_SHARE = 2
"""Connections get this part of the descriptors that the process may have; memory needs the others."""
SITE_SHARE = 2
"""One address gets this part of the connections; others can still come in then."""
HANDSHAKE_SECONDS = 10.0
"""For the handshake of TLS."""


class Places(ServerState):
    """The places for connections, by the address that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: Counter[str] = Counter()

    def take(self, host: str) -> bool:
        """Takes a place for a connection from `host`; false if there is none."""
        bound = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // CONNECTION_SHARE
        site = site_of(host)
        if self._taken.total() >= bound or self._taken[site] >= bound // SITE_SHARE:
            return False
        self._taken[site] += 1
        return True

    def give_back(self, host: str) -> None:
        """The connection has ended."""
        site = site_of(host)
        self._taken[site] -= 1
        if self._taken[site] <= 0:
            del self._taken[site]


class Server(uvicorn.Server):
    """uvicorn behind an entrance of our own; the protocols of `api.wire` give places back."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: Places = Places()
        self._acceptors: list[Acceptor] = []
        self._entering: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts at `sockets`, which listen already and don't block."""
        self.servers = []
        self._acceptors = [Acceptor(listener, self._welcome) for listener in sockets or ()]
        for acceptor in self._acceptors:
            acceptor.start()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets nobody in any more; then as uvicorn does."""
        for acceptor in self._acceptors:
            acceptor.stop()
        for task in self._entering:
            task.cancel()
        await super().shutdown(sockets)

    def _welcome(self, accepted: socket.socket) -> None:
        try:
            host = str(accepted.getpeername()[0])
        except OSError:
            accepted.close()
            return
        if not self.server_state.take(host):
            accepted.close()
            return
        accepted.setblocking(False)
        with suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._enter(accepted, host))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _enter(self, accepted: socket.socket, host: str) -> None:
        tls = self.config.ssl
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls is not None else None,
            )
        except (OSError, asyncio.CancelledError):
            # It has no protocol yet that could say so itself.
            accepted.close()
            self.server_state.give_back(host)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )
        return made
