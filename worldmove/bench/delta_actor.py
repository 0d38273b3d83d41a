"""The worker of `worldmove bench delta`: a world that generates, and its standby. Uses the public SDK only.

    python -m worldmove.bench.delta_actor URL world|standby SESSION NBYTES PARENT PATTERN BLOCK_MS

`worldmove.bench.actor` says how two pass a session to and fro. The memory of a standby is poisoned before it
waits; what a world is handed is compared byte for byte with what must be there after its block (`cache`).
"""

from __future__ import annotations

import sys
import time
from typing import cast

import numpy as np

from worldmove.bench.actor import HORIZON_MS, POISON, say
from worldmove.bench.cache import Bytes, Cache, Pattern
from worldmove.executor.serving import end_with_parent
from worldmove.worker import SessionMoved, Standby, Worker, World

MODEL = "worldmove-bench-delta"


class Stack:
    """A serving stack with one world at a time."""

    def __init__(self, worker: Worker, session: str, cache: Cache, block_ms: float) -> None:
        self._worker = worker
        self._session = session
        self._cache = cache
        self._block_ms = block_ms

    def register(self) -> World:
        """Registers the world as it is before its first block."""
        world = self._worker.register(
            self._session,
            model=MODEL,
            regions=self._cache.regions,
            block_ms=self._block_ms,
            horizon_ms=HORIZON_MS,
        )
        self._cache.fill(self._memory(world), 0)
        say("registered")
        return world

    def wait(self) -> World:
        """Waits in poisoned memory until a world is handed over, and checks it."""
        standby = self._worker.standby(
            model=MODEL, regions=self._cache.regions, block_ms=self._block_ms, horizon_ms=HORIZON_MS
        )
        for region in self._memory(standby):
            region[:] = POISON
        say("waiting")
        world = None
        while world is None:
            world = standby.wait()
        say("adopted" if self._cache.right(self._memory(world), world.block_number) else "wrong")
        return world

    def live(self, world: World) -> None:
        """Generates, a block every `block_ms`, until the world has moved away.

        A block computes first, which here is to wait, and writes at its end.
        """
        memory, due = self._memory(world), time.monotonic()
        try:
            while True:
                due = max(due + self._block_ms / 1000, time.monotonic())
                with world.block():
                    time.sleep(max(due - time.monotonic(), 0.0))
                    self._cache.generate(memory, world.block_number + 1)
                world.boundary(b"generating")
        except SessionMoved:
            say("moved")

    def _memory(self, world: World | Standby) -> list[Bytes]:
        return [world.tensor(region.name).view(np.uint8) for region in self._cache.regions]


def main(arguments: list[str]) -> None:
    """Runs until the parent ends it."""
    url, role, session, nbytes, parent, pattern, block_ms = arguments
    end_with_parent(int(parent))
    play(Stack(Worker(url), session, Cache(cast("Pattern", pattern), int(nbytes)), float(block_ms)), role)


def play(stack: Stack, role: str) -> None:
    """Lives as a world, or waits for one as a standby; and so on in turn."""
    world = stack.register() if role == "world" else stack.wait()
    while True:
        stack.live(world)
        del world  # its memory goes before that of the standby comes
        sys.stdin.readline()
        world = stack.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
