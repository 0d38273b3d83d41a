"""Runs a node: binds, starts the node, serves HTTP on uvloop, and stops both in the right order.

First signal: the node finishes or rolls back its moves while HTTP still answers, then open connections
end. Second signal: everything ends at once; the ledger's records settle what was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import structlog
import uvicorn
import uvloop

from api import logs
from api.app import create_app
from api.binding import bind
from api.entrance import Server
from api.facade import NodeFacade
from api.wire import HttpConnection, PeerConnection
from worldmove.config import Settings, make_run_dir, make_state_dir
from worldmove.errors import ConfigError, WorldMoveError
from worldmove.messages import MAX_MESSAGE
from worldmove.tls import NodeTls

DRAIN_SECONDS = 5
REST_SECONDS = 15
"""A connection without a request is closed then: later than any client of ours would use it again, and later
than others by their defaults (5 s), which would otherwise meet the end with a request on its way."""
PING_SECONDS = 1.0
EXIT_FAILED = 1
EXIT_FORCED = 130
EXIT_SIGNAL = 128
"""And the signal's number: it came before the node was up."""
EXIT_FENCED = 4
"""A later incarnation has claimed the name: to start this one again would only fence that one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

NodeMaker = Callable[[Settings, str], NodeFacade]
log = structlog.get_logger("worldmove.serve")


class _Server(Server):
    """uvicorn without its own signal handlers: ours close the node first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def run(settings: Settings, ready_fd: int | None = None, make: NodeMaker | None = None) -> int:
    """Runs a node until a signal ends it.

    Args:
        settings: the node's options.
        ready_fd: a descriptor to which the node's URL is written once it answers; closed afterwards.
        make: builds the node from settings and URL; `worldmove.node.Node` by default.

    Returns:
        The exit code: 0 after a graceful end, 4 after a later incarnation has taken the name.

    Raises:
        ConfigError: an option can't be followed on this machine.
    """
    logs.configure(settings.log_level, settings.log_format)
    make_run_dir(settings)
    make_state_dir(settings)
    listener = bind(settings)
    try:
        return uvloop.run(_serve(settings, listener, ready_fd, make or _node))
    except ConfigError:
        raise
    except WorldMoveError as error:
        log.error("node could not start", code=error.code, detail=error.message)  # noqa: TRY400 - no surprise
        return EXIT_FAILED
    finally:
        listener.close()


def _node(settings: Settings, url: str) -> NodeFacade:
    from worldmove.node import Node  # noqa: PLC0415 - the data plane need not load for the app alone

    return Node(settings, url)


async def _serve(settings: Settings, listener: socket.socket, ready_fd: int | None, make: NodeMaker) -> int:
    url = settings.url(listener.getsockname()[1])
    node = make(settings, url)
    app = create_app(node)
    tls = NodeTls.of(settings) if settings.tls_cert is not None else None
    server = _Server(_uvicorn(app, settings, tls))
    with _signals() as signalled:
        first = asyncio.ensure_future(signalled.get())
        started = asyncio.ensure_future(node.start())
        await asyncio.wait((first, started), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            return await _give_up(started, node, first)
        try:
            await _started(started, node)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            fenced = asyncio.ensure_future(node.fenced())
            _announce(settings, url, ready_fd)
            await asyncio.wait((first, serving, fenced), return_when=asyncio.FIRST_COMPLETED)
            if fenced.done():
                return await _leave(node, server, serving, app.state.stopping)
            fenced.cancel()
            return await _stop(node, server, serving, app.state.stopping, signalled)
        finally:
            first.cancel()


async def _started(started: asyncio.Future[None], node: NodeFacade) -> None:
    try:
        await started
    except BaseException:
        # Half of a node may be up: keeper and executors must not stay behind.
        await node.abort()
        raise


async def _give_up(started: asyncio.Future[None], node: NodeFacade, first: asyncio.Future[int]) -> int:
    started.cancel()
    await asyncio.wait((started,))
    await node.abort()
    return EXIT_SIGNAL + first.result()


async def _leave(
    node: NodeFacade, server: uvicorn.Server, serving: asyncio.Future[None], stopping: asyncio.Event
) -> int:
    """Ends a node whose name and worlds are its successor's: nothing is finished, nothing written."""
    await node.abort()
    stopping.set()
    server.should_exit = server.force_exit = True
    await asyncio.wait((serving,))
    log.info("stopped", code=EXIT_FENCED)
    return EXIT_FENCED


async def _stop(
    node: NodeFacade,
    server: uvicorn.Server,
    serving: asyncio.Future[None],
    stopping: asyncio.Event,
    signalled: asyncio.Queue[int],
) -> int:
    log.info("stopping: moves are finished or rolled back; a second signal ends at once")
    closing = asyncio.ensure_future(node.close())
    again = asyncio.ensure_future(signalled.get())
    code = 0
    try:
        await asyncio.wait((closing, again), return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            closing.cancel()
            await node.abort()
            server.force_exit = True
            code = EXIT_FORCED
        elif closing.exception() is not None:
            log.error("node did not close cleanly", exc_info=closing.exception())
            code = EXIT_FAILED
        stopping.set()
        server.should_exit = True
        await asyncio.wait((serving,))
        if serving.exception() is not None:
            log.error("web server failed", exc_info=serving.exception())
            code = code or EXIT_FAILED
    finally:
        again.cancel()
    log.info("stopped", code=code)
    return code


def _uvicorn(app: object, settings: Settings, tls: NodeTls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] # FastAPI's own type is narrower than uvicorn's
        log_config=None,
        access_log=False,
        lifespan="off",
        http=HttpConnection,
        ws=PeerConnection,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls.server(),
        ws_max_size=MAX_MESSAGE,
        # Leaf tables don't compress; the keep-alive finds a peer that vanished without a word.
        ws_per_message_deflate=False,
        ws_ping_interval=min(PING_SECONDS, settings.peer_timeout_ms / 1000),
        ws_ping_timeout=settings.peer_timeout_ms / 1000,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_keep_alive=REST_SECONDS,
        proxy_headers=False,
        server_header=False,
    )


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in SIGNALS:
        loop.add_signal_handler(number, queue.put_nowait, number)
    try:
        yield queue
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _announce(settings: Settings, url: str, ready_fd: int | None) -> None:
    guarded = "" if settings.token_file else " (loopback only: there is no token file)"
    sys.stderr.write(f"listening on {url}{guarded}\n")
    sys.stderr.flush()
    log.info("node is up", name=settings.name, url=url)
    if not settings.loopback and settings.tls_cert is None:
        log.warning("a network is served without TLS: tokens travel in clear", http=str(settings.http))
    if ready_fd is not None:
        with open(ready_fd, "wb", closefd=True) as pipe:  # noqa: PTH123 - a descriptor
            pipe.write(url.encode() + b"\n")
