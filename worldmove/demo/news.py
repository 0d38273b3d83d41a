"""What the processes of the demo tell their parent, over a packet socket (`worldmove.ipc`)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import msgspec

from worldmove.errors import ConnectionLostError, WorldMoveError
from worldmove.executor.serving import end_with_parent
from worldmove.ipc import SyncChannel


class News(msgspec.Struct, frozen=True, tag=True):
    """Base of all news."""


class Waiting(News, frozen=True, tag="waiting"):
    """A standby waits on the actor's node, its memory mapped."""


class Playing(News, frozen=True, tag="playing"):
    """The actor has the world, registered or adopted, and generates from `block` + 1 on.

    `state`: a digest of all of it as it arrived, of worlds that tell one.
    """

    block: int
    adopted: bool
    state: str = ""


class Generated(News, frozen=True, tag="generated"):
    """One block: its pictures as raw RGB, how long it took; the state's digest after it if wanted."""

    block: int
    pictures: bytes
    ms: float
    state: str = ""


class Left(News, frozen=True, tag="left"):
    """The world has gone to `destination`; the last block generated here is `block`."""

    destination: str
    block: int


class Failed(News, frozen=True, tag="failed"):
    """The actor gives up."""

    code: str
    reason: str


Any = Waiting | Playing | Generated | Left | Failed
"""Union of all news, for decoding."""


class Line:
    """The child's end: tells news."""

    def __init__(self, channel: SyncChannel[News]) -> None:
        self._channel = channel

    def tell(self, news: News) -> None:
        """Tells the parent; waits where the parent is behind.

        Raises:
            ConnectionLostError: the parent has closed.
        """
        self._channel.send(news)


@contextlib.contextmanager
def line(fd: int, parent: int) -> Iterator[Line]:
    """The line to the process `parent` on the inherited socket `fd`; ends this process with its parent.

    Our own errors are told as `Failed` and end the process with status 1; a closed line ends it quietly.
    """
    end_with_parent(parent)
    channel: SyncChannel[News] = SyncChannel(socket.socket(fileno=fd), News)
    try:
        yield Line(channel)
    except WorldMoveError as error:
        with contextlib.suppress(ConnectionLostError):
            channel.send(Failed(error.code, error.message))
            sys.exit(1)
    finally:
        channel.close()


def environment() -> dict[str, str]:
    """The environment of a world's process: BLAS on one thread, and the same bits each time from cuBLAS."""
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return os.environ | threads | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
