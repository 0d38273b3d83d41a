"""One executor process as its node sees it: started, asked, watched, reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

import msgspec

from worldmove.errors import (
    ConnectionLostError,
    FramingError,
    NoMemoryError,
    ProcessLostError,
    ValidationError,
    WorldMoveError,
)
from worldmove.executor.kinds import HOST, Kind
from worldmove.executor.messages import Done, Failed, Ready, Reply, Request
from worldmove.ipc import Channel, close_all, socketpair

STALL_S = 10.0
SLOWEST_BYTES_PER_S = 100e6
"""An executor that answers nothing for `STALL_S` and the time of its request at this rate is ended."""


class ExecutorProcess:
    """A running executor. Its requests are begun in the order of `submit`, and answered as they get done.

    Attributes:
        pid: the process.
        outstanding: requests without an answer.
        answered: how many requests it has answered in its life.
        gone: completes when the process is reaped: from then on it touches no memory.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel[Reply], stall_s: float) -> None:
        self.pid = process.pid
        self.answered = 0
        self._process = process
        self._channel = channel
        self._stall_s = stall_s
        self._calls: dict[int, tuple[asyncio.Future[Done], int]] = {}
        self._next = 0
        self._queued = 0
        self._outbox: asyncio.Queue[tuple[Request, tuple[int, ...]]] = asyncio.Queue()
        self._watch: asyncio.TimerHandle | None = None
        self._leaving = False
        self._sending = asyncio.create_task(self._send())
        self.gone: asyncio.Task[None] = asyncio.create_task(self._live())

    @classmethod
    async def spawn(cls, nice: int, stall_s: float = STALL_S, kind: Kind = HOST) -> ExecutorProcess:
        """Starts one; returns when it takes requests.

        Args:
            nice: added to its scheduling priority, so that worlds go first.
            stall_s: seconds without any answer after which it is given up.
            kind: whose memory it works on.

        Raises:
            ProcessLostError: it ended, or stalled, before it was ready; or the system refused to start it
                (`details["refused"]`).
        """
        mine, its = socketpair()
        command = [sys.executable, "-m", kind.module, "--fd", str(its.fileno())]
        command += ["--parent", str(os.getpid()), "--nice", str(nice), *kind.arguments]
        channel: Channel[Reply] = Channel(mine, Reply)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(its.fileno(),), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            channel.close()
            raise ProcessLostError(f"an executor cannot be started: {error}", refused=True) from error
        except BaseException:
            channel.close()
            raise
        finally:
            its.close()
        try:
            async with asyncio.timeout(stall_s + kind.ready_s):
                await channel.receive()
        except (ConnectionLostError, FramingError, TimeoutError) as error:
            await _end(process, channel)
            raise ProcessLostError(f"executor {process.pid} did not get ready: {error}") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(_end(process, channel)))
            raise
        return cls(process, channel, stall_s)

    @property
    def outstanding(self) -> int:
        """Requests that are not answered yet."""
        return len(self._calls)

    @property
    def alive(self) -> bool:
        """Whether it takes requests; false from the moment that it is being ended."""
        return not self._leaving and not self.gone.done()

    def number(self) -> int:
        """A number for the next request."""
        self._next += 1
        return self._next

    def submit(self, request: Request, fds: Sequence[int] = (), *, nbytes: int = 0) -> asyncio.Future[Done]:
        """Sends a request; never waits. Cancelling the future recalls nothing.

        Args:
            request: with a `call` from `number`.
            fds: must stay open until the answer comes.
            nbytes: bytes that are touched: how much time the answer may take.

        Returns:
            The answer. It fails with `ValidationError` where the request was wrong, with `NoMemoryError`
            where memory lacked, and with `ProcessLostError`, once the process is reaped, where it died.
        """
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if not self.alive:
            future.set_exception(ProcessLostError(f"executor {self.pid} is gone"))
            return future
        self._calls[request.call] = (future, nbytes)
        if fds or self._queued or not self._sent_at_once(request):
            self._queued += 1
            self._outbox.put_nowait((request, tuple(fds)))
        if self._watch is None:
            self._arm(self.answered, patience=2)
        return future

    def _sent_at_once(self, request: Request) -> bool:
        """Sends without a task in between, where that is possible: the device would stand idle meanwhile."""
        try:
            self._channel.send_nowait(request)
        except (ConnectionLostError, FramingError):
            # Its queue is full, the message is large, or it is gone, which others notice.
            return False
        return True

    def kill(self) -> None:
        """Ends it at once (SIGKILL) and never waits; `gone` completes when it is reaped."""
        self._leaving = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Lets it finish what it was asked, then ends it; returns when it is reaped."""
        self._leaving = True
        pending = {future for future, _ in self._calls.values() if not future.done()}
        if pending:
            await asyncio.wait(pending)
        self.kill()
        await asyncio.shield(self.gone)

    def _arm(self, seen: int, patience: int) -> None:
        # Two silent periods end it, not one: this loop may have been the one that slept.
        _, nbytes = next(iter(self._calls.values()))
        seconds = self._stall_s + nbytes / SLOWEST_BYTES_PER_S
        self._watch = asyncio.get_running_loop().call_later(seconds / 2, self._check, seen, patience - 1)

    def _check(self, seen: int, patience: int) -> None:
        self._watch = None
        if not self._calls:
            return
        if self.answered != seen:
            self._arm(self.answered, patience=2)
        elif patience:
            self._arm(seen, patience)
        else:
            self.kill()

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionLostError):
            while True:
                request, fds = await self._outbox.get()
                await self._channel.send(request, fds)
                self._queued -= 1

    async def _live(self) -> None:
        reason = "its socket was closed"
        lost: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
        self._channel.listen(self._answer, lost.set_result)
        try:
            reason = (await lost).message
        finally:
            self.kill()
            self._sending.cancel()
            if self._watch is not None:
                self._watch.cancel()
            await _end(self._process, self._channel)
            self._lose(reason)

    def _answer(self, reply: Reply, fds: list[int]) -> None:
        if isinstance(reply, Ready) or reply.call not in self._calls:
            close_all(fds)
            raise FramingError(f"executor {self.pid} answered something that was not asked")
        future, _ = self._calls.pop(reply.call)
        self.answered += 1
        if future.done():
            close_all(fds)
        elif isinstance(reply, Failed):
            close_all(fds)
            future.set_exception(self._failure(reply))
        else:
            future.set_result(msgspec.structs.replace(reply, fds=tuple(fds)) if fds else reply)

    def _failure(self, reply: Failed) -> WorldMoveError:
        if reply.short_of is not None:
            return NoMemoryError(f"executor {self.pid}: {reply.reason}", **reply.short_of)
        return ValidationError(f"executor {self.pid}: {reply.reason}", field="request")

    def _lose(self, reason: str) -> None:
        error: WorldMoveError = ProcessLostError(
            f"executor {self.pid} ended while it was needed: {reason}", pid=self.pid
        )
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(error)


async def _end(process: asyncio.subprocess.Process, channel: Channel[Reply]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    channel.close()
