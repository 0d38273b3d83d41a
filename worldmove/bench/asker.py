"""A client that asks a node everything, in a process of its own, for `worldmove bench scale`.

    python -m worldmove.bench.asker SESSIONS PARENT

A line of stdin with a node's URL begins, the next one ends it: then all answers stand in one line of JSON on
stdout. Ends when stdin closes, or with its parent. What else a benchmark does in its own process would
otherwise count as the node's time to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import msgspec
import uvloop

from worldmove.bench.questions import Asked, ask
from worldmove.errors import ProcessLostError, WorldMoveError
from worldmove.executor.serving import end_with_parent

LONGEST_LINE = 64 << 20
"""Bytes of an answer's line; an answer that is timed takes some 40 bytes in it."""


class Asker:
    """The other process, as the benchmark holds it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @contextlib.asynccontextmanager
    async def asking(self, url: str) -> AsyncIterator[list[Asked]]:
        """Asks the node at `url` while the block runs; the list is full after it.

        Raises:
            ProcessLostError: a question had no good answer, or the process is gone.
        """
        asked: list[Asked] = []
        self._say(url)
        try:
            yield asked
        finally:
            self._say("stop")
            asked += await asyncio.shield(self._heard())

    def _say(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def _heard(self) -> list[Asked]:
        stdout = self._process.stdout
        line = await stdout.readline() if stdout is not None else b""
        if not line:
            raise ProcessLostError("the asking client of the benchmark failed")
        return msgspec.json.decode(line, type=list[Asked])


@contextlib.asynccontextmanager
async def asker(sessions: int) -> AsyncIterator[Asker]:
    """A client that asks, among others, for one of as many sessions, `idle-00000` and on."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worldmove.bench.asker", str(sessions), str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    try:
        yield Asker(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.shield(process.wait())


def names_of(sessions: int) -> list[str]:
    """The ids of the sessions that nobody generates."""
    return [f"idle-{number:05}" for number in range(sessions)]


async def _serve(sessions: int) -> None:
    while url := (await asyncio.to_thread(sys.stdin.readline)).strip():
        over = asyncio.Event()
        asking = asyncio.create_task(ask(url, names_of(sessions), over))
        await asyncio.to_thread(sys.stdin.readline)
        over.set()
        sys.stdout.write(msgspec.json.encode(await asking).decode() + "\n")
        sys.stdout.flush()


def main(sessions: int, parent: int) -> int:
    """Asks until stdin closes; returns the exit code."""
    end_with_parent(parent)
    try:
        uvloop.run(_serve(sessions))
    except WorldMoveError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
