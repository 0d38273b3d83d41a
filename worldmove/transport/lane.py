"""A lane: one process with one UCX worker, leased to one move at a time.

Started by `LanePool` as `python -m worldmove.transport.lane --fd N --parent PID`. It maps the lease's
extents, reads and writes them directly, and ends itself on any failure: only the end of the process
makes it certain that nothing writes any more. It never outlives its node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

import numpy as np
import uvloop

from worldmove import ipc
from worldmove.errors import (
    ConnectionLostError,
    DeadlineError,
    FramingError,
    NoMemoryError,
    TransportError,
    WorldMoveError,
)
from worldmove.transport import framing
from worldmove.transport.base import Connection
from worldmove.transport.confine import confine, use_device
from worldmove.transport.exchange import BEATS, Destination, Exchange, Puller, Source
from worldmove.transport.faults import Faults
from worldmove.transport.handshake import examine, introduce, welcome
from worldmove.transport.held import Held
from worldmove.transport.lane_messages import (
    Alive,
    Bind,
    Command,
    Connect,
    Done,
    Extents,
    Failed,
    Leave,
    NotPulled,
    Pull,
    Pulled,
    Ready,
    Refused,
    Release,
    Serve,
    Staged,
    Wanted,
)
from worldmove.transport.slots import RingShape, Rows, SlotTable
from worldmove.transport.staged import StagedDestination, StagedSource
from worldmove.transport.table import LaneRegion, RegionTable
from worldmove.transport.ucx_transport import UcxTransport

PR_SET_PDEATHSIG = 1
MAX_CALLERS = 16
"""Callers that may be introducing themselves at once; more are turned away."""


class LaneProcess:
    """Carries out the node's commands.

    Args:
        channel: to the node.
        transport: this process's only one.
        stall_s: the stall deadline in seconds.
        faults: damage to do as source.
        device: the only network device through which the lane may be reached; empty: all.
        inline: digests what lands before it goes on, for benchmarks.
    """

    def __init__(
        self,
        channel: ipc.Channel[Command],
        transport: UcxTransport,
        stall_s: float,
        faults: Faults,
        *,
        device: str = "",
        inline: bool = False,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._stall = stall_s
        self._faults = faults
        self._device = device
        self._inline = inline
        self._extents: list[Any] = []
        self._lease: Held | None = None
        self._callers: set[asyncio.Task[None]] = set()
        self._pulls: set[asyncio.Task[None]] = set()
        self._wants = 0
        self._cpus = os.sched_getaffinity(0)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when the node is gone.

        Raises:
            WorldMoveError: the lease is lost; the node has been told.
        """
        listener = await self._transport.listen()
        if self._device:
            confine(self._device)
        await self._channel.send(Ready(listener.port))
        parts = [asyncio.create_task(part) for part in (self._obey(), self._accept(listener), self._beat())]
        done, _ = await asyncio.wait([*parts, self._over], return_when=asyncio.FIRST_COMPLETED)
        try:
            for part in done:
                part.result()
        except WorldMoveError as error:
            with contextlib.suppress(ConnectionLostError):
                await self._channel.send(Failed(error.code, error.message))
            raise

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._stall / BEATS)
            await self._channel.send(Alive())

    async def _obey(self) -> None:
        while True:
            try:
                command, fds = await self._channel.receive()
            except ConnectionLostError:
                return
            if isinstance(command, Pull | Staged):
                self._pull(command) if isinstance(command, Pull) else self._on_staged(command)
                continue
            try:
                await self._carry_out(command, fds)
            except NoMemoryError as error:
                await self._channel.send(Refused(error.message, error.details))
            except TransportError as error:
                await self._channel.send(Refused(error.message))
            else:
                await self._channel.send(Done())

    async def _carry_out(self, command: Command, fds: list[int]) -> None:
        match command:
            case Extents():
                self._map(command, fds)
            case Bind():
                self._bind(command)
            case Serve():
                self._serve(command)
            case Connect():
                await self._connect(command)
            case Release():
                await self._release(command)

    def _map(self, command: Extents, fds: list[int]) -> None:
        try:
            if len(fds) != len(command.sizes):
                raise FramingError(f"{len(fds)} descriptors came for {len(command.sizes)} extents")
            for fd, size in zip(fds, command.sizes, strict=True):
                self._extents.append(ipc.map_shared(fd, size, writable=command.writable, populate=True))
        except (OSError, ValueError) as error:
            raise FramingError(f"an extent can't be mapped: {error}") from error
        finally:
            ipc.close_all(fds)

    def _bind(self, command: Bind) -> None:
        if self._lease is not None:
            raise FramingError("the lane is leased")
        rows = np.frombuffer(command.regions, dtype="<i8").reshape(-1, 3).tolist()
        extents, self._extents = self._extents, []
        table: RegionTable | SlotTable
        if command.ring is None:
            table = RegionTable(extents, [LaneRegion(*row) for row in rows])
        elif len(extents) == 1:
            table = SlotTable(extents[0], RingShape(*command.ring), [row[2] for row in rows])
        else:
            raise FramingError(f"{len(extents)} extents came for one ring")
        self._lease = Held(command.move_id, table)
        if command.cpus:
            os.sched_setaffinity(0, command.cpus)

    def _leased(self) -> Held:
        if self._lease is None:
            raise FramingError("the lane is not leased")
        if self._lease.exchange is not None or self._lease.token is not None:
            raise FramingError("the lane serves or is connected already")
        return self._lease

    def _serve(self, command: Serve) -> None:
        framing.check_token(command.token)
        lease = self._leased()
        lease.token = command.token
        lease.faults = self._faults.of_lease(command.fault)
        lease.paced = command.paced

    async def _connect(self, command: Connect) -> None:
        framing.check_token(command.token)
        lease = self._leased()
        try:
            async with asyncio.timeout(command.deadline_s):
                connection = await self._transport.connect(command.host, command.port, command.deadline_s)
                await introduce(connection, command.token, lease.move_id, lease.table)
        except TimeoutError:
            raise _FatalError(
                DeadlineError(f"{command.host}:{command.port} did not answer in time")
            ) from None
        except (TransportError, DeadlineError) as error:
            raise _FatalError(error) from error
        self._start(lease, self._destination(connection, lease.table))

    def _destination(self, connection: Connection, table: RegionTable | SlotTable) -> Exchange:
        if isinstance(table, SlotTable):
            return StagedDestination(connection, table, self._stall, self._faults)
        return Destination(connection, table, self._stall, inline=self._inline)

    def _source(self, connection: Connection, lease: Held) -> Exchange:
        if isinstance(lease.table, SlotTable):
            stage = partial(self._stage, lease)
            return StagedSource(connection, lease.table, self._stall, lease.faults, stage)
        leave = partial(self._leave, lease) if lease.paced else None
        return Source(connection, lease.table, self._stall, lease.faults, leave)

    def _leave(self, lease: Held, nbytes: int) -> asyncio.Future[None]:
        return self._ask(lease, Leave(self._wants + 1, nbytes))

    def _stage(self, lease: Held, slot: int, rows: Rows) -> asyncio.Future[None]:
        return self._ask(lease, Wanted(self._wants + 1, slot, rows.tobytes()))

    def _ask(self, lease: Held, wish: Leave | Wanted) -> asyncio.Future[None]:
        self._wants += 1
        wanted = lease.wanted[self._wants] = asyncio.get_running_loop().create_future()
        self._report(wish)
        return wanted

    def _on_staged(self, command: Staged) -> None:
        wanted = self._lease.wanted.pop(command.number, None) if self._lease is not None else None
        if wanted is not None and not wanted.done():
            wanted.set_result(None)

    def _start(self, lease: Held, exchange: Exchange) -> None:
        lease.exchange = exchange
        lease.running = asyncio.create_task(exchange.run())

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and self._lease is lease and not self._over.done():
                self._over.set_exception(error)

        lease.running.add_done_callback(ended)

    def _pull(self, command: Pull) -> None:
        try:
            exchange = self._lease.exchange if self._lease is not None else None
            spans = framing.unpack_spans(command.spans)
            if isinstance(exchange, StagedDestination) and command.slot is not None:
                landed = exchange.pull_into(spans, command.slot)
            elif isinstance(exchange, Puller) and command.slot is None:
                landed = exchange.pull(spans)
            else:
                raise FramingError("the lane is not connected as a destination of this kind")
        except TransportError as error:
            self._report(NotPulled(command.number, error.code, error.message))
            return

        def report(done: asyncio.Future[int]) -> None:
            error = done.exception()
            if isinstance(error, WorldMoveError):
                self._report(NotPulled(command.number, error.code, error.message))
            else:
                self._report(Pulled(command.number, done.result()))

        landed.add_done_callback(report)

    def _report(self, report: Pulled | NotPulled | Wanted | Leave) -> None:
        task = asyncio.create_task(self._channel.send(report))
        self._pulls.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        # A node that is gone ends this process by way of `_obey`.
        if not task.cancelled():
            task.exception()

    async def _release(self, command: Release) -> None:
        lease = self._lease
        for extent in self._extents:
            extent.close()
        self._extents = []
        if lease is None:
            return
        lease.token = None
        if lease.exchange is not None and lease.running is not None:
            try:
                await lease.exchange.close(command.deadline_s)
                await lease.running
            except (TransportError, DeadlineError) as error:
                raise _FatalError(error) from error
        self._lease = None
        lease.table.close()
        if os.sched_getaffinity(0) != self._cpus:
            os.sched_setaffinity(0, self._cpus)

    async def _accept(self, listener: Any) -> None:
        while True:
            connection = await listener.accept()
            if len(self._callers) >= MAX_CALLERS:
                connection.abort()
                continue
            task = asyncio.create_task(self._examine(connection))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _examine(self, connection: Connection) -> None:
        """Lets in the one caller that this lease waits for; anyone else is turned away."""
        lease = self._lease
        if lease is None or lease.token is None:
            connection.abort()
            return
        token = lease.token
        try:
            async with asyncio.timeout(self._stall):
                theirs = await examine(connection, token, lease.move_id)
                # Another caller may have used the token up, or the lease ended, since.
                if self._lease is not lease or lease.token is None:
                    connection.abort()
                    return
                lease.token = None
                await welcome(connection, token, lease.move_id, lease.table, theirs)
        except (TransportError, DeadlineError, TimeoutError) as error:
            connection.abort()
            if lease.token is None and self._lease is lease and not self._over.done():
                late = DeadlineError("the other lane did not finish its introduction in time")
                self._over.set_exception(error if isinstance(error, WorldMoveError) else late)
            return
        if self._lease is not lease:
            connection.abort()
            return
        self._start(lease, self._source(connection, lease))


