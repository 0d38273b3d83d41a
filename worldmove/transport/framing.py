"""What two lanes say to each other over a connection, byte by byte.

A message's tag is `kind << 12 | sequence`, where the sequence (12 bits) counts all messages of one
direction: one that is lost, doubled or out of place is noticed before it lands. All numbers are
little endian.

* `HELLO` (destination to source) and `WELCOME` (back): `magic u32, version u16, reserved u16,
  table 16 bytes, pid u32, host u64, namespace u64, proof 32 bytes`. `table` digests the sizes of all regions;
  `pid` to `namespace` are a `ProcessId`; `proof` is keyed by the one-time token and covers the direction, the
  move and what stands between `reserved` and it.
* `PULL` (destination to source): spans of `region u32, offset u64, length u64`. It is the grant:
  the source sends exactly these bytes, in the chunks that `plan` makes of them, and nothing else.
* `DATA` (source to destination): one chunk, no header of its own; tag and length are its header.
* `BEAT`: empty; a sign of life. `ERROR`: UTF-8, the reason why the sender will end the connection.
* `WARM` (destination to source, between *direct* lanes, before the first pull): `messages u32, bytes
  u32, chunk u32, depth u32`. The source answers with so many `DATA` of so many bytes that mean nothing; none
  ends it, and `chunk` and `depth` are then those of all that follows (`packing.Shape`).
* `STOOD` (source to destination, between *direct* lanes, once, before all `DATA` of a world that isn't copied
  live): `block u64`, at which the source's page was seen to stand; all ones: its node said so.

A chunk is a single piece or gathered small ones (`plan`), of at most `CHUNK` bytes; between *direct* lanes it
is what `packing.pack` makes of a pull, of at most `packing.SLOT_BYTES`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.errors import FramingError
from worldmove.manifest import Span

MAGIC = 0x4C4D5657
VERSION = 4
OPENING = struct.Struct("<IHH16sIQQ32s")
WARM = struct.Struct("<IIII")
STOOD = struct.Struct("<Q")
UNSEEN = (1 << 64) - 1
"""In place of a block: nobody looked at the page."""
SPAN = np.dtype([("region", "<u4"), ("offset", "<u8"), ("length", "<u8")])
MAX_SPANS = 65_536
"""Spans of one pull; a session's 4,096 regions fit many times."""
MAX_PULL_BYTES = 1 << 30
MAX_PULLS = 64
"""Pulls under way on one lane."""
MAX_ERROR = 1024
CHUNK = 4 * 1024 * 1024
"""Largest message; chosen by measurement, see docs/benchmarks.md."""
DEPTH = 4
"""Chunks in flight."""
GATHER = 128 * 1024
"""Shorter pieces are copied together into one message."""
BOUNCE = 1024 * 1024
"""Largest gathered message."""
SEQUENCE = 0xFFF
MIN_TOKEN = 16
MAX_TOKEN = 64

Spans = npt.NDArray[np.void]


class Kind(enum.IntEnum):
    """The message's kind: the upper four bits of its tag."""

    HELLO = 1
    WELCOME = 2
    PULL = 3
    DATA = 4
    BEAT = 5
    ERROR = 6
    WARM = 7
    STOOD = 8


LIMITS = {
    Kind.HELLO: OPENING.size,
    Kind.WELCOME: OPENING.size,
    Kind.PULL: MAX_SPANS * SPAN.itemsize,
    Kind.DATA: CHUNK,
    Kind.BEAT: 0,
    Kind.ERROR: MAX_ERROR,
    Kind.WARM: WARM.size,
    Kind.STOOD: STOOD.size,
}
"""Longest body of each kind, in bytes."""


def tag_of(kind: Kind, sequence: int) -> int:
    """The tag of a direction's `sequence`-th message."""
    return kind << 12 | sequence & SEQUENCE


def read_tag(tag: int, nbytes: int, sequence: int, chunk: int = CHUNK) -> Kind:
    """Kind of the message that arrived as the `sequence`-th of its direction; `chunk`: largest `DATA`.

    Raises:
        FramingError: unknown kind, another sequence number, or longer than its kind allows.
    """
    try:
        kind = Kind(tag >> 12)
    except ValueError:
        raise FramingError(f"message kind {tag >> 12} is unknown") from None
    if tag & SEQUENCE != sequence & SEQUENCE:
        raise FramingError(f"message {tag & SEQUENCE} came where {sequence & SEQUENCE} is due")
    limit = chunk if kind is Kind.DATA else LIMITS[kind]
    if nbytes > limit:
        raise FramingError(f"{kind.name} of {nbytes} bytes; at most {limit} are allowed")
    return kind


def check_token(token: bytes) -> None:
    """Raises `FramingError` unless the token has 16 to 64 bytes."""
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise FramingError(f"token has {len(token)} bytes; {MIN_TOKEN} to {MAX_TOKEN} are allowed")


