"""One node of a fleet as its tests see it: `worldmove serve`, ended and started as a test likes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from worldmove.client import Client
from worldmove.views import NodeView

T = TypeVar("T")

MARK = "FLEET_MARK"
PATIENCE_S = 60.0
END_S = 20.0
LOOK_S = 0.02
BASE = ("--log-level", "info", "--executors", "1")


def until(holds: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Looks until `holds()` is true and returns its value; for what no event tells."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(LOOK_S)
    return value


class Node:
    """One `worldmove serve`; can be signalled, ended, and started again under its name.

    Attributes:
        client: of its REST interface, while it runs. log: file of its stderr.
        killed: by `kill`, and not started since.
    """

    def __init__(self, name: str, folder: Path, options: Sequence[str], mark: str) -> None:
        self.name = name
        self.run_dir = folder / name
        self.log = folder / f"{name}.log"
        self.url = ""
        self.options = tuple(options)
        self.client: Client
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False
        self._ledger = f"sqlite:///{folder / 'ledger.db'}"
        self._environment = os.environ | {MARK: mark}
        self._ready: int | None = None
        self._shown = 0

    @property
    def pid(self) -> int:
        """Of the node's own process."""
        assert self.process is not None
        return self.process.pid

    def launch(self) -> Node:
        """Starts the process; `ready` waits for it."""
        self.killed = False
        self._ready, theirs = os.pipe()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "worldmove", "serve", "--name", self.name),
                    *("--http", "127.0.0.1:0", "--run-dir", str(self.run_dir), "--ledger", self._ledger),
                    *("--ready-fd", str(theirs), *BASE, *self.options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs,),
                env=self._environment,
                start_new_session=True,
            )
        os.close(theirs)
        return self

    def ready(self) -> Node:
        """Returns when the launched node answers."""
        assert self._ready is not None
        with os.fdopen(self._ready, "rb") as pipe:
            self._ready = None
            readable, _, _ = select.select([pipe], [], [], PATIENCE_S)
            self.url = os.read(pipe.fileno(), 4096).decode().strip() if readable else ""
        assert self.url, f"node {self.name} does not answer:\n{self.news()}"
        self.client = Client(self.url, timeout=PATIENCE_S)
        return self

    def start(self) -> Node:
        """Starts the node, or starts it again; returns when it answers. Its URL is a new one."""
        return self.launch().ready()

    def view(self) -> NodeView:
        """`GET /v1/node`: also the pids of executors, lanes (with their moves) and the keeper."""
        return self.client.node()

    def lanes(self, migration_id: str | None = None) -> list[int]:
        """Pids of its lanes; of one move only, if given."""
        lanes = self.view().lanes
        return [lane.pid for lane in lanes if migration_id is None or lane.migration_id == migration_id]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the node's own process."""
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is reaped. Workers and keeper live on."""
        self._end(signal.SIGKILL)
        self.killed = True

    def stop(self) -> None:
        """SIGTERM; returns when it has shut down, which must succeed. Nothing if it does not run."""
        status = self._end(signal.SIGTERM)
        assert status == 0, f"node {self.name} ended with status {status}:\n{self.news()}"

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        process, self.process = self.process, None
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            if number != signal.SIGKILL:  # that ends a stopped one, too, which must not run on until it comes
                process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"node {self.name} did not end within {END_S:g} s") from None

    def abandon(self) -> None:
        """Ends a node that never answered."""
        if self._ready is not None:
            os.close(self._ready)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def news(self) -> str:
        """What it has logged since the last call."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        found, self._shown = text[self._shown :], len(text)
        return found
