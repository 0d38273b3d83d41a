"""A serving stack as a process: does what it is told, line by line, on the public SDK.

Commands come as JSON lines on stdin, each is answered by one JSON line on stdout. The world that it
generates is a pure function of region name and block, so a test knows every byte of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from worldmove.worker import SessionEndedError, SessionMoved, Standby, Worker, World, WorldMoveError


def pattern(name: str, block: int, nbytes: int) -> bytes:
    """What region `name` holds after `block`."""
    seed = sum(name.encode()) + block * 131
    return ((np.arange(nbytes, dtype=np.uint32) * 7 + seed) & 0xFF).astype(np.uint8).tobytes()


def host_state(rank: int, block: int) -> bytes:
    """What belongs to the state beside the regions."""
    return f"rank {rank} block {block}".encode() * (1 + block % 3)


class Stack:
    def __init__(self, url: str) -> None:
        self.worker = Worker(url)
        self.world: World | None = None
        self.standby: Standby | None = None
        self.asked = 0

    def write(self, world: World, block: int) -> None:
        for region in world.regions:
            if region.rank == world.rank and region.nbytes:
                flat = world.tensor(region.name).reshape(-1).view(np.uint8)
                flat[:] = np.frombuffer(pattern(region.name, block, region.nbytes), np.uint8)

    def step(self, *, lazy: bool = False, peer: socket.socket | None = None, pace_s: float = 0.0) -> None:
        world = self.world
        assert world is not None
        block = world.block_number + 1
        with world.block():
            if peer is not None:  # a collective: no rank gets further than the other lets it
                peer.send(b"x")
                assert peer.recv(1) == b"x"
            if pace_s:
                time.sleep(pace_s)
            self.write(world, block)

        def ask() -> bytes:
            self.asked += 1
            return host_state(world.rank, block)

        world.boundary(ask if lazy else ask())

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        what = command.pop("do")
        return getattr(self, f"do_{what}")(**command) or {}

    def do_join(self, ticket: str) -> dict[str, Any]:
        self.world = self.worker.join(ticket)
        return self.about()

    def do_register(self, **spec: Any) -> dict[str, Any]:
        self.world = self.worker.register(**spec)
        return self.about()

    def do_attach(self, **spec: Any) -> dict[str, Any]:
        self.world = self.worker.attach(**spec)
        return self.about()

    def do_standby(self, ticket: str | None = None, **spec: Any) -> dict[str, Any]:
        self.standby = self.worker.join_standby(ticket) if ticket else self.worker.standby(**spec)
        return {"id": self.standby.id}

    def do_wait(self, timeout: float | None = None) -> dict[str, Any]:
        assert self.standby is not None
        self.world = self.standby.wait(timeout)
        return {} if self.world is None else self.about()

    def about(self) -> dict[str, Any]:
        assert self.world is not None
        return {
            "id": self.world.id,
            "block": self.world.block_number,
            "epoch": self.world.epoch,
            "host_state": self.world.host_state.decode(),
            "tickets": self.world.tickets,
        }

    def do_step(self, n: int = 1, lazy: bool = False) -> dict[str, Any]:
        for _ in range(n):
            self.step(lazy=lazy)
        assert self.world is not None
        return {"block": self.world.block_number, "asked": self.asked}

    def do_run(
        self, lazy: bool = False, peer: int | None = None, pace_s: float = 0.0, until: int | None = None
    ) -> dict[str, Any]:
        sock = None if peer is None else socket.socket(fileno=peer)
        try:
            while True:
                self.step(lazy=lazy, peer=sock, pace_s=pace_s)
                assert self.world is not None
                if until is not None and self.world.block_number >= until:
                    return {"block": self.world.block_number}
        except SessionMoved as moved:
            end: dict[str, Any] = {"moved": moved.destination, "endpoint": moved.endpoint}
        except SessionEndedError as ended:
            end = {"ended": ended.message}
        finally:
            if sock is not None:
                sock.close()
        assert self.world is not None
        assert self.world.closed
        return {**end, "block": self.world.block_number, "asked": self.asked}

    def do_revise(self, **change: Any) -> None:
        assert self.world is not None
        self.world.revise(**change)

    def do_read(self, name: str) -> dict[str, Any]:
        owner = self.world or self.standby
        assert owner is not None
        array = owner.tensor(name)
        return {"shape": array.shape, "dtype": str(array.dtype), "hex": array.tobytes().hex()}

    def do_fill(self, name: str, value: int) -> None:
        assert self.world is not None
        self.world.tensor(name)[...] = value

    def do_half(self) -> None:
        """Dies in the middle of a block."""
        assert self.world is not None
        with self.world.block():
            self.write(self.world, self.world.block_number + 1)
            os.kill(os.getpid(), signal.SIGKILL)

    def do_unmarked(self) -> dict[str, Any]:
        """A block outside of `block()`, as a careless stack does it."""
        assert self.world is not None
        self.write(self.world, self.world.block_number + 1)
        self.world.boundary(b"careless")
        return {"block": self.world.block_number}

    def do_fork(self) -> dict[str, Any]:
        """Leaves a child behind that has everything this process had."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return {"pid": child}

    def do_close(self) -> None:
        for owner in (self.world, self.standby):
            if owner is not None:
                owner.close()


def main() -> None:
    stack = Stack(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = stack.do(json.loads(line))
        except SessionMoved as moved:
            answer = {"moved": moved.destination, "endpoint": moved.endpoint}
        except WorldMoveError as error:
            answer = {"error": error.code, "message": error.message, "details": repr(error.details)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
