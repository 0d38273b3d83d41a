"""The host's executor: digests, copies and wipes host memory, in a process of its own.

`python -m worldmove.executor.host --fd N --parent PID --nice N`; see `serving` for how it runs.
"""

from __future__ import annotations

import mmap
import sys
from functools import partial

from worldmove.errors import NoMemoryError, TransportError, ValidationError
from worldmove.executor.messages import (
    Attach,
    Copy,
    Detach,
    Digest,
    Done,
    Failed,
    Fill,
    Hash,
    Reply,
    Request,
    Shift,
)
from worldmove.executor.serving import Answer, Tasks, options, prepare, run, serve
from worldmove.ipc import close_all, map_shared
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
            case Digest():
                self._digest(request)
            case Copy(_, pieces) | Shift(_, pieces, _):
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


def _work(tasks: Tasks, answer: Answer) -> None:
    bench = Bench()
    while True:
        request, fds = tasks.get()
        try:
            reply: Reply = bench.perform(request, fds)
        except NoMemoryError as error:
            reply = Failed(request.call, error.message, error.details)
        except (ValidationError, TransportError) as error:
            reply = Failed(request.call, error.message)
        except (TypeError, ValueError, BufferError, MemoryError) as error:
            reply = Failed(request.call, f"{type(error).__name__}: {error}")
        close_all(fds)
        answer(reply, ())


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`."""
    given = options("worldmove.executor.host").parse_args(argv)
    prepare(given)
    return run(given, partial(serve, _work))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
