"""The worker of a benchmark: a world of noise that stands still, and its standby. Uses the public SDK only.

    python -m worldmove.bench.actor URL world|standby SESSION NBYTES PARENT [COUNT]

With COUNT the session has so many regions, which share NBYTES; without, whole leaves as a cache has them.
It says on stdout, one word a line, what it has become: `registered`, `waiting`, `adopted`, `moved`. A world
that moved away becomes a standby on its own node when a line comes on stdin, so that two actors pass one
session to and fro. A standby fills its memory with a pattern before it waits: what is right there later, the
move has brought.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from worldmove.bench.digest import fill
from worldmove.executor.serving import end_with_parent
from worldmove.manifest import DEFAULT_LEAF
from worldmove.worker import Region, SessionMoved, Worker, World

REGIONS = 60
POISON = 0xA5
BLOCK_S = 0.02
MODEL = "worldmove-bench"
HORIZON_MS = 60_000.0


def regions(nbytes: int, count: int | None = None) -> list[Region]:
    """About `nbytes` bytes as the keys and values of 30 layers, whole leaves each; or of `count` regions."""
    each = nbytes // count if count else max(nbytes // REGIONS // DEFAULT_LEAF, 1) * DEFAULT_LEAF
    names = [f"layer{number // 2:02}.{'kv'[number % 2]}" for number in range(count or REGIONS)]
    return [Region(name=name, dtype="bfloat16", shape=(each // 2,)) for name in names]


def say(word: str) -> None:
    """Tells the parent."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def register(worker: Worker, session: str, regions: list[Region]) -> World:
    """Registers the world and fills it with noise."""
    world = worker.register(
        session, model=MODEL, regions=regions, block_ms=BLOCK_S * 1000, horizon_ms=HORIZON_MS
    )
    for number, region in enumerate(regions):
        fill(memoryview(world.tensor(region.name).view(np.uint8)), seed=number)
    say("registered")
    return world


def wait(worker: Worker, regions: list[Region]) -> World:
    """Waits as a standby, in poisoned memory, until a world is handed over."""
    standby = worker.standby(model=MODEL, regions=regions, block_ms=BLOCK_S * 1000, horizon_ms=HORIZON_MS)
    for region in regions:
        standby.tensor(region.name).view(np.uint8)[:] = POISON
    say("waiting")
    world = None
    while world is None:
        world = standby.wait()
    say("adopted")
    return world


def live(world: World) -> None:
    """Blocks of `BLOCK_S` seconds that change nothing, until the world has moved away."""
    try:
        while True:
            with world.block():
                time.sleep(BLOCK_S)
            world.boundary(b"standing still")
    except SessionMoved:
        say("moved")


def main(arguments: list[str]) -> None:
    """Runs until the parent ends it."""
    url, role, session, nbytes, parent, *more = arguments
    end_with_parent(int(parent))
    worker = Worker(url)
    made = regions(int(nbytes), *map(int, more))
    world = register(worker, session, made) if role == "world" else wait(worker, made)
    while True:
        live(world)
        del world  # its memory goes before that of the standby comes
        sys.stdin.readline()
        world = wait(worker, made)


if __name__ == "__main__":
    main(sys.argv[1:])
