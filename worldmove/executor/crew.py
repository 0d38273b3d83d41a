"""A fixed number of executors, each replaced when it dies, all with the same memory mapped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from worldmove.errors import ProcessLostError, ValidationError
from worldmove.executor.kinds import Kind
from worldmove.executor.messages import Attach, Detach, Done, Request
from worldmove.executor.process import ExecutorProcess
from worldmove.ipc import close_all
from worldmove.memory.arena import free_arenas

MAX_FAILURES = 5
"""Executors in a row that died without having done anything, after which their place stays empty."""
REST_S = 0.5
"""Until the system is asked once more for a process that it has refused."""

EventSink = Callable[[str, Mapping[str, object]], None]


class Memory(NamedTuple):
    """Memory that every executor maps; `fd` belongs to the crew. `device` and `watched` as for `Attach`."""

    fd: int
    nbytes: int
    writable: bool
    device: bool = False
    watched: bool = False

    def check(self, key: int, offset: int, length: int, *, writable: bool) -> None:
        """Raises ValidationError where bytes lie outside (`key` names the memory), or can't be written."""
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise ValidationError(
                f"bytes {offset} to {offset + length} lie outside memory {key} of {self.nbytes}",
                field="offset",
            )
        if writable and not self.writable:
            raise ValidationError(f"memory {key} is read-only", field="key")


