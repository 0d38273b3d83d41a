"""What a node and its executors say to each other (packets of `worldmove.ipc`).

Every request carries a number that its answer repeats. An executor performs requests in the order of
their arrival. Memory is named by keys that the node chose when it attached it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Piece(NamedTuple):
    """Bytes to digest.

    Attributes:
        key: memory, as `ExecutorPool.attach` named it.
        offset: first byte; a leaf begins there.
        length: bytes; not a multiple of `leaf_bytes` only where the last leaf is short.
        leaf_bytes: size of a leaf.
        first_leaf: index in the leaf table of the leaf at `offset`; the others follow.
    """

    key: int
    offset: int
    length: int
    leaf_bytes: int
    first_leaf: int

    @property
    def leaves(self) -> int:
        """Number of leaves, the short one included."""
        return -(-self.length // self.leaf_bytes)


class Room(NamedTuple):
    """Bytes of attached memory that are free to be used."""

    key: int
    offset: int
    nbytes: int


Order = bool | Room
"""Whether copies depend on their order; a room says so, too, and is what a GPU may use meanwhile."""


class CopyPiece(NamedTuple):
    """Bytes to copy: `length` bytes at `source_offset` of `source_key` go to `offset` of `key`."""

    source_key: int
    source_offset: int
    key: int
    offset: int
    length: int


class Stop(NamedTuple):
    """How a world that stands is seen in its control page, in indices of 64-bit words.

    Attributes:
        key: the page, attached as `watched`.
        pause_at: says at which block ranks are to stop.
        ranks: for each rank, the words that say its progress (twice its block, at a boundary) and its state.
        stopped: the state of a rank that stands.
    """

    key: int
    pause_at: int
    ranks: tuple[tuple[int, int], ...]
    stopped: int


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Map the descriptor that came along: a memory file, or with `device` memory of a GPU.

    With `watched` it is a control page, which the executor only looks at, for `Armed`.
    """

    call: int
    key: int
    nbytes: int
    writable: bool
    device: bool = False
    watched: bool = False


class Detach(msgspec.Struct, tag="detach", frozen=True):
    """Unmap."""

    call: int
    key: int


class Digest(msgspec.Struct, tag="digest", frozen=True):
    """Write the digests of all leaves of `pieces` into the leaf table `table`."""

    call: int
    table: int
    seed: int
    pieces: tuple[Piece, ...]


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """These very `pieces` will be digested soon, and perhaps copied into just before: be ready for it."""

    call: int
    pieces: tuple[Piece, ...]


class Copy(msgspec.Struct, tag="copy", frozen=True):
    """Copy, piece by piece; within one piece source and target may overlap."""

    call: int
    pieces: tuple[CopyPiece, ...]


class Shift(msgspec.Struct, tag="shift", frozen=True):
    """Copy within one memory, one piece after the other: it may read what the ones before have written.

    `scratch`: what a GPU may use meanwhile.
    """

    call: int
    pieces: tuple[CopyPiece, ...]
    scratch: Room | None = None


class Land(msgspec.Struct, tag="land", frozen=True):
    """Copy `pieces`, and when they are there digest `read` into the leaf table `table`."""

    call: int
    pieces: tuple[CopyPiece, ...]
    table: int
    seed: int
    read: tuple[Piece, ...]


class Armed(msgspec.Struct, tag="armed", frozen=True):
    """Do `work`, of the same `call`, as soon as a world stands, which is seen by `stop`.

    The answer's `sizes` are the block at which it stood and the time when that was seen (CLOCK_MONOTONIC,
    ns); there are none where `Release` let it begin.
    """

    call: int
    stop: Stop
    work: Digest | Land


class Release(msgspec.Struct, tag="release", frozen=True):
    """What is armed for page `key` and has not begun: begins now, or with `begin` false not at all."""

    call: int
    key: int
    begin: bool


class Fill(msgspec.Struct, tag="fill", frozen=True):
    """Set the bytes of each (offset, length) in `ranges` to `byte`."""

    call: int
    key: int
    byte: int
    ranges: tuple[tuple[int, int], ...]


class Hash(msgspec.Struct, tag="hash", frozen=True):
    """BLAKE2b-256 of the digests `first` to `first + count - 1` of a leaf table, for each range."""

    call: int
    table: int
    ranges: tuple[tuple[int, int], ...]


class Allocate(msgspec.Struct, tag="allocate", frozen=True):
    """Make device memory of zero bytes; the answer brings its descriptor."""

    call: int
    nbytes: int


class Measure(msgspec.Struct, tag="measure", frozen=True):
    """How much memory has the device? The answer's `sizes` are the free and the total bytes."""

    call: int


class Reach(msgspec.Struct, tag="reach", frozen=True):
    """Can the device map memory of these GPUs? The answer's `sizes` are `HIDDEN`, `NO_ACCESS` or `OPEN`."""

    call: int
    devices: tuple[str, ...]


HIDDEN, NO_ACCESS, OPEN = range(3)
"""The executor does not see the GPU; it does, and its device has no peer access to it; it has."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The first message of an executor: it takes requests."""

    pid: int


class Done(msgspec.Struct, tag="done", frozen=True):
    """Call `call` is done; `digests` answers `Hash`, `sizes` `Measure`, `Reach` and `Armed`.

    `fds` are descriptors that came along, as the receiver knows them: they never travel as numbers.
    """

    call: int
    digests: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    fds: tuple[int, ...] = ()


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Call `call` could not be done, and did nothing or only a part.

    `short_of`: what was needed and what there was, where something lacked (`NoMemoryError.details`).
    """

    call: int
    reason: str
    short_of: dict[str, int] | None = None


Request = (
    Attach
    | Detach
    | Digest
    | Prepare
    | Copy
    | Shift
    | Land
    | Armed
    | Release
    | Fill
    | Hash
    | Allocate
    | Measure
    | Reach
)
Reply = Ready | Done | Failed
