"""Tasks that belong to somebody: every one is awaited, and none fails in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


class Tasks:
    """A group of running coroutines with one place where their errors go.

    Unlike `asyncio.TaskGroup` it is open-ended: the owner spawns while it lives, and one failure ends
    nothing by itself, since a failure is an event for the owner to decide on.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Starts `work`; whatever it raises (cancellation apart) goes to `on_error`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def join(self) -> None:
        """Returns when nothing runs any more, also not what was spawned meanwhile."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancels everything and waits for it to end."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)


async def each(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once; raises the first error, once all have ended."""
    if len(jobs) == 1:
        await jobs[0]
        return
    for outcome in await asyncio.gather(*jobs, return_exceptions=True):
        if outcome is not None:
            raise outcome