class _FatalError(WorldMoveError):
    """A failure after which the lane can't go on, whatever its class."""

    def __init__(self, cause: WorldMoveError) -> None:
        super().__init__(cause.message)
        self.code = cause.code  # type: ignore[misc]


def _detach(parent: int) -> None:
    """Dies with its node, and takes no part in the terminal's signals."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


async def _main(options: argparse.Namespace) -> int:
    channel: ipc.Channel[Command] = ipc.Channel(socket.socket(fileno=options.fd), Command)
    faults = Faults([name for name in options.faults.split(",") if name])
    if options.device:
        use_device(options.device)
    stall_s, device, inline = options.stall_ms / 1000, options.device, options.inline
    lane = LaneProcess(channel, UcxTransport(), stall_s, faults, device=device, inline=inline)
    try:
        await lane.run()
    except WorldMoveError:
        return 1
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Entry of the process; does not return.

    UCX's orderly teardown could wait for a dead peer, and everything here dies with the process.
    """
    parser = argparse.ArgumentParser(prog="worldmove-lane")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--stall-ms", type=int, default=3000)
    parser.add_argument("--faults", default="")
    parser.add_argument("--device", default="")
    parser.add_argument("--inline", action="store_true")
    options = parser.parse_args(arguments)
    _detach(options.parent)
    code = uvloop.run(_main(options))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