class ProcessId(NamedTuple):
    """Which process a lane is.

    Attributes:
        pid: in its namespace.
        host: BLAKE2b-64 of the kernel's boot id.
        namespace: inode of its PID namespace.
    """

    pid: int
    host: int
    namespace: int


NOBODY = ProcessId(0, 0, 0)
"""Of a lane of which nobody need know when it ends."""


class Opening(NamedTuple):
    """What a lane says of itself: the digest of its region table, and which process it is."""

    table: bytes
    process: ProcessId


def opening(kind: Kind, token: bytes, move_id: str, table: bytes, me: ProcessId = NOBODY) -> bytes:
    """Body of `HELLO` or `WELCOME`.

    Args:
        kind: which of them.
        token: of the lease, 16 to 64 bytes.
        move_id: of its move.
        table: digest of the sizes of all regions, 16 bytes.
        me: this process, or `NOBODY`.
    """
    return OPENING.pack(MAGIC, VERSION, 0, table, *me, _proof(kind, token, move_id, table, me))


def check_opening(body: bytes, kind: Kind, token: bytes, move_id: str) -> Opening:
    """Checks who opens a connection.

    Raises:
        FramingError: another protocol or version, or the proof doesn't fit token, move and direction.
    """
    if len(body) != OPENING.size:
        raise FramingError(f"{kind.name} of {len(body)} bytes; it has {OPENING.size}")
    magic, version, _, table, *numbers, proof = OPENING.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise FramingError(f"{kind.name} of another protocol or version")
    them = ProcessId(*numbers)
    if not hmac.compare_digest(proof, _proof(kind, token, move_id, table, them)):
        raise FramingError("the token is wrong, used up, or of another move or direction")
    return Opening(bytes(table), them)


def _proof(kind: Kind, token: bytes, move_id: str, table: bytes, process: ProcessId) -> bytes:
    data = bytes([kind]) + table + struct.pack("<IQQ", *process) + move_id.encode()
    return hashlib.blake2b(data, key=token, digest_size=32, person=b"worldmove-lane").digest()


def pack_spans(spans: Sequence[Span]) -> Spans:
    """Spans as an array of `SPAN`.

    Raises:
        FramingError: too many, too long together, or a number that doesn't fit its field.
    """
    if len(spans) > MAX_SPANS:
        raise FramingError(f"a pull of {len(spans)} spans; at most {MAX_SPANS} are allowed")
    try:
        packed = np.array([tuple(span) for span in spans], dtype=SPAN)
    except (OverflowError, ValueError, TypeError) as error:
        raise FramingError(f"a span doesn't fit its fields: {error}") from error
    check_volume(packed)
    return packed


def unpack_spans(body: bytes | memoryview) -> Spans:
    """The spans of a `PULL`. Raises `FramingError` as `pack_spans`."""
    if not 0 < len(body) <= MAX_SPANS * SPAN.itemsize or len(body) % SPAN.itemsize:
        raise FramingError(f"a pull of {len(body)} bytes holds no whole spans, or too many")
    packed = np.frombuffer(body, dtype=SPAN)
    check_volume(packed)
    return packed


def check_volume(spans: Spans) -> int:
    """Bytes of all spans together.

    Raises:
        FramingError: a span is empty, or they are more than `MAX_PULL_BYTES`.
    """
    if spans.size == 0:
        return 0
    lengths = spans["length"]
    if int(lengths.min()) == 0:
        raise FramingError("a pull has an empty span")
    if int(lengths.max()) > MAX_PULL_BYTES or int(lengths.sum()) > MAX_PULL_BYTES:
        raise FramingError(f"a pull of more than {MAX_PULL_BYTES} bytes")
    return int(lengths.sum())


def unpack_stood(body: bytes) -> int:
    """The block of a `STOOD`. Raises `FramingError` for another length."""
    if len(body) != STOOD.size:
        raise FramingError(f"STOOD of {len(body)} bytes; it has {STOOD.size}")
    return int(STOOD.unpack(body)[0])


class Chunk(NamedTuple):
    """One `DATA` message: a single piece travels from memory to memory, several are gathered."""

    pieces: list[Span]
    nbytes: int


def plan(spans: Spans) -> Iterator[Chunk]:
    """Cuts a pull into messages; both sides come to the same ones, so nothing about them is sent."""
    small: list[Span] = []
    held = 0
    for region, offset, length in spans.tolist():
        start, rest = offset, length
        while rest >= GATHER:
            size = min(rest, CHUNK)
            yield Chunk([Span(region, start, size)], size)
            start, rest = start + size, rest - size
        if rest == 0:
            continue
        if held + rest > BOUNCE:
            yield Chunk(small, held)
            small, held = [], 0
        small.append(Span(region, start, rest))
        held += rest
    if small:
        yield Chunk(small, held)
