"""The reference: one plain TCP stream over loopback, from whole memory to whole memory.

Two processes, each with a populated memory file, as two lanes have. The sender gives `sendall` all bytes
at once; the receiver takes what comes, up to 4 MiB a call, straight into place. Socket buffers are the
kernel's own, which it tunes; setting them by hand made it slower. Nothing is framed, checked or digested.

    python -m worldmove.bench.raw send|receive SOCKET_FD MEMORY_FD NBYTES

The sender reads a line of its standard input for every run and answers with the seconds it took, until the
last byte was in the receiver's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from types import TracebackType

from worldmove.errors import ProcessLostError
from worldmove.ipc import map_shared

RECEIVE_BYTES = 4 * 1024 * 1024
START_TIMEOUT_S = 60.0


class RawStream:
    """Both processes and the stream between them; an asynchronous context manager.

    Args:
        source_fd: memory file that is read; at least `nbytes` long.
        destination_fd: memory file that is written; at least `nbytes` long.
        nbytes: bytes of one run.
    """

    def __init__(self, source_fd: int, destination_fd: int, nbytes: int) -> None:
        self._fds = (source_fd, destination_fd)
        self._nbytes = nbytes
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> RawStream:
        with contextlib.ExitStack() as stack:
            sender, receiver = (stack.enter_context(end) for end in _connected())
            try:
                self._processes.append(await self._start("receive", receiver, self._fds[1]))
                self._processes.append(await self._start("send", sender, self._fds[0]))
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._answer()
            except BaseException:
                await self._end()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _start(self, role: str, end: socket.socket, memory: int) -> asyncio.subprocess.Process:
        arguments = [role, str(end.fileno()), str(memory), str(self._nbytes)]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "worldmove.bench.raw",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(end.fileno(), memory),
            start_new_session=True,
        )

    async def run(self) -> float:
        """Carries all bytes once and returns the seconds it took.

        Raises:
            ProcessLostError: one of the processes ended.
        """
        stdin = self._processes[1].stdin
        if stdin is None:
            raise ProcessLostError("the sender has no standard input")
        stdin.write(b"\n")
        return float(await self._answer())

    async def _answer(self) -> bytes:
        stdout = self._processes[1].stdout
        line = await stdout.readline() if stdout is not None else b""
        if not line:
            raise ProcessLostError("the sender of the raw stream ended")
        return line

    async def _end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        await asyncio.shield(asyncio.gather(*(process.communicate() for process in self._processes)))
        self._processes.clear()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    return sender, receiver


def _send(stream: socket.socket, memory: memoryview) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        start = time.perf_counter()
        stream.sendall(memory)
        if stream.recv(1) != b"k":
            return
        sys.stdout.write(f"{time.perf_counter() - start!r}\n")
        sys.stdout.flush()


def _receive(stream: socket.socket, memory: memoryview) -> None:
    while True:
        landed = 0
        while landed < len(memory):
            count = stream.recv_into(memory[landed : landed + RECEIVE_BYTES])
            if count == 0:
                return
            landed += count
        stream.sendall(b"k")


def main(arguments: list[str]) -> None:
    """One side, in its own process; returns when the other side or the parent has gone."""
    role, socket_fd, memory_fd, size = arguments
    with (
        socket.socket(fileno=int(socket_fd)) as stream,
        map_shared(int(memory_fd), int(size), writable=role == "receive", populate=True) as mapping,
        memoryview(mapping) as memory,
        contextlib.suppress(ConnectionError),
    ):
        os.close(int(memory_fd))
        stream.setblocking(True)
        (_send if role == "send" else _receive)(stream, memory[: int(size)])


if __name__ == "__main__":
    main(sys.argv[1:])
