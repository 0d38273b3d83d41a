"""What the programs of executors have in common.

Each ends when its control socket closes, and with its node.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from worldmove.errors import FramingError
from worldmove.executor.messages import Request
from worldmove.ipc import Channel

_PR_SET_PDEATHSIG = 1


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


def run(given: argparse.Namespace, program: Callable[[Channel[Request]], Coroutine[Any, Any, None]]) -> int:
    """Runs `program` on the inherited socket until that closes, and ends the process; returns on an error."""
    channel: Channel[Request] = Channel(socket.socket(fileno=given.fd), Request)
    try:
        uvloop.run(program(channel))
    except FramingError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error}\n")
        return 1
    os._exit(0)
