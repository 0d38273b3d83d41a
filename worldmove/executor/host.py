"""The host's executor: digests, copies and wipes host memory, in a process of its own.

`python -m worldmove.executor.host --fd N --parent PID --nice N`; see `serving` for how it runs.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Sequence

from worldmove.errors import (
    ConnectionLostError,
    FramingError,
    NoMemoryError,
    TransportError,
    ValidationError,
)
from worldmove.executor.messages import (
    Attach,
    Copy,
    CopyPiece,
    Detach,
    Digest,
    Done,
    Failed,
    Fill,
    Hash,
    Land,
    Piece,
    Ready,
    Reply,
    Request,
    Shift,
)
from worldmove.executor.serving import options, prepare
from worldmove.ipc import SyncChannel, close_all, map_shared
from worldmove.kernels.leaf_digest import DIGEST_BYTES, digest_leaves, hash_bytes, leaf_count

FILL_BYTES = 256 * 1024


class Bench:
    """The memory that is mapped here, and what can be done with it. Used by one thread only."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def perform(self, request: Request, fds: list[int]) -> Done:
        """Does what is asked.

        Raises:
            ValidationError: it names memory that isn't attached, or bytes outside of it.
            TransportError: a descriptor can't be mapped.
            NoMemoryError: descriptors or address space do not suffice for that.
        """
        match request:
            case Attach(_, key, nbytes, writable, device):
                if device:
                    raise ValidationError("a GPU's memory cannot be mapped by the host", field="device")
                self._attach(key, fds, nbytes, writable=writable)
            case Detach(_, key):
                self._detach(key)
            case Digest(_, table, seed, pieces):
                self._digest(pieces, table, seed)
            case Copy(_, moves) | Shift(_, moves, _):
                self._copy(moves)
            case Land(_, moves, table, seed, pieces):
                self._copy(moves)
                self._digest(pieces, table, seed)
            case Fill():
                self._fill(request)
            case Hash(_, table, ranges):
                views = [
                    self._view(table, first * DIGEST_BYTES, count * DIGEST_BYTES) for first, count in ranges
                ]
                return Done(request.call, tuple(hash_bytes(view) for view in views))
            case _:
                raise ValidationError(f"host memory knows no {type(request).__name__}", field="request")
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

    def _copy(self, moves: Sequence[CopyPiece]) -> None:
        for move in moves:
            target = self._view(move.key, move.offset, move.length)
            target[:] = self._view(move.source_key, move.source_offset, move.length)

    def _digest(self, pieces: Sequence[Piece], table: int, seed: int) -> None:
        for piece in pieces:
            leaves = leaf_count(piece.length, piece.leaf_bytes)
            with (
                self._view(piece.key, piece.offset, piece.length) as view,
                self._view(table, piece.first_leaf * DIGEST_BYTES, leaves * DIGEST_BYTES) as out,
            ):
                digest_leaves(view, piece.leaf_bytes, seed, out)

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


def _answer(bench: Bench, request: Request, fds: list[int]) -> Reply:
    """Does what is asked; what was wrong with it is an answer, too."""
    try:
        return bench.perform(request, fds)
    except NoMemoryError as error:
        return Failed(request.call, error.message, error.details)
    except (ValidationError, TransportError) as error:
        return Failed(request.call, error.message)
    except (TypeError, ValueError, BufferError, MemoryError) as error:
        return Failed(request.call, f"{type(error).__name__}: {error}")


def serve(channel: SyncChannel[Request]) -> None:
    """Does one request after the other; to pass them between threads takes longer than a small one.

    Raises:
        ConnectionLostError: the node is gone.
        FramingError: what it sent is no request.
    """
    bench = Bench()
    channel.send(Ready(os.getpid()))
    while (received := channel.receive()) is not None:
        request, fds = received
        reply = _answer(bench, request, fds)
        close_all(fds)
        channel.send(reply)


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`, until that closes."""
    given = options("worldmove.executor.host").parse_args(argv)
    prepare(given)
    try:
        serve(SyncChannel(socket.socket(fileno=given.fd), Request))
    except ConnectionLostError:
        return 0
    except FramingError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
