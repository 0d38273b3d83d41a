"""The host's executor: digests, copies and wipes host memory, in a process of its own.

`python -m worldmove.executor.host --fd N --nice N`. The event loop only moves messages; one thread does the
work, since hashing a leaf of up to 64 KiB holds the interpreter lock and would stall any loop beside it for
milliseconds. It ends when its control socket closes, and with its node.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvloop

from worldmove.errors import ConnectionLostError, FramingError, TransportError, ValidationError
from worldmove.executor.messages import (
    Attach,
    Copy,
    Detach,
    Digest,
    Done,
    Failed,
    Fill,
    Hash,
    Ready,
    Reply,
    Request,
)
from worldmove.ipc import Channel, close_all, map_shared
from worldmove.kernels.leaf_digest import DIGEST_BYTES, digest_leaves, hash_bytes, leaf_count

FILL_BYTES = 256 * 1024
SWITCH_INTERVAL_S = 0.0005
"""How long the working thread may keep the interpreter from a loop that has a message to read."""

_PR_SET_PDEATHSIG = 1


class Bench:
    """The memory that is mapped here, and what can be done with it. Used by one thread only."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def perform(self, request: Request, fds: list[int]) -> Done:
        """Does what is asked.

        Raises:
            ValidationError: it names memory that isn't attached, or bytes outside of it.
            TransportError: a descriptor can't be mapped.
        """
        match request:
            case Attach(_, key, nbytes, writable):
                self._attach(key, fds, nbytes, writable=writable)
            case Detach(_, key):
                self._detach(key)
            case Digest():
                self._digest(request)
            case Copy(_, pieces):
                for piece in pieces:
                    target = self._view(piece.key, piece.offset, piece.length)
                    target[:] = self._view(piece.source_key, piece.source_offset, piece.length)
            case Fill():
                self._fill(request)
            case Hash(_, table, ranges):
                views = [
                    self._view(table, first * DIGEST_BYTES, count * DIGEST_BYTES) for first, count in ranges
                ]
                return Done(request.call, tuple(hash_bytes(view) for view in views))
        return Done(request.call)

    def _attach(self, key: int, fds: list[int], nbytes: int, *, writable: bool) -> None:
        if len(fds) != 1 or key in self._maps:
            raise ValidationError(f"memory {key} needs one descriptor and a new key", field="key")
        try:
            self._maps[key] = map_shared(fds[0], nbytes, writable=writable, populate=True)
        except (OSError, ValueError) as error:
            raise TransportError(f"memory {key} of {nbytes} bytes cannot be mapped: {error}") from error

    def _detach(self, key: int) -> None:
        mapped = self._maps.pop(key, None)
        if mapped is not None:
            mapped.close()

    def _digest(self, request: Digest) -> None:
        for piece in request.pieces:
            leaves = leaf_count(piece.length, piece.leaf_bytes)
            with (
                self._view(piece.key, piece.offset, piece.length) as view,
                self._view(request.table, piece.first_leaf * DIGEST_BYTES, leaves * DIGEST_BYTES) as out,
            ):
                digest_leaves(view, piece.leaf_bytes, request.seed, out)

    def _fill(self, request: Fill) -> None:
        pattern = memoryview(bytes([request.byte]) * FILL_BYTES)
        for offset, length in request.ranges:
            with self._view(request.key, offset, length) as view:
                for start in range(0, length, FILL_BYTES):
                    part = view[start : start + FILL_BYTES]
                    part[:] = pattern[: len(part)]

    def _view(self, key: int, offset: int, length: int) -> memoryview:
        mapped = self._maps.get(key)
        if mapped is None:
            raise ValidationError(f"memory {key} is not attached", field="key")
        if offset < 0 or length < 0 or offset + length > len(mapped):
            raise ValidationError(
                f"bytes {offset} to {offset + length} of memory {key} with {len(mapped)}", field="offset"
            )
        return memoryview(mapped)[offset : offset + length]


def _work(tasks: queue.SimpleQueue[tuple[Request, list[int]]], answer: Callable[[Reply], object]) -> None:
    bench = Bench()
    while True:
        request, fds = tasks.get()
        try:
            reply: Reply = bench.perform(request, fds)
        except (ValidationError, TransportError) as error:
            reply = Failed(request.call, error.message)
        except (TypeError, ValueError, BufferError, MemoryError) as error:
            reply = Failed(request.call, f"{type(error).__name__}: {error}")
        close_all(fds)
        answer(reply)


async def _serve(channel: Channel[Request]) -> None:
    loop = asyncio.get_running_loop()
    tasks: queue.SimpleQueue[tuple[Request, list[int]]] = queue.SimpleQueue()
    replies: asyncio.Queue[Reply] = asyncio.Queue()

    def answer(reply: Reply) -> None:
        loop.call_soon_threadsafe(replies.put_nowait, reply)

    threading.Thread(target=_work, args=(tasks, answer), name="work", daemon=True).start()
    sending = asyncio.create_task(_send(channel, replies))
    try:
        await channel.send(Ready(os.getpid()))
        while True:
            tasks.put(await channel.receive())
    except ConnectionLostError:
        return
    finally:
        sending.cancel()


async def _send(channel: Channel[Request], replies: asyncio.Queue[Reply]) -> None:
    while True:
        await channel.send(await replies.get())


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`."""
    parser = argparse.ArgumentParser(prog="worldmove.executor.host")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args(argv)
    end_with_parent(options.parent)
    os.nice(options.nice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    channel: Channel[Request] = Channel(socket.socket(fileno=options.fd), Request)
    try:
        uvloop.run(_serve(channel))
    except FramingError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error}\n")
        return 1
    # The working thread may be deep in a copy; nobody waits for it any more.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
