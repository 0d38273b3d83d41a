"""Where callers wait until it is known who they are: bounded, and the first makes room for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Lobby:
    """Callers of which nothing is known yet, each in a task of its own that is cancelled to turn it away.

    A full lobby turns away the caller that came first, not the one that comes: the right one says who it is
    at once, so that strangers who say nothing can't keep it out.

    Args:
        places: callers that may wait at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, caller: Coroutine[None, None, None]) -> None:
        """A caller comes; its task must end its connection when it is cancelled."""
        if len(self._waiting) >= self._places:
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.cancel()
        task = asyncio.get_running_loop().create_task(caller)
        self._waiting[task] = None
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def know(self) -> None:
        """The caller whose task calls this is known, and makes room for nobody any more."""
        task = asyncio.current_task()
        if task is not None:
            self._waiting.pop(task, None)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)
        self._tasks.discard(task)

    async def close(self) -> None:
        """Turns everybody away; returns when they are."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
