"""Real nodes for a benchmark: `worldmove serve` as processes, on free ports, with a ledger of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from worldmove.errors import ProcessLostError

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


class RunningNode(NamedTuple):
    """A node that answers at `url`; `pid` is its process. It was started in `folder`, with `options`.

    `python` is its interpreter, and with it the version of the code.
    """

    name: str
    url: str
    pid: int
    folder: Path
    options: tuple[str, ...]
    python: str = sys.executable


@contextlib.asynccontextmanager
async def running_nodes(
    names: Sequence[str],
    options: Sequence[str] = (),
    each: Mapping[str, Sequence[str]] | None = None,
    logs: Path | None = None,
    within: Mapping[str, Sequence[str]] | None = None,
    *,
    python: str = sys.executable,
) -> AsyncIterator[list[RunningNode]]:
    """Starts nodes that share a ledger, and ends them, with every trace of them, when the block ends.

    Args:
        names: one node each.
        options: more options of `worldmove serve`, the same for all.
        each: more options by node.
        logs: a folder in which the nodes' logs are left.
        within: by node, what stands before its command and becomes it, such as `ip netns exec HOST`.
        python: the interpreter that runs them; that of another checkout runs its code.

    Raises:
        ProcessLostError: one did not answer; the last line of its log stands in the message.
    """
    folder = Path(tempfile.mkdtemp(prefix="wm-bench-"))
    processes: list[asyncio.subprocess.Process] = []
    try:
        own, before = each or {}, within or {}
        starts = [
            _start(
                name, folder, [*options, *own.get(name, ())], before.get(name, ()), processes, python=python
            )
            for name in names
        ]
        yield await asyncio.gather(*starts)
    finally:
        await asyncio.shield(_end_all(processes, folder, logs))


@contextlib.asynccontextmanager
async def restarted(node: RunningNode) -> AsyncIterator[RunningNode]:
    """Ends a node as an upgrade does, starts it again under its name, and ends it when the block ends.

    Raises:
        ProcessLostError: as `running_nodes`.
    """
    processes: list[asyncio.subprocess.Process] = []
    await _ended(node.pid)
    try:
        yield await _start(node.name, node.folder, node.options, (), processes, python=node.python)
    finally:
        await asyncio.shield(_end(processes))


async def _ended(pid: int) -> None:
    """Sends SIGTERM and returns when the process is gone."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, gone.set)
    try:
        os.kill(pid, signal.SIGTERM)
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _start(
    name: str,
    folder: Path,
    options: Sequence[str],
    before: Sequence[str],
    processes: list[asyncio.subprocess.Process],
    *,
    python: str,
) -> RunningNode:
    log = folder / f"{name}.log"
    with _descriptors(log) as (reader, writer, errors):
        process = await asyncio.create_subprocess_exec(
            *(*before, python, "-m", "worldmove", "serve", "--name", name),
            *("--http", "127.0.0.1:0", "--run-dir", str(folder / name)),
            *("--ledger", f"sqlite:///{folder / 'ledger.db'}", "--log-level", "warning"),
            *("--ready-fd", str(writer.fileno()), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(writer.fileno(),),
            start_new_session=True,
        )
        processes.append(process)
        writer.close()
        url = await _first_line(reader)
    if not url:
        raise ProcessLostError(f"node {name} does not answer; its log ends with: {_last_line(log)}")
    return RunningNode(name, url, process.pid, folder, tuple(options), python)


@contextlib.contextmanager
def _descriptors(log: Path) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes]]]:
    """Both ends of a pipe, and the file of a node's log."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as readable, os.fdopen(writer, "wb") as writable, log.open("ab") as errors:
        yield readable, writable, errors


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:500] if lines else "nothing"


async def _first_line(reader: IO[bytes]) -> str:
    """The line that a node writes when it answers; empty if it ends before, or says nothing in time.

    A short line arrives in one piece.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(reader, readable.set)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await readable.wait()
    except TimeoutError:
        return ""
    finally:
        loop.remove_reader(reader)
    return os.read(reader.fileno(), 4096).decode().strip()


async def _end_all(processes: Sequence[asyncio.subprocess.Process], folder: Path, logs: Path | None) -> None:
    await _end(processes)
    await asyncio.to_thread(_clear, folder, logs)


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        await asyncio.wait(waits, timeout=END_TIMEOUT_S)
    for process in processes:
        _signal(process, signal.SIGKILL)
    await asyncio.gather(*waits)


def _clear(folder: Path, logs: Path | None) -> None:
    """Removes the nodes' folder; their logs stay in `logs`."""
    for log in folder.glob("*.log") if logs is not None else ():
        shutil.copy(log, logs or folder)
    shutil.rmtree(folder, ignore_errors=True)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
