"""The control page: a few words of shared memory between a node and the ranks of one session.

A worker publishes its block with one store and looks at `pause_at` with one load, so a boundary that
nobody waits for costs microseconds. `docs/worker-protocol.md` has the same layout as a C header; all
words are unsigned 64-bit, little endian, naturally aligned.

    0                     header
    4096                  rank 0: words, then at +4096 host-state slot 0, then slot 1
    4096 + rank_stride    rank 1 ...

Publishing and pausing is Dekker's exchange: the worker stores its block and then loads `pause_at`, the
node stores `pause_at` and then loads every block, each with a full fence between. So either the worker
sees the pause or the node sees the block, and picks a later one.
"""

from __future__ import annotations

import fcntl
import os
import struct
from enum import IntEnum
from typing import Final

from worldmove.errors import ConflictError, FramingError, ManifestError, ValidationError
from worldmove.ipc import sealed_memfd
from worldmove.manifest import MAX_HOST_STATE, MAX_RANKS
from worldmove.mapping import SharedMapping
from worldmove.page.fence import make_fence

MAGIC: Final = 0x3130_4547_4150_4D57
"""The bytes `WMPAGE01`."""
VERSION: Final = 1
HEADER_BYTES: Final = 4096
RANK_BYTES: Final = 4096
NEVER: Final = (1 << 64) - 1
"""`pause_at` while no pause is wanted; a slot's block while it holds nothing."""
MAX_BLOCK: Final = (1 << 62) - 1
MARKS: Final = 1
"""Flag of a rank: its worker marks blocks with the writing bit, so a death between blocks is visible."""

