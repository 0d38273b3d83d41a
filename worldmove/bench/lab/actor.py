"""The serving stacks of one host of the laboratory: many small worlds, or many standbys, in one process.

    python -m worldmove.bench.lab.actor URL world|standby PREFIX COUNT NBYTES PARENT

The worker's token comes as a line on stdin; the process ends when stdin closes, or with its parent. It says
on stdout, a line each, `+ID` when a world has been registered or a standby waits, `-ID` when that has moved
away or been handed a world. A world that went is replaced by a new one; a world that came generates two
blocks and ends, and its standby waits anew. A thread for each, on the public SDK only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, NamedTuple

from worldmove.errors import ConflictError, SessionEndedError
from worldmove.executor.serving import end_with_parent
from worldmove.worker import Region, SessionMoved, Worker, World

BLOCK_S = 0.05
MODEL = "worldmove-incast"
HOST_STATE_BYTES = 4096
ARRIVED_BLOCKS = 2


class Stack(NamedTuple):
    """What the threads of a host have in common."""

    worker: Worker
    prefix: str
    nbytes: int
    writing: threading.Lock

    def description(self) -> dict[str, Any]:
        """What registrations and standbys say alike."""
        return {
            "model": MODEL,
            "regions": [Region("cache", "uint8", (self.nbytes,))],
            "block_ms": BLOCK_S * 1000,
            "horizon_ms": 60_000.0,
            "host_state_bytes": HOST_STATE_BYTES,
            "fingerprint": {"bench": "incast"},
        }

    def say(self, line: str) -> None:
        """Tells the parent; lines of several threads don't mix."""
        with self.writing:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def generate(world: World, blocks: int | None) -> None:
    """Generates `blocks` blocks, or until the world has moved or ended."""
    cache = world.tensor("cache")
    done = 0
    while blocks is None or done < blocks:
        with world.block():
            time.sleep(BLOCK_S)  # what the model's computing takes
            cache[: len(cache) // 8] += 1
        world.boundary(b"state")
        done += 1


def live(stack: Stack, number: int) -> None:
    """One world after another, each until it has moved away."""
    turn = 0
    while True:
        name = f"{stack.prefix}-{number}-{turn}"
        world = stack.worker.register(name, **stack.description())
        world.tensor("cache")[:] = number + turn
        stack.say(f"+{name}")
        try:
            generate(world, None)
        except (SessionMoved, SessionEndedError):
            stack.say(f"-{name}")
        turn += 1


def receive(stack: Stack, number: int) -> None:
    """One standby after another; a world that came is ended after its first blocks here."""
    while True:
        standby = stack.worker.standby(**stack.description())
        stack.say(f"+{stack.prefix}-{number}")
        world = None
        while world is None:
            world = standby.wait()
        stack.say(f"-{stack.prefix}-{number}")
        end(stack, world)


def end(stack: Stack, world: World) -> None:
    """Lets the world generate here, and ends it as soon as its move is over."""
    while True:
        generate(world, ARRIVED_BLOCKS)
        try:
            stack.worker.end(world.id)
        except ConflictError:
            continue  # just adopted: the source has yet to let go
        return


def main(arguments: list[str]) -> None:
    """Runs until stdin closes."""
    url, role, prefix, count, nbytes, parent = arguments
    end_with_parent(int(parent))
    token = sys.stdin.readline().strip()
    stack = Stack(Worker(url, token), prefix, int(nbytes), threading.Lock())
    work = live if role == "world" else receive
    threading.excepthook = _fail
    for number in range(int(count)):
        threading.Thread(target=work, args=(stack, number), daemon=True).start()
    sys.stdin.read()


def _fail(what: threading.ExceptHookArgs) -> None:
    """One thread that failed ends all: the laboratory must not go on with fewer worlds than it believes."""
    sys.stderr.write(f"{what.exc_type.__name__}: {what.exc_value}\n")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
