"""What a lane's process does: it carries out the node's commands, and serves one lease at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import Any

import numpy as np

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
from worldmove.transport import lane_messages as said
from worldmove.transport.account import Told
from worldmove.transport.acquaintances import Acquaintances, myself
from worldmove.transport.base import Connection
from worldmove.transport.confine import confine
from worldmove.transport.exchange import BEATS, Exchange, Puller
from worldmove.transport.faults import Faults
from worldmove.transport.handshake import examine, introduce, welcome
from worldmove.transport.held import Held, Holding
from worldmove.transport.lobby import Lobby
from worldmove.transport.packing import Gauge
from worldmove.transport.sides import Asks, Side
from worldmove.transport.slots import RingShape, Rows
from worldmove.transport.staged import StagedDestination
from worldmove.transport.table import LaneRegion
from worldmove.transport.ucx_transport import UcxTransport

MAX_CALLERS = 16
"""Callers that may be introducing themselves at once; for one more the first of them is turned away."""


class LaneProcess:
    """Carries out the node's commands.

    Args:
        channel: to the node.
        transport: this process's only one.
        side: where memory lies, and how it travels.
        stall_s: the stall deadline in seconds.
        faults: damage to do as source.
        device: the only network device through which the lane may be reached; empty: all.
        opens: UCX opens memory of the lanes that this one meets, and keeps it open.
    """

    def __init__(
        self,
        channel: ipc.Channel[said.Command],
        transport: UcxTransport,
        side: Side,
        stall_s: float,
        faults: Faults,
        *,
        device: str = "",
        opens: bool = False,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._side = side
        self._stall = stall_s
        self._faults = faults
        self._device = device
        self._extents: list[Any] = []
        self._lease: Held | None = None
        self._callers = Lobby(MAX_CALLERS)
        self._pulls: set[asyncio.Task[None]] = set()
        self._wants = 0
        me = myself() if opens else framing.NOBODY
        self._acquaintances = Acquaintances(me, lambda: self._report(said.Stale()))
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
        await self._channel.send(said.Ready(listener.port))
        parts = [asyncio.create_task(part) for part in (self._obey(), self._accept(listener), self._beat())]
        done, _ = await asyncio.wait([*parts, self._over], return_when=asyncio.FIRST_COMPLETED)
        try:
            for part in done:
                part.result()
        except (WorldMoveError, _FatalError) as caught:
            error = caught.cause if isinstance(caught, _FatalError) else caught
            with contextlib.suppress(ConnectionLostError):
                await self._channel.send(said.Failed(error.code, error.message))
            raise error from caught.__cause__

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._stall / BEATS)
            await self._channel.send(said.Alive())

    async def _obey(self) -> None:
        while True:
            try:
                command, fds = await self._channel.receive()
            except ConnectionLostError:
                return
            if isinstance(command, said.Pull | said.Staged | said.Look | said.Go):
                self._heed(command)
                continue
            try:
                done = await self._carry_out(command, fds)
            except NoMemoryError as error:
                await self._channel.send(said.Refused(error.message, error.details))
            except TransportError as error:
                await self._channel.send(said.Refused(error.message))
            else:
                await self._channel.send(done)

    def _heed(self, command: said.Pull | said.Staged | said.Look | said.Go) -> None:
        """Does what is not answered at once."""
        if isinstance(command, said.Pull):
            self._pull(command)
        elif isinstance(command, said.Staged):
            self._on_staged(command)
        elif self._lease is not None:
            if isinstance(command, said.Look):
                self._lease.start.look()
                return
            self._lease.start.go()
            if isinstance(self._lease.exchange, Puller):
                self._lease.exchange.wake()

    async def _carry_out(self, command: said.Command, fds: list[int]) -> said.Done:
        match command:
            case said.Extents():
                self._map(command, fds)
            case said.Bind():
                self._bind(command)
            case said.Watch():
                self._watch(command, fds)
            case said.Hold():
                self._hold()
            case said.Serve():
                self._serve(command)
            case said.Connect():
                return await self._connect(command)
            case said.Release():
                return said.Done(account=await self._release(command))
        return said.Done()

    def _map(self, command: said.Extents, fds: list[int]) -> None:
        try:
            if len(fds) != len(command.sizes):
                raise FramingError(f"{len(fds)} descriptors came for {len(command.sizes)} extents")
            for fd, size in zip(fds, command.sizes, strict=True):
                self._extents.append(self._side.map(fd, size, command.writable))
        finally:
            ipc.close_all(fds)

    def _bind(self, command: said.Bind) -> None:
        if self._lease is not None:
            raise FramingError("the lane is leased")
        rows = np.frombuffer(command.regions, dtype="<i8").reshape(-1, 3).tolist()
        extents, self._extents = self._extents, []
        ring = RingShape(*command.ring) if command.ring is not None else None
        table = self._side.table(extents, [LaneRegion(*row) for row in rows], ring)
        self._lease = Held(command.move_id, table)
        if command.cpus:
            os.sched_setaffinity(0, command.cpus)

    def _leased(self) -> Held:
        if self._lease is None:
            raise FramingError("the lane is not leased")
        if self._lease.exchange is not None or self._lease.token is not None:
            raise FramingError("the lane serves or is connected already")
        return self._lease

    def _watch(self, command: said.Watch, fds: list[int]) -> None:
        try:
            if len(fds) != 1:
                raise FramingError(f"{len(fds)} descriptors came for one page")
            self._leased().start.watch(fds[0], command.nbytes, command.stop)
        finally:
            ipc.close_all(fds)

    def _hold(self) -> None:
        lease = self._lease
        if lease is None or not isinstance(lease.exchange, Holding):
            raise FramingError("the lane serves nobody whom it could let wait")
        lease.exchange.hold(lease.start.wait)

    def _serve(self, command: said.Serve) -> None:
        framing.check_token(command.token)
        lease = self._leased()
        lease.token = command.token
        lease.faults = self._faults.of_lease(command.fault)
        lease.paced, lease.held = command.paced, command.held

    async def _connect(self, command: said.Connect) -> said.Done:
        framing.check_token(command.token)
        lease = self._leased()
        try:
            async with asyncio.timeout(command.deadline_s):
                connection = await self._transport.connect(command.host, command.port, command.deadline_s)
                me = self._acquaintances.me
                self._meet(await introduce(connection, command.token, lease.move_id, lease.table, me))
                gauge = await self._side.measure(connection, lease.table, command.wish)
        except TimeoutError:
            raise _FatalError(
                DeadlineError(f"{command.host}:{command.port} did not answer in time")
            ) from None
        except (TransportError, DeadlineError) as error:
            raise _FatalError(error) from error
        exchange = self._side.destination(connection, lease.table, self._stall, self._faults, gauge)
        if isinstance(exchange, Puller):
            exchange.on_stood = self._on_stood
        self._start(lease, exchange, gauge)
        return said.Done(gauge.gbps, gauge.straight, dict(gauge.rates))

    def _meet(self, other: framing.ProcessId) -> None:
        if self._acquaintances.me != framing.NOBODY != other:
            self._acquaintances.meet(other)

    def _source(self, connection: Connection, lease: Held, gauge: Gauge) -> Exchange:
        leave = partial(self._leave, lease) if lease.paced else None
        start = lease.start.wait if lease.held else None
        asks = Asks(partial(self._stage, lease), leave, gauge.shape, start, self._on_stood)
        return self._side.source(connection, lease.table, self._stall, lease.faults, asks)

    def _on_stood(self, block: int) -> None:
        self._report(said.Stood(block))

    def _leave(self, lease: Held, nbytes: int) -> asyncio.Future[None]:
        return self._ask(lease, said.Leave(self._wants + 1, nbytes))

    def _stage(self, lease: Held, slot: int, rows: Rows) -> asyncio.Future[None]:
        return self._ask(lease, said.Wanted(self._wants + 1, slot, rows.tobytes()))

    def _ask(self, lease: Held, wish: said.Leave | said.Wanted) -> asyncio.Future[None]:
        self._wants += 1
        wanted = lease.wanted[self._wants] = asyncio.get_running_loop().create_future()
        self._report(wish)
        return wanted

    def _on_staged(self, command: said.Staged) -> None:
        wanted = self._lease.wanted.pop(command.number, None) if self._lease is not None else None
        if wanted is not None and not wanted.done():
            wanted.set_result(None)

    def _start(self, lease: Held, exchange: Exchange, gauge: Gauge) -> None:
        exchange.follow(gauge.sent, gauge.received)
        lease.exchange = exchange
        lease.running = asyncio.create_task(exchange.run())

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and self._lease is lease and not self._over.done():
                self._over.set_exception(error)

        lease.running.add_done_callback(ended)

    def _pull(self, command: said.Pull) -> None:
        try:
            exchange = self._lease.exchange if self._lease is not None else None
            spans = framing.unpack_spans(command.spans)
            if isinstance(exchange, StagedDestination) and command.slot is not None:
                landed = exchange.pull_into(spans, command.slot)
            elif isinstance(exchange, Puller) and command.slot is None:
                # The node's word that the world stands may have been there before the first of them.
                waits = command.ahead and self._lease is not None and not self._lease.start.begun
                exchange.rest() if waits else exchange.wake()
                landed = exchange.pull(spans)
            else:
                raise FramingError("the lane is not connected as a destination of this kind")
        except TransportError as error:
            self._report(said.NotPulled(command.number, error.code, error.message))
            return

        def report(done: asyncio.Future[int]) -> None:
            error = done.exception()
            if isinstance(error, WorldMoveError):
                self._report(said.NotPulled(command.number, error.code, error.message))
            else:
                self._report(said.Pulled(command.number, done.result()))

        landed.add_done_callback(report)

    def _report(
        self, report: said.Pulled | said.NotPulled | said.Wanted | said.Leave | said.Stood | said.Stale
    ) -> None:
        if not self._pulls:  # else it would overtake what waits to be sent
            with contextlib.suppress(ConnectionLostError, FramingError):
                self._channel.send_nowait(report)
                return
        task = asyncio.create_task(self._channel.send(report))
        self._pulls.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        # A node that is gone ends this process by way of `_obey`.
        if not task.cancelled():
            task.exception()

    async def _release(self, command: said.Release) -> Told:
        lease = self._lease
        for extent in self._extents:
            extent.close()
        self._extents = []
        if lease is None:
            return {}
        lease.token = None
        if lease.exchange is not None and lease.running is not None:
            try:
                await lease.exchange.close(command.deadline_s)
                await lease.running
            except (TransportError, DeadlineError) as error:
                raise _FatalError(error) from error
        self._lease = None
        lease.start.close()
        lease.table.close()
        if os.sched_getaffinity(0) != self._cpus:
            os.sched_setaffinity(0, self._cpus)
        return lease.exchange.account.told() if lease.exchange is not None else {}

    async def _accept(self, listener: Any) -> None:
        while True:
            self._callers.take(self._examine(await listener.accept()))

    async def _examine(self, connection: Connection) -> None:
        """Lets in the one caller that this lease waits for; anyone else is turned away."""
        lease = self._lease
        if lease is None or lease.token is None:
            connection.abort()
            return
        token, known = lease.token, False
        try:
            async with asyncio.timeout(self._stall):
                theirs = await examine(connection, token, lease.move_id)
                # Another caller may have used the token up, or the lease ended, since.
                if self._lease is not lease or lease.token is None:
                    connection.abort()
                    return
                lease.token, known = None, True
                self._callers.know()
                self._meet(theirs.process)
                me = self._acquaintances.me
                await welcome(connection, token, lease.move_id, lease.table, theirs, me=me)
            gauge = await self._side.oblige(connection, self._stall)
        except (TransportError, DeadlineError, TimeoutError) as error:
            connection.abort()
            # What a stranger does, or doesn't do, is no failure of the lease.
            if known and self._lease is lease and not self._over.done():
                late = DeadlineError("the other lane did not finish its introduction in time")
                self._over.set_exception(error if isinstance(error, WorldMoveError) else late)
            return
        except asyncio.CancelledError:
            connection.abort()
            raise
        if self._lease is not lease:
            connection.abort()
            return
        self._start(lease, self._source(connection, lease, gauge), gauge)


class _FatalError(Exception):
    """A failure after which the lane can't go on, whatever its class."""

    def __init__(self, cause: WorldMoveError) -> None:
        super().__init__(cause.message)
        self.cause = cause
