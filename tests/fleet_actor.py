"""A serving stack as a process of the fleet tests, on the public SDK and NumPy alone.

    python tests/fleet_actor.py URL PARENT_PID

Commands come on stdin, one JSON object a line, each answered by one line on stdout, in their order:

    {"number": 7, "do": "step", "n": 3}
    {"number": 7, "ok": ...}  or  {"number": 7, "error": code, "message": text, "details": {...}}

While it generates freely (`run`), commands are done between two blocks. News have no number:

    {"event": "moved", "destination": ..., "endpoint": ..., "block": ...}
    {"event": "ended" | "failed", "reason": ..., "block": ...}

Commands and their arguments:

    use {host: bytes|lazy|none, share, work_ms, pad}  how it generates: its host state, how much of a region
                                 a block rewrites (1 part in `share`), how long a block takes at least, bytes
                                 that are appended to the host state
    register {id?, regions, ...} as Worker.register         standby {regions, ...} as Worker.standby
    attach {id} · join {ticket} · join_standby {ticket}
    wait {timeout_s?}            until the standby is handed a world
    step {n}                     generates n blocks; a move away in one of them is error `session-moved`
    run · halt                   generates freely until halted or moved
    half                         begins a block and leaves it unfinished
    about                        id, epoch, block, host_state (hex, or a digest), tickets, closed
    dump {path}                  writes all regions of this rank to a file; answers name and length of each
    poke {name, offset, hex}     writes bytes, without a block
    revise {add, drop, resize}   as World.revise
    close                        leaves the world or the standby
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fleet_world import SHARE, core, fill, flat, next_state, shown, write_block

from worldmove.executor.serving import end_with_parent
from worldmove.worker import SessionEndedError, SessionMoved, Standby, Worker, World, WorldMoveError


class Stack:
    """One worker, with at most one world or standby."""

    def __init__(self, url: str) -> None:
        self.worker = Worker(url)
        self.world: World | None = None
        self.standby: Standby | None = None
        self.running = False
        self.host = "bytes"
        self.share = SHARE
        self.work_s = 0.0
        self.pad = b""
        self._state = b""

    def _held(self) -> World:
        if self.world is None:
            raise LookupError("this actor has no world")
        return self.world

    def _take(self, world: World) -> dict[str, Any]:
        self.world, self.standby = world, None
        self._state = core(world.host_state, world.block_number)
        return self.do_about()

    def _mine(self) -> list[str]:
        world = self._held()
        return [region.name for region in world.regions if region.rank == world.rank]

    def step(self) -> None:
        """One block, with its boundary."""
        world = self._held()
        block = world.block_number + 1
        due = time.monotonic() + self.work_s
        with world.block():
            for name in self._mine():
                memory = flat(world.tensor(name))
                if block == 1:
                    fill(name, memory)
                write_block(memory, block, self.share)
            time.sleep(max(0.0, due - time.monotonic()))
        self._state = next_state(self._state, world.rank, block)
        state = self._state + self.pad
        host = {"bytes": state, "lazy": lambda: state, "none": None}[self.host]
        world.boundary(host)

    def do_use(self, host: str = "bytes", share: int = SHARE, work_ms: float = 0.0, pad: int = 0) -> None:
        self.host, self.share, self.work_s = host, share, work_ms / 1000
        self.pad = bytes([0x5A]) * pad

    def do_register(self, **spec: Any) -> dict[str, Any]:
        return self._take(self.worker.register(**spec))

    def do_attach(self, **spec: Any) -> dict[str, Any]:
        return self._take(self.worker.attach(**spec))

    def do_join(self, ticket: str) -> dict[str, Any]:
        return self._take(self.worker.join(ticket))

    def do_standby(self, **spec: Any) -> dict[str, Any]:
        self.world = None  # its memory goes before that of the standby comes
        self.standby = self.worker.standby(**spec)
        return {"id": self.standby.id, "tickets": self.standby.tickets}

    def do_join_standby(self, ticket: str) -> dict[str, Any]:
        self.world = None
        self.standby = self.worker.join_standby(ticket)
        return {"id": self.standby.id}

    def do_wait(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        if self.standby is None:
            raise LookupError("this actor has no standby")
        world = self.standby.wait(timeout_s)
        return None if world is None else self._take(world)

    def do_step(self, n: int = 1) -> dict[str, Any]:
        for _ in range(n):
            self.step()
        return self.do_about()

    def do_run(self) -> None:
        self._held()
        self.running = True

    def do_halt(self) -> dict[str, Any]:
        self.running = False
        return self.do_about()

    def do_half(self) -> None:
        with self._held().block():
            for name in self._mine():
                write_block(flat(self._held().tensor(name)), self._held().block_number + 1, self.share)

    def do_about(self) -> dict[str, Any]:
        world = self._held()
        return {
            "id": world.id,
            "epoch": world.epoch,
            "rank": world.rank,
            "block": world.block_number,
            "host_state": shown(world.host_state),
            "tickets": world.tickets,
            "closed": world.closed,
        }

    def do_dump(self, path: str) -> list[tuple[str, int]]:
        world = self._held()
        parts = [(name, flat(world.tensor(name)).tobytes()) for name in self._mine()]
        Path(path).write_bytes(b"".join(data for _, data in parts))
        return [(name, len(data)) for name, data in parts]

    def do_poke(self, name: str, offset: int, hex: str) -> None:  # noqa: A002 - a field of the command
        data = bytes.fromhex(hex)
        owner = self.world or self.standby
        if owner is None:
            raise LookupError("this actor has no memory")
        flat(owner.tensor(name))[offset : offset + len(data)] = list(data)

    def do_revise(self, **change: Any) -> dict[str, Any]:
        self._held().revise(**change)
        return self.do_about()

    def do_close(self) -> None:
        self.running = False
        for owner in (self.world, self.standby):
            if owner is not None:
                owner.close()
        self.world = self.standby = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Does one command."""
        number, what = command.pop("number"), command.pop("do")
        try:
            return {"number": number, "ok": getattr(self, f"do_{what}")(**command)}
        except SessionMoved as moved:
            where = {"destination": moved.destination, "endpoint": moved.endpoint}
            return {"number": number, "error": "session-moved", "message": str(moved), "details": where}
        except WorldMoveError as error:
            details = json.loads(json.dumps(error.details, default=repr))
            return {"number": number, "error": error.code, "message": error.message, "details": details}
        except (LookupError, TypeError, ValueError, OSError) as error:
            return {"number": number, "error": "actor", "message": repr(error), "details": {}}

    def free_block(self) -> dict[str, Any] | None:
        """One block of free generation; the news, if it was the last one."""
        world = self._held()
        try:
            self.step()
        except SessionMoved as moved:
            self.running = False
            where = {"destination": moved.destination, "endpoint": moved.endpoint}
            return {"event": "moved", "block": world.block_number, **where}
        except SessionEndedError as ended:
            self.running = False
            return {"event": "ended", "block": world.block_number, "reason": ended.message}
        except WorldMoveError as error:
            self.running = False
            return {
                "event": "failed",
                "block": world.block_number,
                "reason": f"{error.code}: {error.message}",
            }
        return None


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Ends with its parent, whose end of the pipe closes."""
    stack = Stack(sys.argv[1])
    commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line)
        commands.put(None)

    end_with_parent(int(sys.argv[2]))
    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = commands.get(block=not stack.running)
        except queue.Empty:
            news = stack.free_block()
            if news is not None:
                say(news)
            continue
        if line is None:
            return
        say(stack.answer(json.loads(line)))


if __name__ == "__main__":
    main()
