"""Real nodes for a benchmark: `worldmove serve` as processes, on free ports, with a ledger of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from worldmove.errors import ProcessLostError

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


class RunningNode(NamedTuple):
    """A node that answers at `url`; `pid` is its process."""

    name: str
    url: str
    pid: int


@contextlib.asynccontextmanager
async def running_nodes(
    names: Sequence[str], options: Sequence[str] = ()
) -> AsyncIterator[list[RunningNode]]:
    """Starts nodes that share a ledger, and ends them, with every trace of them, when the block ends.

    Args:
        names: one node each.
        options: more options of `worldmove serve`, the same for all.

    Raises:
        ProcessLostError: one ended before it answered; what it wrote stands on stderr.
    """
    folder = Path(tempfile.mkdtemp(prefix="wm-bench-"))
    processes: list[asyncio.subprocess.Process] = []
    try:
        yield [await _start(name, folder, options, processes) for name in names]
    finally:
        await asyncio.shield(_end_all(processes, folder))


async def _start(
    name: str, folder: Path, options: Sequence[str], processes: list[asyncio.subprocess.Process]
) -> RunningNode:
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worldmove", "serve", "--name", name),
            *("--http", "127.0.0.1:0", "--run-dir", str(folder / name)),
            *("--ledger", f"sqlite:///{folder / 'ledger.db'}", "--log-level", "warning"),
            *("--ready-fd", str(writer), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
        )
        processes.append(process)
        os.close(writer)
        writer = -1
        url = await _read_url(reader, name)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return RunningNode(name, url, process.pid)


async def _read_url(reader: int, name: str) -> str:
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    with os.fdopen(os.dup(reader), "rb", buffering=0) as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                url = (await stream.read()).decode().strip()
        except TimeoutError as error:
            raise ProcessLostError(f"node {name} does not answer after {START_TIMEOUT_S:g} s") from error
        finally:
            transport.close()
    if not url:
        raise ProcessLostError(f"node {name} ended before it answered")
    return url


async def _end_all(processes: Sequence[asyncio.subprocess.Process], folder: Path) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        await asyncio.wait(waits, timeout=END_TIMEOUT_S)
    for process in processes:
        _signal(process, signal.SIGKILL)
    await asyncio.gather(*waits)
    shutil.rmtree(folder, ignore_errors=True)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
