"""What two nodes say to each other during one move, over one WebSocket.

A binary message is one version byte and a msgpack map with the field `t` (the type's name). Sizes are
bounded before anything is decoded; unknown types, fields of a wrong type and other versions are
refused. Leaf tables travel here in parts (16 bytes a leaf), the bytes of regions never do.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from worldmove.errors import FramingError
from worldmove.manifest import (
    DIGEST_BYTES,
    MAX_HOST_STATE,
    MAX_NAME,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_SESSION_BYTES,
    MIN_LEAF,
    Manifest,
    Place,
)
from worldmove.views import PathChoice

VERSION = 4
MAX_MESSAGE = 8 * 1024 * 1024
MAX_PART_LEAVES = 32 * 1024
MAX_LEAVES = MAX_SESSION_BYTES // MIN_LEAF
MAX_LANES = 64
MAX_MS = 86_400_000.0

Name = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_TEXT = 4096
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Secret = Annotated[bytes, Meta(min_length=32, max_length=32)]
Count = Annotated[int, Meta(ge=0, le=MAX_SESSION_BYTES)]
Milliseconds = Annotated[float, Meta(gt=0, le=MAX_MS)]
RoundNumber = Annotated[int, Meta(ge=1, le=1000)]
HostState = Annotated[bytes, Meta(max_length=MAX_HOST_STATE)]
MAX_FACTS = 64
Facts = Annotated[dict[Name, float], Meta(max_length=MAX_FACTS)]
RootHex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of all messages between nodes."""


