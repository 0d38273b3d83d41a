"""What the programs of executors have in common, and how one is served that works in a thread of its own.

Hashing a leaf of up to 64 KiB holds the interpreter lock and would stall any loop in its thread for
milliseconds. The program ends when its control socket closes, and with its node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from worldmove.errors import ConnectionLostError, FramingError
from worldmove.executor.messages import Ready, Reply, Request
from worldmove.ipc import Channel, close_all

SWITCH_INTERVAL_S = 0.0005
"""How long the working thread may keep the interpreter from a loop that has a message to read."""

_PR_SET_PDEATHSIG = 1

Tasks = queue.SimpleQueue[tuple[Request, list[int]]]
Answer = Callable[[Reply, Sequence[int]], object]
"""Sends a reply, from any thread; the descriptors that go with it are closed afterwards."""
Work = Callable[[Tasks, Answer], None]
"""What the working thread runs: takes requests for ever, and answers each once."""


async def serve(work: Work, channel: Channel[Request]) -> None:
    """Passes requests to `work`, which has a thread of its own, and its answers back."""
    loop = asyncio.get_running_loop()
    tasks: Tasks = queue.SimpleQueue()
    replies: asyncio.Queue[tuple[Reply, Sequence[int]]] = asyncio.Queue()

    def answer(reply: Reply, fds: Sequence[int]) -> None:
        # Straight from the working thread: a loop in between would be one more wake-up beside the digests.
        # What carries descriptors, and what the node is too far behind for, goes by the loop, which can wait.
        if not fds:
            with contextlib.suppress(ConnectionLostError, FramingError):
                channel.send_nowait(reply)
                return
        # After the loop's end nobody is told anything any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(replies.put_nowait, (reply, fds))

    def working() -> None:
        try:
            work(tasks, answer)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            # Nobody works here any more: another process has to.
            os._exit(1)

    threading.Thread(target=working, name="work", daemon=True).start()
    sending = asyncio.create_task(_send(channel, replies))
    try:
        await channel.send(Ready(os.getpid()))
        while True:
            tasks.put(await channel.receive())
    except ConnectionLostError:
        return
    finally:
        sending.cancel()


async def _send(channel: Channel[Request], replies: asyncio.Queue[tuple[Reply, Sequence[int]]]) -> None:
    while True:
        reply, fds = await replies.get()
        try:
            await channel.send(reply, fds)
        finally:
            close_all(fds)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def options(program: str) -> argparse.ArgumentParser:
    """The options that every executor has."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    return parser


def prepare(given: argparse.Namespace) -> None:
    """Makes this process an executor: tied to its node, polite, with room for descriptors."""
    end_with_parent(given.parent)
    os.nice(given.nice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def run(given: argparse.Namespace, program: Callable[[Channel[Request]], Coroutine[Any, Any, None]]) -> int:
    """Runs `program` on the inherited socket until that closes, and ends the process; returns on an error."""
    channel: Channel[Request] = Channel(socket.socket(fileno=given.fd), Request)
    try:
        uvloop.run(program(channel))
    except FramingError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error}\n")
        return 1
    # The working thread may be deep in a copy; nobody waits for it any more.
    os._exit(0)
