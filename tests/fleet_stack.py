"""A serving stack of a fleet as its tests see it: `fleet_actor.py` at the other end of a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from fleet_node import MARK, PATIENCE_S, Node

from worldmove.manifest import Region

ACTOR = Path(__file__).with_name("fleet_actor.py")
FINGERPRINT = {"stack": "fleet tests"}
CLOSE_S = 5.0


def spec_of(regions: Sequence[Region], **more: Any) -> dict[str, Any]:
    """Arguments of `register` and `standby`: short blocks, a horizon that a loaded machine can keep."""
    base = {"block_ms": 10.0, "horizon_ms": 10_000.0, "host_state_bytes": 4096, "model": "fleet"}
    return {**base, "fingerprint": FINGERPRINT, "regions": msgspec.to_builtins(list(regions)), **more}


class ActorError(Exception):
    """What an actor met; `code` and `details` as in `worldmove.errors`, or code `session-moved`."""

    def __init__(self, code: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.details = details


class Actor:
    """A serving stack beside a node (`fleet_actor.py`); `ask` waits for an answer, `tell` gives a future.

    Attributes:
        url: of its node when it started. events: news of free generation, as they came.
    """

    def __init__(self, node: Node, folder: Path, mark: str) -> None:
        self.node = node
        self.url = node.url
        self.events: list[dict[str, Any]] = []
        self._folder = folder
        self._answers: dict[int, Future[Any]] = {}
        self._count = 0
        self._news = threading.Condition()
        self._gone = False
        self.process = subprocess.Popen(
            [sys.executable, str(ACTOR), node.url, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def tell(self, what: str, **arguments: Any) -> Future[Any]:
        """Sends a command; the future has the answer, or raises ActorError (EOFError if the actor dies)."""
        assert self.process.stdin is not None
        future: Future[Any] = Future()
        with self._news:
            self._count += 1
            number = self._count
            if self._gone:
                raise EOFError("the actor has ended")
            self._answers[number] = future
        line = {"number": number, "do": what, **msgspec.to_builtins(arguments)}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        return future

    def ask(self, what: str, **arguments: Any) -> Any:
        """Sends a command and returns the answer; raises as `tell`'s future."""
        return self.tell(what, **arguments).result(PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._news:
                if "event" in line:
                    self.events.append(line)
                    self._news.notify_all()
                    continue
                future = self._answers.pop(line["number"])
            if "error" in line:
                future.set_exception(ActorError(line["error"], line["message"], line["details"]))
            else:
                future.set_result(line["ok"])
        with self._news:
            self._gone = True
            self._news.notify_all()
            left = list(self._answers.values())
        for future in left:
            future.set_exception(EOFError("the actor has ended"))

    def event(self, kind: str) -> dict[str, Any]:
        """Waits for news of this kind and takes it out of `events`."""

        def first() -> dict[str, Any] | None:
            return next((event for event in self.events if event["event"] == kind), None)

        with self._news:
            self._news.wait_for(lambda: first() is not None or self._gone, PATIENCE_S)
            found = first()
            assert found is not None, f"no news {kind!r} from the actor at {self.node.name}: {self.events}"
            self.events.remove(found)
        return found

    def register(self, session: str | None, regions: Sequence[Region], **spec: Any) -> dict[str, Any]:
        """Registers a session; see `spec_of` for the defaults."""
        named = {} if session is None else {"id": session}
        found: dict[str, Any] = self.ask("register", **named, **spec_of(regions, **spec))
        return found

    def standby(self, regions: Sequence[Region], **spec: Any) -> dict[str, Any]:
        """Stands by; `tell("wait")` then waits for a world."""
        found: dict[str, Any] = self.ask("standby", **spec_of(regions, **spec))
        return found

    def wait_for(self, regions: Sequence[Region], **spec: Any) -> Future[Any]:
        """Stands by and waits for a world; until one has come it takes no other command."""
        self.standby(regions, **spec)
        return self.tell("wait")

    def step(self, n: int = 1) -> int:
        """Generates n blocks; returns the number of the last one."""
        block: int = self.ask("step", n=n)["block"]
        return block

    def run(self, work_ms: float = 5.0, **use: Any) -> None:
        """Generates freely, a block in `work_ms` at least."""
        self.ask("use", work_ms=work_ms, **use)
        self.ask("run")

    @property
    def block(self) -> int:
        """The last finished block."""
        block: int = self.ask("about")["block"]
        return block

    def dump(self) -> dict[str, bytes]:
        """Every byte of every region of its rank."""
        path = self._folder / f"dump-{self.pid}"
        try:
            parts = self.ask("dump", path=str(path))
            data = path.read_bytes()
        finally:
            path.unlink(missing_ok=True)
        found, at = {}, 0
        for name, length in parts:
            found[name], at = data[at : at + length], at + length
        return found

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is reaped."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def rest(self) -> bool:
        """Leaves its world or standby, ready for another test; false if it can't: then it is to be killed."""
        self.events.clear()
        if self._answers or self._gone:
            return False
        try:
            self.tell("close").result(CLOSE_S)
            self.tell("use").result(CLOSE_S)
        except (ActorError, EOFError, TimeoutError):
            return False
        return True