class Crew:
    """Keeps the executors alive.

    Args:
        count: how many.
        nice: added to their scheduling priority.
        stall_s: see `ExecutorProcess`.
        on_room: called whenever an executor may have room for a request, or there is none any more.
        on_event: told `executor-started`, `executor-lost` and `executor-given-up`, with the pid.
        kind: whose memory they work on.

    Attributes:
        memory: what is mapped, by key.
    """

    def __init__(
        self,
        count: int,
        nice: int,
        stall_s: float,
        on_room: Callable[[], None],
        *,
        on_event: EventSink | None,
        kind: Kind,
    ) -> None:
        self.memory: dict[int, Memory] = {}
        self._count = count
        self._nice = nice
        self._stall_s = stall_s
        self._on_room = on_room
        self._on_event = on_event
        self._kind = kind
        self._executors: list[ExecutorProcess | None] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Starts all; returns when they take requests. Raises as `ExecutorProcess.spawn`, leaving none."""
        spawning = [asyncio.create_task(self._spawn()) for _ in range(self._count)]
        try:
            executors = await asyncio.gather(*spawning)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(_end_all(spawning)))
            raise
        self._executors = [None] * self._count
        for place, executor in enumerate(executors):
            self._install(place, executor)
            self.later(self._keep(place))

    async def close(self) -> None:
        """Lets every executor finish what it has, ends it, and lets go of all memory."""
        self._closed = True
        await asyncio.gather(*(executor.close() for executor in self.alive()))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        fds = [memory.fd for memory in self.memory.values()]
        self.memory.clear()
        await free_arenas(fds)

    def kill(self) -> None:
        """Ends all at once, for good; never waits."""
        self._closed = True
        for executor in self.alive():
            executor.kill()

    @property
    def hopeless(self) -> bool:
        """No executor takes requests, and none ever will."""
        return not (self.alive() if self._closed else any(self._executors))

    def alive(self) -> list[ExecutorProcess]:
        """Those that take requests."""
        return [executor for executor in self._executors if executor is not None and executor.alive]

    def ask(
        self,
        executor: ExecutorProcess,
        make: Callable[[int], Request],
        fds: tuple[int, ...] = (),
        nbytes: int = 0,
    ) -> asyncio.Future[Done]:
        """Sends one executor a request, built by `make` from its number; never waits."""
        answer = executor.submit(make(executor.number()), fds, nbytes=nbytes)
        answer.add_done_callback(self._answered)
        return answer

    async def attach(self, key: int, memory: Memory) -> None:
        """Has everyone map `memory`, which belongs to the crew from now on.

        Raises:
            ValidationError: somebody can't; `detach` is still due.
        """
        self.memory[key] = memory
        await self._everywhere(_attach(key, memory), (memory.fd,), memory.nbytes)

    async def detach(self, key: int) -> None:
        """Has everyone unmap, and closes the descriptor."""
        memory = self.memory.pop(key)
        try:
            await self._everywhere(partial(Detach, key=key), (), memory.nbytes)
        finally:
            await free_arenas([memory.fd])

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task that `close` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answered(self, answer: asyncio.Future[Done]) -> None:
        # Also where nobody waits for this answer any more, somebody looks at how it went.
        answer.exception()
        self._on_room()

    async def _everywhere(self, make: Callable[[int], Request], fds: tuple[int, ...], nbytes: int) -> None:
        """Has every executor do the same; that one dies meanwhile matters to nobody here."""
        answers = [self.ask(executor, make, fds, nbytes) for executor in self.alive()]
        if answers:
            await asyncio.wait(answers)
        for answer in answers:
            error = answer.exception()
            if error is not None and not isinstance(error, ProcessLostError):
                raise error

    async def _spawn(self) -> ExecutorProcess:
        return await ExecutorProcess.spawn(self._nice, self._stall_s, self._kind)

    def _install(self, place: int, executor: ExecutorProcess) -> None:
        """Gives an executor its place and all memory; requests that follow find it mapped."""
        self._executors[place] = executor
        for key, memory in self.memory.items():
            answer = self.ask(executor, _attach(key, memory), (memory.fd,), memory.nbytes)
            answer.add_done_callback(partial(_end_unless_done, executor))
        self._tell("executor-started", executor.pid)

    async def _keep(self, place: int) -> None:
        """Replaces the executor at `place` whenever it dies."""
        failures = 0
        while (executor := self._executors[place]) is not None:
            await asyncio.wait({executor.gone})
            if self._closed:
                break
            self._tell("executor-lost", executor.pid)
            failures = 0 if executor.answered > len(self.memory) else failures + 1
            fresh = await self._replacement(failures)
            if fresh is not None and self._closed:
                await fresh.close()
                break
            self._executors[place] = fresh
            if fresh is None:
                self._tell("executor-given-up", executor.pid)
            else:
                self._install(place, fresh)
                self._on_room()
        self._on_room()

    async def _replacement(self, failures: int) -> ExecutorProcess | None:
        while failures < MAX_FAILURES and not self._closed:
            try:
                return await self._spawn()
            except ProcessLostError as error:
                if "refused" not in error.details:
                    failures += 1
                    continue
            # No fault of the executor's: the system has too little of something, and may have it again.
            await asyncio.sleep(REST_S)
        return None

    def _tell(self, event: str, pid: int) -> None:
        if self._on_event is not None:
            self._on_event(event, {"pid": pid})


def _attach(key: int, memory: Memory) -> Callable[[int], Request]:
    return partial(
        Attach,
        key=key,
        nbytes=memory.nbytes,
        writable=memory.writable,
        device=memory.device,
        watched=memory.watched,
    )


def disown(answer: asyncio.Future[Done]) -> None:
    """Closes what comes for somebody who waits no more."""
    if not answer.cancelled() and answer.exception() is None:
        close_all(answer.result().fds)


def _end_unless_done(executor: ExecutorProcess, answer: asyncio.Future[Done]) -> None:
    """A replacement that can't map what its place has mapped is of no use."""
    if answer.exception() is not None:
        executor.kill()


async def _end_all(spawning: list[asyncio.Task[ExecutorProcess]]) -> None:
    for task in spawning:
        # A second cancellation would tear it from the clean-up after the first.
        if not task.cancelling():
            task.cancel()
    outcomes = await asyncio.gather(*spawning, return_exceptions=True)
    await asyncio.gather(*(outcome.close() for outcome in outcomes if isinstance(outcome, ExecutorProcess)))