Rate = Annotated[float, Meta(gt=0, le=1e15)]


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a source knows of its side of a move, in bytes per second; left out what it has not measured.

    Attributes:
        digest_bytes_per_s: how fast it reads such a state into a table.
        dirty_bytes_per_s: what has to be sent of the session per second of generating.
        egress_bytes_per_s: what the node may send.
    """

    digest_bytes_per_s: Rate | None = None
    dirty_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] | None = None
    egress_bytes_per_s: Rate | None = None


class Hello(Message, frozen=True, kw_only=True):
    """Source → destination: may this session come? With `dry_run` only the verdict is wanted.

    `boot_id` and `socket` (a Unix socket for descriptors) tell whether both nodes are on one host. `devices`:
    where the regions of a device of the source are to lie, as `worldmove.placement.Wanted` says. `direct`:
    all regions lie on GPUs that have lanes.
    """

    move_id: Name
    session_id: Name
    source: Name
    source_incarnation: Count
    boot_id: Name
    epoch: Count
    seed: Annotated[int, Meta(ge=0)]
    manifest: Manifest
    fingerprint: dict[str, str]
    live: bool
    path: PathChoice
    socket: Text | None = None
    horizon_ms: Milliseconds
    deadline_ms: Milliseconds
    allow_unattended: bool = False
    dry_run: bool = False
    devices: Annotated[dict[Name, Name], Meta(max_length=MAX_RANKS)] = {}
    terms: Terms | None = None
    direct: bool = False


class Admitted(Message, frozen=True, kw_only=True):
    """Destination → source: memory is reserved and a standby bound; `path` is how the bytes will come.

    `devices`: pairs of a GPU of the source and the one to which regions of it go.
    `required` and `available` are the terms of the verdict, `unmeasured` those that nobody knows yet;
    `provisional`: they are measured before the world stops, and may still refuse the move.
    `lanes`: how many for the staged path are wanted; with a `path` that is another one, in case that fails.
    """

    incarnation: Count
    path: Name
    lanes: Annotated[int, Meta(ge=0, le=MAX_LANES)]
    required: Facts = {}
    available: Facts = {}
    devices: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_REGIONS)] = ()
    unmeasured: Annotated[tuple[Name, ...], Meta(max_length=MAX_FACTS)] = ()
    provisional: bool = False


class Rejected(Message, frozen=True, kw_only=True):
    """Destination → source: no, and why; nothing has changed."""

    code: Name
    message: Text
    details: dict[str, Any] = {}


class LaneOffer(msgspec.Struct, frozen=True):
    """Where one source lane listens, and the one-time token that it expects.

    `device`: of a direct lane the GPU whose regions it serves, as the manifest names it.
    """

    host: Name
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Secret
    device: Annotated[str, Meta(max_length=256)] = "host"

    def __repr__(self) -> str:
        return f"LaneOffer({self.host}:{self.port})"


class Begin(Message, frozen=True, kw_only=True):
    """Source → destination: the record says `moving`; here is the way to the bytes.

    `direct` lanes, one for each GPU, `lanes` for the staged path (also beside direct ones that may turn out
    too slow, `reason`: why there are none of these, and beside descriptors that may not be mappable), or
    (both nodes on one host) a Unix socket with a one-time token for descriptors, their sizes in bytes, the
    devices whose memory they are (all the host's, if left out), and where each region lies in them.
    With `table` the descriptor behind those of memory is the source's leaf table, to be read from. With
    `page` the last one is the session's control page, to be looked at: the world will be paused next, and
    whoever sees it stand may copy.
    """

    lanes: Annotated[tuple[LaneOffer, ...], Meta(max_length=MAX_LANES)] = ()
    direct: Annotated[tuple[LaneOffer, ...], Meta(max_length=MAX_LANES)] = ()
    reason: Text = ""
    socket: Text | None = None
    token: Secret | None = None
    extent_bytes: Annotated[tuple[Count, ...], Meta(max_length=MAX_REGIONS + MAX_RANKS)] = ()
    extent_devices: Annotated[tuple[Name, ...], Meta(max_length=MAX_REGIONS + MAX_RANKS)] = ()
    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_REGIONS)] = ()
    table: bool = False
    page: bool = False

    @property
    def descriptors(self) -> int:
        """How many wait at the socket."""
        return len(self.extent_bytes) + self.table + self.page

    def __repr__(self) -> str:
        return f"Begin(lanes={self.lanes}, direct={self.direct}, socket={self.socket!r})"


class Prepared(Message, frozen=True, kw_only=True):
    """Destination → source: the path is open and the standby has the memory mapped.

    `path` that was opened, and what a bare transfer over it brought in 10⁹ bit/s, where that was measured;
    `reason`: why it is another one than was admitted.
    """

    path: Name | None = None
    gbps: Annotated[float, Meta(ge=0)] = 0.0
    reason: Text = ""


class Round(Message, frozen=True, kw_only=True):
    """Source → destination: a round begins. A final round is of a paused world.

    With `table` false no table follows: the destination takes all leaves that it does not know.
    """

    number: RoundNumber
    final: bool
    table: bool


class TablePart(Message, frozen=True, kw_only=True):
    """Source → destination: leaf digests from leaf index `first` on, as they are now.

    Where the source's table was offered beside its memory, `shown` leaves stand there, `digests` is empty.
    """

    number: RoundNumber
    first: Annotated[int, Meta(ge=0, le=MAX_LEAVES)]
    digests: Annotated[bytes, Meta(max_length=MAX_PART_LEAVES * DIGEST_BYTES)] = b""
    shown: Annotated[int, Meta(ge=0, le=MAX_LEAVES)] = 0

    @property
    def leaves(self) -> int:
        """How many it tells of."""
        return self.shown or len(self.digests) // DIGEST_BYTES


class TableEnd(Message, frozen=True, kw_only=True):
    """Source → destination: the round's table is complete."""

    number: RoundNumber


class Progress(Message, frozen=True, kw_only=True):
    """Destination → source: bytes of this move that have landed so far; only for people."""

    bytes: Count


class Pausing(Message, frozen=True, kw_only=True):
    """Source → destination: no live round follows. The world is asked to stop, then comes the last round."""


class Landed(Message, frozen=True, kw_only=True):
    """Destination → source: everything that a live round asked for lies in memory and was read back.

    `copied_bytes` lay elsewhere at the destination. `wire_ms` of `ms` is from the first request to the last
    landing, as it would be at the path's full rate.
    """

    number: RoundNumber
    leaves: Count
    bytes: Count
    ms: float
    copied_bytes: Count = 0
    wire_ms: float = 0.0


class Sealed(Message, frozen=True, kw_only=True):
    """Source → destination: the paused world's block, its host state by rank, and its root."""

    block: Count
    host_states: Annotated[tuple[HostState, ...], Meta(max_length=MAX_RANKS)]
    root: RootHex


class DamagedLeaf(msgspec.Struct, frozen=True):
    """A leaf that had to be sent again, and how often."""

    region: Annotated[str, Meta(max_length=MAX_NAME)]
    leaf: Annotated[int, Meta(ge=0, le=MAX_LEAVES)]
    attempts: Annotated[int, Meta(ge=1, le=1000)]


class Verified(Message, frozen=True, kw_only=True):
    """Destination → source: what lies in memory here has this root; what the final round took.

    `kept_bytes` of the state were there before that round, and `copied_bytes` elsewhere in it; `repair_bytes`
    came after it, in place of damage.
    """

    root: RootHex
    leaves: Count
    bytes: Count
    kept_bytes: Count
    ms: float
    repair_bytes: Count = 0
    copied_bytes: Count = 0
    damaged: Annotated[tuple[DamagedLeaf, ...], Meta(max_length=10_000)] = ()


class Committed(Message, frozen=True, kw_only=True):
    """Destination → source: the record names the destination as owner.

    `commit_ms`: from verified memory to the ledger's answer. One write may have committed and adopted.
    """

    epoch: Count
    commit_ms: float


class Adopted(Message, frozen=True, kw_only=True):
    """Destination → source: the record says `adopted` and the standby may generate.

    `resume_ms`: since the commit was known; includes a write only where the adoption was one of its own.
    """

    epoch: Count
    resume_ms: float
    endpoint: Text | None = None


class Released(Message, frozen=True, kw_only=True):
    """Source → destination: the source's worker knows and its memory is gone."""


class Abort(Message, frozen=True, kw_only=True):
    """Either way: this side has given the move up; the record decides what that means."""

    code: Name
    message: Text


PeerMessage = (
    Hello
    | Admitted
    | Rejected
    | Begin
    | Prepared
    | Round
    | TablePart
    | TableEnd
    | Progress
    | Pausing
    | Landed
    | Sealed
    | Verified
    | Committed
    | Adopted
    | Released
    | Abort
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode(message: Message) -> bytes:
    """Version byte and msgpack body.

    Raises:
        FramingError: the message is larger than `MAX_MESSAGE` bytes.
    """
    data = bytes([VERSION]) + _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE:
        raise FramingError(f"message of {len(data)} bytes; at most {MAX_MESSAGE} are allowed")
    return data


def decode(data: bytes) -> PeerMessage:
    """The message in `data`.

    Raises:
        FramingError: too long, another version, an unknown type, or a field of a wrong type or size.
    """
    if not 2 <= len(data) <= MAX_MESSAGE:
        raise FramingError(f"message of {len(data)} bytes; 2 to {MAX_MESSAGE} are allowed")
    if data[0] != VERSION:
        raise FramingError(f"message has version {data[0]}; this node speaks {VERSION}")
    try:
        message = _DECODER.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FramingError(f"message could not be decoded: {error}") from error
    if isinstance(message, TablePart):
        _check_part(message)
    return message


def _check_part(part: TablePart) -> None:
    if len(part.digests) % DIGEST_BYTES:
        raise FramingError(f"digests has {len(part.digests)} bytes; a multiple of {DIGEST_BYTES} is allowed")
    if part.digests and part.shown:
        raise FramingError(f"digests has {len(part.digests)} bytes where leaves are shown; 0 are allowed")
