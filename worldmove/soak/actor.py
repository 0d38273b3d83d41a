"""A serving stack of the soak, on the public SDK alone.

    python -m worldmove.soak.actor --role register|attach|standby --url U --world W --session S --state-mb MB
                                   --fd N --parent PID [--device UUID]

It generates until its world has gone, then waits on its own node for it to come back, for ever. A block is
told before its boundary: so what was told and is not at a boundary was torn by the death of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import socket
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from worldmove.cuda.driver import find
from worldmove.demo.clock import Clock
from worldmove.errors import (
    ConnectionLostError,
    NotFoundError,
    PeerError,
    SessionEndedError,
    SessionMoved,
    WorldMoveError,
)
from worldmove.executor.serving import end_with_parent
from worldmove.ipc import SyncChannel
from worldmove.soak.news import Failed, Generated, Left, News, Playing, Waiting
from worldmove.soak.world import HOST, HOST_STATE_BYTES, SoakWorld, regions
from worldmove.worker import Worker, World

BLOCK_MS = 40.0
HORIZON_MS = 5000.0
AGAIN_S = 0.2


class Stack(NamedTuple):
    """What a stack needs for every world it takes."""

    worker: Worker
    parent: SyncChannel[News]
    world: str
    state_mb: int
    device: str

    def description(self) -> dict[str, Any]:
        """What a registration and a standby say alike: only this world's standbys fit this world."""
        return {
            "regions": regions(self.state_mb, self.device),
            "model": self.world,
            "block_ms": BLOCK_MS,
            "horizon_ms": HORIZON_MS,
            "host_state_bytes": HOST_STATE_BYTES,
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> dict[str, str]:
        """Equal for the stacks of one world."""
        return {"world": self.world}


def wait(stack: Stack) -> World:
    """Waits as a standby until the world is handed over; stands by anew where the node has lost it."""
    while True:
        try:
            standby = stack.worker.standby(**stack.description())
            stack.parent.send(Waiting())
            world = standby.wait()
        except (SessionEndedError, NotFoundError, PeerError, ConnectionLostError):
            time.sleep(AGAIN_S)  # the node starts again, which nothing here can tell
            continue
        if world is not None:
            return world


def play(stack: Stack, world: World) -> None:
    """Generates at the block clock, until the world has moved or ended."""
    library = np if stack.device == HOST else importlib.import_module("cupy")
    memory = {
        region.name: world.tensor(region.name, like=library.__name__) for region in regions(stack.state_mb)
    }
    view = SoakWorld(memory, world.block_number, world.host_state, library)
    stack.parent.send(Playing(world.id, view.block, world.epoch))
    clock = Clock(BLOCK_MS)
    while True:
        with world.block():
            view.step()
            digest = view.digest()
        stack.parent.send(Generated(world.id, view.block, digest))
        try:
            world.boundary(view.host_state)
        except (SessionMoved, SessionEndedError) as gone:
            stack.parent.send(Left(world.id, view.block, str(gone)))
            return
        clock.wait()


def main(arguments: list[str]) -> None:
    """Generates and waits until the parent ends this process."""
    parser = argparse.ArgumentParser(prog="worldmove.soak.actor")
    for name in ("--fd", "--parent", "--state-mb"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--url", "--world", "--session"):
        parser.add_argument(name, required=True)
    parser.add_argument("--role", choices=("register", "attach", "standby"), required=True)
    parser.add_argument("--device", default=HOST)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent)
    parent: SyncChannel[News] = SyncChannel(socket.socket(fileno=options.fd), News)
    with Worker(options.url) as worker:
        stack = Stack(worker, parent, options.world, options.state_mb, options.device)
        if stack.device != HOST:
            importlib.import_module("cupy").cuda.Device(find(stack.device).ordinal).use()
        try:
            if options.role == "register":
                play(stack, worker.register(options.session, **stack.description()))
            elif options.role == "attach":
                play(stack, worker.attach(options.session, fingerprint=stack.fingerprint()))
            while True:
                play(stack, wait(stack))
        except WorldMoveError as error:
            with contextlib.suppress(ConnectionLostError):
                parent.send(Failed(error.code, error.message))
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
