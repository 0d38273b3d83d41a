"""One lane process as the node sees it: commands, pulls, and certainty about its end. Knows no UCX."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from worldmove import ipc
from worldmove.errors import (
    ConnectionLostError,
    DeadlineError,
    NoMemoryError,
    ProcessLostError,
    TransportError,
    WorldMoveError,
)
from worldmove.executor.messages import Stop
from worldmove.manifest import Span
from worldmove.transport import framing
from worldmove.transport import lane_messages as said
from worldmove.transport.account import Told
from worldmove.transport.slots import RingShape
from worldmove.transport.table import LaneRegion

START_DEADLINE = 60.0
SLOWEST_BYTES_PER_S = 200e6
"""Mapping, populating and unmapping an arena has this much more time than the stall deadline: the page tables
of memory that is there already are filled more than ten times as fast."""
FDS_A_MESSAGE = 200


class Lane:
    """One lane process, as the node sees it.

    Attributes:
        pid: of the process.
        port: where it listens for the lanes of other nodes, on all addresses.
        move_id: the move it is leased to, or `None`.
        lost: completes with the error when the lane or its peer has failed; never raises.
        stale: it should end once it is idle (`said.Stale`); `on_stale` is called with it when it says so.
        fault: of its present lease, for tests.
        opened: what it said when it was connected last.
        account: where the time of its last lease went (`account.Told`).
        on_wanted: as source with a ring: called with (number, slot, rows) when it wants a slot filled;
            `staged` with that number says that it is.
        on_leave: as source: called with (number, bytes) when it wants to send; `staged` says that it may.
            `None`: it may at once.
        on_stood: called with `said.Stood`'s block.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, channel: ipc.Channel[said.Report], stall_s: float
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._process = process
        self._channel = channel
        self._stall = stall_s
        self._heard = loop.time()
        self.pid = process.pid
        self.port = 0
        self.move_id: str | None = None
        self.fault = ""
        self.opened = said.Done()
        self.account: Told = {}
        self.lost: asyncio.Future[WorldMoveError] = loop.create_future()
        self._commanding = asyncio.Lock()
        self._mapping = False
        self._mapped_bytes = 0
        self._answer: asyncio.Future[said.Report] | None = None
        self._pulls: dict[int, asyncio.Future[int]] = {}
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        # Without a task that would have to be woken: a report may be what a world waits for.
        channel.listen(self._hear, self._unheard)
        self._reaping = loop.create_task(self._reap())
        self.stale = False
        self.on_released: Callable[[Lane], None] = lambda _: None
        self.on_stale: Callable[[Lane], None] = lambda _: None
        self.on_wanted: Callable[[int, int, bytes], None] = lambda *_: None
        self.on_leave: Callable[[int, int], None] | None = None
        self.on_stood: Callable[[int], None] = lambda _: None

    async def watch(self, page: int, nbytes: int, stop: Stop) -> None:
        """As source, before `serve`: shows a control page to the lane, which looks at it after `said.Look`.

        Raises:
            TransportError, ProcessLostError: the lane can't map it, or is gone.
        """
        await self._command(said.Watch(nbytes, stop), fds=[page])

    async def hold(self) -> None:
        """As source: nothing more is read before the world stands (`said.Hold`); raises as `watch`."""
        await self._command(said.Hold())

    def tell(self, command: said.Look | said.Go) -> None:
        """Says what is not answered, without waiting; a lane that can't be told ends."""
        try:
            self._channel.send_nowait(command)
        except ConnectionLostError:
            self.abort()

    async def serve(self, token: bytes, *, held: bool = False) -> None:
        """As source: returns when the lane is ready to accept the one caller that proves `token`.

        Args:
            token: of the lease.
            held: nothing is read before the world stands: see `said.Serve`.

        Raises:
            TransportError: the lane refuses (the token's length, or it serves already).
            ProcessLostError: the lane is gone.
        """
        framing.check_token(token)
        await self._command(said.Serve(token, self.fault, self.on_leave is not None, held))

    async def connect(
        self, host: str, port: int, token: bytes, timeout_ms: float, wish: said.Wish | None = None
    ) -> float:
        """As destination: connects to a serving lane and proves `token`; on failure the lane ends.

        Args:
            host: where it serves.
            port: likewise.
            token: of the lease.
            timeout_ms: for all of it.
            wish: how a direct lane is to carry what it pulls.

        Returns:
            Of a direct lane: 10⁹ bit/s that a bare transfer brought over this very connection; else 0.

        Raises:
            TransportError: nobody serves there, or it doesn't accept the token or the regions.
            DeadlineError: not within `timeout_ms`.
            ProcessLostError: the lane is gone.
        """
        framing.check_token(token)
        seconds = timeout_ms / 1000
        command = said.Connect(host, port, token, seconds, wish or said.Wish())
        self.opened = await self._command(command, beside_s=seconds)
        return self.opened.gbps

    async def pull(self, spans: Sequence[Span], slot: int | None = None, *, ahead: bool = False) -> int:
        """Fetches spans from the other lane; several pulls may be under way (up to 64), in order.

        Cancelling the call doesn't stop the transfer: bytes may land until `gone` or `release` returns.

        Args:
            spans: what is wanted.
            slot: of the ring, where the lease has one: there they land, laid out by `slots.loads`.
            ahead: the source is held until its world stands; no deadline runs before that.

        Returns:
            The bytes landed: all of them are in the memory of this lane's extents.

        Raises:
            TransportError: a span lies outside its region, or too many or too long ones (the lane
                goes on); or the other lane failed.
            DeadlineError: the transfer stood still.
            ProcessLostError: the lane is gone.
        """
        packed = framing.pack_spans(spans)
        if packed.size == 0:
            return 0
        self._check()
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pulls[number] = future
        # Where the lane dies while the command is sent, nobody asks this future any more.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await self._send(said.Pull(number, packed.tobytes(), slot, ahead))
            return await future
        finally:
            self._pulls.pop(number, None)

    async def staged(self, number: int) -> None:
        """Answers `on_wanted` (the slot is full) or `on_leave` (it may send).

        Raises:
            ProcessLostError: the lane is gone.
        """
        await self._send(said.Staged(number))

    async def release(self, deadline_s: float = 5.0) -> None:
        """Ends the lease cleanly; when it returns the lane has unmapped everything and serves anew.

        Where that isn't possible (the peer is gone, or doesn't end within `deadline_s`) the process is
        ended instead: either way nothing is mapped when this returns.
        """
        try:
            done = await self._command(
                said.Release(deadline_s), nbytes=self._mapped_bytes, beside_s=deadline_s
            )
        except WorldMoveError as error:
            self._fail(error)
            await self.gone()
        except BaseException:
            self.abort()
            raise
        else:
            self.account = done.account
            self.move_id = None
            self.fault = ""
            self.on_wanted = lambda *_: None
            self.on_leave = None
            self.on_stood = lambda _: None
            self.on_released(self)

    def abort(self, reason: WorldMoveError | None = None) -> None:
        """Kills the process; never waits. The memory is quiet once `gone` has returned.

        Args:
            reason: what `lost` completes with.
        """
        if self._process.returncode is None:
            self._process.kill()
        self._fail(reason or ProcessLostError(f"lane {self.pid} was ended"))

    async def gone(self) -> None:
        """Returns when the process is reaped: nothing of it reads or writes any more."""
        await asyncio.shield(self._reaping)

    async def bind(
        self,
        move_id: str,
        extents: Sequence[tuple[int, int]],
        regions: Sequence[LaneRegion],
        *,
        writable: bool,
        ring: RingShape | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Maps extents (descriptor, bytes) and takes up a lease; used by `LanePool.lease`.

        Raises:
            TransportError: the lane can't map them.
            NoMemoryError: it lacks descriptors or address space for them.
            DeadlineError: the lane stands still.
            ProcessLostError: the lane is gone.
        """
        self.move_id = move_id
        self._mapped_bytes = sum(size for _, size in extents)
        # Populating a large arena is one system call, during which the lane can't give signs of life.
        self._mapping = True
        for first in range(0, len(extents), FDS_A_MESSAGE):
            part = extents[first : first + FDS_A_MESSAGE]
            sizes = [size for _, size in part]
            await self._command(said.Extents(sizes, writable), nbytes=sum(sizes), fds=[fd for fd, _ in part])
        rows = np.array([tuple(region) for region in regions], dtype="<i8")
        await self._command(said.Bind(move_id, rows.tobytes(), ring, tuple(cpus)))
        self._mapping, self._heard = False, self._loop.time()

    async def ready(self, deadline_s: float = START_DEADLINE) -> None:
        """Returns when the process listens. Raises `ProcessLostError` or `DeadlineError`."""
        self._check()
        answer = await self._await_answer(deadline_s)
        if not isinstance(answer, said.Ready):
            raise ProcessLostError(f"lane {self.pid} began with {type(answer).__name__}")
        self.port = answer.port
        self._tasks.append(asyncio.get_running_loop().create_task(self._guard()))

    async def _guard(self) -> None:
        """A lane that stands still (stopped, or out of its mind) can't report itself."""
        while True:
            before = self._loop.time()
            await asyncio.sleep(self._stall)
            now = self._loop.time()
            if now - before > 2 * self._stall:
                continue
            if now - self._heard > 2 * self._stall and not self._mapping:
                self._fail(DeadlineError(f"lane {self.pid} gave no sign of life for {2 * self._stall} s"))

    async def _command(
        self, command: said.Command, *, nbytes: int = 0, beside_s: float = 0.0, fds: Sequence[int] = ()
    ) -> said.Done:
        """Has a command done within the stall deadline, the time of its bytes, and `beside_s`."""
        deadline_s = self._stall + nbytes / SLOWEST_BYTES_PER_S + beside_s
        async with self._commanding:
            self._check()
            waiting = self._expect()
            try:
                await self._send(command, fds)
            except BaseException:
                self.abort()
                raise
            answer = await self._await_answer(deadline_s, waiting)
        if isinstance(answer, said.Refused) and answer.short_of is not None:
            raise NoMemoryError(f"lane {self.pid}: {answer.reason}", **answer.short_of)
        if isinstance(answer, said.Refused):
            raise TransportError(f"lane {self.pid}: {answer.reason}")
        return answer if isinstance(answer, said.Done) else said.Done()

    def _expect(self) -> asyncio.Future[said.Report]:
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._answer

    async def _await_answer(
        self, deadline_s: float, waiting: asyncio.Future[said.Report] | None = None
    ) -> said.Report:
        try:
            async with asyncio.timeout(deadline_s):
                return await (waiting or self._expect())
        except TimeoutError:
            self.abort()
            raise DeadlineError(f"lane {self.pid} did not answer within {deadline_s:.3g} s") from None
        except asyncio.CancelledError:
            # Its answer would be taken for the next command's: this lane can't be used again.
            self.abort()
            raise

    async def _send(self, command: said.Command, fds: Sequence[int] = ()) -> None:
        try:
            await self._channel.send(command, fds)
        except ConnectionLostError as error:
            self._hear_out()
            self._fail(ProcessLostError(f"lane {self.pid} is gone"))
            raise self._loss() from error

    def _check(self) -> None:
        if self.lost.done():
            raise self._loss()

    def _loss(self) -> WorldMoveError:
        error = self.lost.result()
        return type(error)(error.message, **error.details)

    def _unheard(self, _error: WorldMoveError) -> None:
        # `_reap` tells how it ended.
        if self._process.returncode is None:
            self._process.kill()

    def _hear(self, report: said.Report, fds: list[int]) -> None:
        ipc.close_all(fds)
        self._heard = self._loop.time()
        self._take(report)

    def _hear_out(self) -> None:
        """Takes what a lane that has ended said last: why."""
        with contextlib.suppress(TransportError):
            while (received := self._channel.receive_nowait()) is not None:
                self._hear(*received)

    def _take(self, report: said.Report) -> None:
        match report:
            case said.Pulled(number, nbytes):
                future = self._pulls.get(number)
                if future is not None and not future.done():
                    future.set_result(nbytes)
            case said.NotPulled(number, code, reason):
                future = self._pulls.get(number)
                if future is not None and not future.done():
                    future.set_exception(said.error_of(code, f"lane {self.pid}: {reason}"))
            case said.Wanted(number, slot, rows):
                self.on_wanted(number, slot, rows)
            case said.Leave(number, nbytes):
                if self.on_leave is not None:
                    self.on_leave(number, nbytes)
            case said.Stood(block):
                self.on_stood(block)
            case said.Failed(code, reason):
                self._fail(said.error_of(code, f"lane {self.pid}: {reason}"))
            case said.Stale():
                self.stale = True
                self.on_stale(self)
            case said.Ready() | said.Done() | said.Refused():
                self._answered(report)
            case said.Alive():
                pass

    def _answered(self, report: said.Report) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(report)

    def _fail(self, error: WorldMoveError) -> None:
        if self.lost.done():
            return
        self.lost.set_result(error)
        waiting: list[asyncio.Future[Any]] = [*self._pulls.values()]
        if self._answer is not None:
            waiting.append(self._answer)
        for future in waiting:
            if not future.done():
                future.set_exception(self._loss())
        if self._process.returncode is None:
            self._process.kill()

    async def _reap(self) -> None:
        await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._hear_out()
        self._channel.close()
        self._fail(ProcessLostError(f"lane {self.pid} ended with status {self._process.returncode}"))