_WORD: Final = 8
_FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock` of fcntl(2) on 64-bit Linux."""
_MAGIC, _VERSION, _RANKS, _HOST_STATE, _STRIDE, _INCARNATION, _EPOCH, _REVISION = range(8)
PAUSE_AT: Final = 128 // _WORD
PROGRESS: Final = 0
FLAGS: Final = 1
STATE: Final = 64 // _WORD
STOPPED_NS: Final = 72 // _WORD
SLOTS: Final = 128 // _WORD
REVISIONS: Final = 192 // _WORD
_SESSION_LENGTH: Final = 256 // _WORD
_SESSION: Final = 264
MAX_SESSION_ID: Final = 256
"""Bytes of UTF-8."""


class RankState(IntEnum):
    """What a rank says of itself in the page."""

    VACANT = 0
    RUNNING = 1
    STOPPED = 2


def slot_capacity(host_state_bytes: int) -> int:
    """Bytes that one host-state slot takes in the page: whole memory pages."""
    return -(-host_state_bytes // 4096) * 4096


def page_bytes(ranks: int, host_state_bytes: int) -> int:
    """Size in bytes of a control page."""
    return HEADER_BYTES + ranks * (RANK_BYTES + 2 * slot_capacity(host_state_bytes))


def create_page(ranks: int, host_state_bytes: int, *, incarnation: int, epoch: int) -> int:
    """A new page as a sealed memfd, all ranks vacant at block 0, no pause wanted.

    Raises:
        ManifestError: ranks or host state are out of range.
    """
    if not 1 <= ranks <= MAX_RANKS or not 0 <= host_state_bytes <= MAX_HOST_STATE:
        raise ManifestError(f"no page for {ranks} ranks with {host_state_bytes} bytes of host state")
    fd = sealed_memfd("worldmove-page", page_bytes(ranks, host_state_bytes))
    try:
        format_page(fd, 0, ranks, host_state_bytes, incarnation=incarnation, epoch=epoch)
    except BaseException:
        os.close(fd)
        raise
    return fd


def format_page(
    fd: int, offset: int, ranks: int, host_state_bytes: int, *, incarnation: int, epoch: int
) -> None:
    """Makes a new page of `page_bytes` zeros of a memory file, from `offset` (bytes) on."""
    mapping = SharedMapping(fd, page_bytes(ranks, host_state_bytes), offset)
    try:
        with mapping.view.cast("Q") as words:
            stride = RANK_BYTES + 2 * slot_capacity(host_state_bytes)
            for rank in range(ranks):
                base = (HEADER_BYTES + rank * stride) // _WORD
                words[base + SLOTS] = words[base + SLOTS + 2] = NEVER
            words[PAUSE_AT] = NEVER
            words[_VERSION : _REVISION + 1] = memoryview(
                b"".join(
                    value.to_bytes(_WORD, "little")
                    for value in (VERSION, ranks, host_state_bytes, stride, incarnation, epoch, 1)
                )
            ).cast("Q")
            words[_MAGIC] = MAGIC
    finally:
        mapping.close()


def open_own(fd: int) -> int:
    """A new opening of a page that came over a socket, so that its locks are this process's own.

    Raises:
        FramingError: the system refuses.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise FramingError(f"cannot open the control page again: {error}") from error


class ControlPage:
    """One mapping of a control page; both sides use it, each writes only its own words.

    The node writes the header, the worker of a rank its rank's area (for a vacant rank, the node does).
    Values that the other side wrote are bounded before use.
    """

    def __init__(self, fd: int, offset: int = 0, nbytes: int | None = None) -> None:
        """Maps the page; `fd` stays the caller's, who keeps it open as long as this.

        Args:
            fd: of the memory file.
            offset: at which the page begins in it, in bytes.
            nbytes: its size; all of the file if left out.

        Raises:
            FramingError: it is no control page of this version, or its sizes contradict one another.
        """
        size = os.fstat(fd).st_size if nbytes is None else nbytes
        if size < HEADER_BYTES:
            raise FramingError(f"a control page has at least {HEADER_BYTES} bytes, this one {size}")
        self._fd = fd
        self._offset = offset
        self._mapping = SharedMapping(fd, size, offset)
        self._raw = self._mapping.view
        self.words = self._raw.cast("Q")
        self.fence = make_fence()
        self.ranks = self.words[_RANKS]
        self.host_state_bytes = self.words[_HOST_STATE]
        self._capacity = slot_capacity(min(self.host_state_bytes, MAX_HOST_STATE))
        self._stride = RANK_BYTES + 2 * self._capacity
        if not self._sound(size):
            self.close()
            raise FramingError("the control page has another magic, version or size than expected")

    def _sound(self, size: int) -> bool:
        return (
            (self.words[_MAGIC], self.words[_VERSION]) == (MAGIC, VERSION)
            and 1 <= self.ranks <= MAX_RANKS
            and self.host_state_bytes <= MAX_HOST_STATE
            and self.words[_STRIDE] == self._stride
            and size == page_bytes(self.ranks, self.host_state_bytes)
        )

    def close(self) -> None:
        """Unmaps the page; further use raises `ValueError`."""
        self.words.release()
        self._mapping.close()

    @property
    def incarnation(self) -> int:
        """Incarnation of the node that made this page."""
        return self.words[_INCARNATION]

    @property
    def epoch(self) -> int:
        """The session's epoch; 0 for a standby."""
        return self.words[_EPOCH]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.words[_EPOCH] = value

    @property
    def session_id(self) -> str | None:
        """The session that lies here; `None` for a standby."""
        size = min(self.words[_SESSION_LENGTH], MAX_SESSION_ID)
        return bytes(self._raw[_SESSION : _SESSION + size]).decode(errors="replace") if size else None

    @session_id.setter
    def session_id(self, value: str | None) -> None:
        data = (value or "").encode()
        if len(data) > MAX_SESSION_ID:
            raise ValidationError(
                f"id has {len(data)} bytes of UTF-8; at most {MAX_SESSION_ID} are allowed", field="id"
            )
        self.words[_SESSION_LENGTH] = 0
        self._raw[_SESSION : _SESSION + len(data)] = data
        self.words[_SESSION_LENGTH] = len(data)

    @property
    def revision(self) -> int:
        """Revision of the manifest that the node knows."""
        return self.words[_REVISION]

    @revision.setter
    def revision(self, value: int) -> None:
        self.words[_REVISION] = value

    @property
    def pause_at(self) -> int:
        """The block from which on every rank stops; `NEVER` while no pause is wanted."""
        return self.words[PAUSE_AT]

    @pause_at.setter
    def pause_at(self, block: int) -> None:
        self.words[PAUSE_AT] = block

    def base(self, rank: int) -> int:
        """Index in `words` at which a rank's area begins."""
        return (HEADER_BYTES + rank * self._stride) // _WORD

    def block(self, rank: int) -> int:
        """The last block that the rank published."""
        return self.words[self.base(rank) + PROGRESS] >> 1

    def progress(self, rank: int) -> int:
        """Block and writing mark as one number, which grows as the rank goes on."""
        return self.words[self.base(rank) + PROGRESS]

    def writing(self, rank: int) -> bool:
        """Whether the rank is inside `block()`: its state is that of no boundary."""
        return bool(self.words[self.base(rank) + PROGRESS] & 1)

    def marks(self, rank: int) -> bool:
        """Whether the rank's worker marks blocks, so that `writing` can be relied on."""
        return bool(self.words[self.base(rank) + FLAGS] & MARKS)

    def state(self, rank: int) -> RankState:
        """What the rank says of itself; an unknown value counts as running."""
        value = self.words[self.base(rank) + STATE]
        return RankState(value) if value in (0, 2) else RankState.RUNNING

    def revisions(self, rank: int) -> int:
        """How many revisions of the rank's worker the node has taken in and written down."""
        return self.words[self.base(rank) + REVISIONS]

    def set_revisions(self, rank: int, count: int) -> None:
        """Node: so many revisions of the rank are safe with it."""
        self.words[self.base(rank) + REVISIONS] = count

    def stopped_ns(self, rank: int) -> int:
        """CLOCK_MONOTONIC of this host, in ns, when the rank last stopped."""
        return self.words[self.base(rank) + STOPPED_NS]

    def consistent(self, rank: int) -> bool:
        """Whether a rank without a worker left its memory in the state of its published block."""
        if self.state(rank) is not RankState.RUNNING:
            return True
        return self.marks(rank) and not self.writing(rank)

    def publish(self, rank: int, block: int) -> None:
        """Stores a finished block and clears the writing mark, in one store."""
        self.words[self.base(rank) + PROGRESS] = block << 1

    def set_state(self, rank: int, state: RankState, *, now_ns: int = 0) -> None:
        """Stores the rank's state; `now_ns` with `STOPPED`."""
        base = self.base(rank)
        if state is RankState.STOPPED:
            self.words[base + STOPPED_NS] = now_ns
        self.words[base + STATE] = state

    def set_marks(self, rank: int, *, marks: bool) -> None:
        """Worker: says whether it marks its blocks."""
        self.words[self.base(rank) + FLAGS] = MARKS if marks else 0

    def put_host_state(self, rank: int, block: int, state: bytes | bytearray | memoryview) -> None:
        """Writes the host state of `block` into the slot that the block before does not use.

        Raises:
            ManifestError: it is longer than the manifest's `host_state_bytes`.
        """
        size = len(state)
        if size > self.host_state_bytes:
            raise ManifestError(
                f"host state has {size} bytes; host_state_bytes allows {self.host_state_bytes}",
                field="host_state",
            )
        words = self.words
        number = block & 1
        slot = self.base(rank) + SLOTS + 2 * number
        start = HEADER_BYTES + rank * self._stride + RANK_BYTES + number * self._capacity
        words[slot] = NEVER
        self._raw[start : start + size] = state
        words[slot + 1] = size
        words[slot] = block

    def host_state(self, rank: int, block: int) -> bytes:
        """The host state that belongs to `block`.

        Raises:
            ConflictError: neither slot holds that block's, or it changed while it was read.
        """
        number = block & 1
        slot = self.base(rank) + SLOTS + 2 * number
        size = min(self.words[slot + 1], self.host_state_bytes)
        start = HEADER_BYTES + rank * self._stride + RANK_BYTES + number * self._capacity
        before = self.words[slot]
        data = bytes(self._raw[start : start + size])
        if before != block or self.words[slot] != block:
            raise ConflictError(f"the page holds no host state of rank {rank} for block {block}")
        return data

    def forget_host_states(self, rank: int) -> None:
        """Empties both slots: another world's blocks must never be taken for this one's."""
        slots = self.base(rank) + SLOTS
        self.words[slots] = self.words[slots + 2] = NEVER

    def has_host_state(self, rank: int, block: int) -> bool:
        """Whether a slot holds the host state of `block`."""
        return self.words[self.base(rank) + SLOTS + 2 * (block & 1)] == block

    def occupy(self, rank: int) -> None:
        """Worker: locks its rank, until it closes this descriptor or ends.

        The descriptor must be the worker's own opening of the page (`open_own`): locks belong to openings.

        Raises:
            ConflictError: another living process has the rank.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        except OSError as error:
            raise ConflictError(f"rank {rank} is in the hands of another worker") from error

    def occupied(self, rank: int) -> bool:
        """Whether a living process has the rank, connected or not: its memory may change."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._offset + rank, 1, 0)
        answer: bytes = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, query)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def copy_to(self, fd: int) -> None:
        """Writes all of the page into another memory file of at least its size, at its beginning."""
        mapping = SharedMapping(fd, len(self._raw))
        try:
            mapping.view[:] = self._raw
        finally:
            mapping.close()

    def copy_rank(self, older: ControlPage, rank: int) -> None:
        """Takes over what a rank wrote into an older page of the same size.

        Raises:
            FramingError: the other page has another number of ranks or other slots.
        """
        theirs = older._raw
        if len(self._raw) != len(theirs):
            raise FramingError("the older page has another size")
        start = HEADER_BYTES + rank * self._stride
        self._raw[start : start + self._stride] = theirs[start : start + self._stride]
