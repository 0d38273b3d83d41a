"""The soak's nodes: `worldmove serve` as processes, killed by faults, started again at their address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from worldmove.bench.processes import descendants
from worldmove.client import AsyncClient
from worldmove.errors import ProcessLostError
from worldmove.soak.world import HOST

MARK = "SOAK_MARK"
START_S = 60.0
END_S = 20.0
OPTIONS = (
    *("--faults", "arm", "--executors", "1", "--log-level", "info"),
    *("--peer-timeout-ms", "1500", "--stall-ms", "1500", "--deadline-ms", "6000"),
    *("--gate-rate", "1Gbit", "--register-rate", "0", "--move-rate", "0", "--memory-limit", "1GB"),
)
ON_GPUS = ("--path", "direct", "--direct-ring", "512MiB", "--direct-min-gbps", "0")
"""One direct lane is there from the beginning, so that its ring is no growth; whatever UCX finds is taken."""


class SoakNode:
    """One node; it keeps its name, address and folder over all its lives.

    Attributes:
        client: of its REST interface.
        device: on which its worlds lie.
        run_dir: folder of its sockets. log: file of its stderr, over all lives.
        life: how often it was started.
    """

    def __init__(self, name: str, folder: Path, mark: str, device: str = HOST) -> None:
        self.name = name
        self.device = device
        self.run_dir = folder / name
        self.log = folder / f"{name}.log"
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.client = AsyncClient(self.url, timeout=10.0)
        self.life = 0
        self._ledger = f"sqlite:///{folder / 'ledger.db'}"
        self._environment = os.environ | {MARK: mark}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of its process; 0 if there is none."""
        return self._process.pid if self._process is not None and self.alive else 0

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it; returns when it answers.

        Raises:
            ProcessLostError: it does not; the end of its log stands in the message.
        """
        self.life += 1
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as ours, os.fdopen(writer, "wb") as theirs, self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worldmove", "serve", "--name", self.name),
                *("--http", self.url.removeprefix("http://"), "--run-dir", str(self.run_dir)),
                *("--ledger", self._ledger, "--ready-fd", str(theirs.fileno()), *OPTIONS),
                *(("--gpus", "none") if self.device == HOST else ("--gpus", self.device, *ON_GPUS)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,
            )
            theirs.close()
            if not await _first_line(ours.fileno()):
                raise ProcessLostError(f"node {self.name} does not answer:\n{self.tail()}")

    def lines(self) -> list[bytes]:
        """Its log, over all lives."""
        return self.log.read_bytes().splitlines() if self.log.exists() else []

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def thaw(self) -> list[int]:
        """Of this node and its children: those that are stopped."""
        return [pid for pid in descendants([self.pid]) if stopped(pid)] if self.pid else []

    async def end(self, *, at_once: bool = False) -> None:
        """Ends it, by SIGTERM unless `at_once`."""
        await self.client.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        for pid in self.thaw():
            send(pid, signal.SIGCONT)
        send(process.pid, signal.SIGKILL if at_once else signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            send(process.pid, signal.SIGKILL)
            await process.wait()


def stopped(pid: int) -> bool:
    """Whether a process stands, by SIGSTOP."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


def send(pid: int, number: signal.Signals) -> None:
    """Signals a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def marked(mark: str) -> list[int]:
    """Living processes that the soak with this mark has started, by whatever way."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _first_line(fd: int) -> bytes:
    """The line that a node writes when it answers; empty if it ends before, or says nothing in time."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(START_S):
            await readable.wait()
    except TimeoutError:
        return b""
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 4096)
