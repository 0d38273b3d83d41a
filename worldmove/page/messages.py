"""What a worker and its node say to each other over the node's Unix socket.

One packet a message, framed by `worldmove.ipc`; `docs/worker-protocol.md` tells the exchange in order.
Every `Paused` gets exactly one answer: `Advance`, `Resume`, `Moved` or `Ended`.
"""

from __future__ import annotations

import msgspec

from worldmove.manifest import Manifest, Place, Region

PROTOCOL = 1
FDS_PER_MESSAGE = 128


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """Worker: the first message of a rank that comes with a one-time token."""

    token: str
    protocol: int = PROTOCOL

    def __repr__(self) -> str:
        return f"Hello(protocol={self.protocol})"


class Rejoin(Message, frozen=True, tag="rejoin"):
    """Worker: the first message of a rank whose connection was lost and that still holds its memory.

    `secret` is the one of its `Welcome`. `stopped`: it waits at `block` for an answer. `waiting`: it is a
    standby that has not been adopted. `session_id` and `epoch` are as the rank's control page has them.

    The node answers with a `Welcome` without extents; or with `Moved` or `Ended`, if it has no such slot and
    the ledger knows what became of the session.
    """

    slot: str
    rank: int
    secret: str
    block: int
    stopped: bool
    waiting: bool
    session_id: str | None = None
    epoch: int = 0
    protocol: int = PROTOCOL

    def __repr__(self) -> str:
        return f"Rejoin(slot={self.slot!r}, rank={self.rank}, block={self.block}, stopped={self.stopped})"


class Handback(Message, frozen=True, tag="handback"):
    """Worker: the first message of a rank whose memory no node knows any more; answered as a `Rejoin`.

    Its one descriptor is the rank's control page; those of `sizes` follow in `Memory` messages.

    Attributes:
        rejoin: what was answered with `not-found`.
        session_id: as the control page has it.
        fingerprint: of the last `Welcome`.
        manifest: as this rank knows it; only its own regions are believed.
        places: one for each region of this rank, in the manifest's order; extents count in `sizes`.
        sizes: bytes of the extents.
        revisions: of this rank that are in the manifest.
    """

    rejoin: Rejoin
    session_id: str
    fingerprint: dict[str, str]
    manifest: Manifest
    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    revisions: int

    @property
    def protocol(self) -> int:
        """That the worker speaks."""
        return self.rejoin.protocol

    def __repr__(self) -> str:
        return f"Handback({self.rejoin!r}, session_id={self.session_id!r})"


class Ready(Message, frozen=True, tag="ready"):
    """Worker: everything is mapped; from now on this rank has a worker."""


class Paused(Message, frozen=True, tag="paused"):
    """Worker: this rank stands at the boundary of `block`, its host state is in the page."""

    block: int


class Started(Message, frozen=True, tag="started"):
    """Worker: an adopted world has been handed to the serving stack; it may generate now."""


class Put(msgspec.Struct, frozen=True, array_like=True):
    """A region that was added or resized, in extent `extent` (an index into the message's descriptors)."""

    region: Region
    extent: int
    offset: int


class Revise(Message, frozen=True, tag="revise"):
    """Worker: this rank's regions changed at a boundary. One descriptor for each of `extents` (bytes).

    `devices`: whose memory each of them is; left out, all are the host's. `number` counts on from
    `Welcome.revisions`; one that the node has taken in already changes nothing.
    """

    number: int
    drop: tuple[str, ...]
    put: tuple[Put, ...]
    extents: tuple[int, ...]
    devices: tuple[str, ...] = ()


class Pong(Message, frozen=True, tag="pong"):
    """Worker: a rank that waits for the node's word is there; `number` is that of the `Ping`."""

    number: int


class Bye(Message, frozen=True, tag="bye"):
    """Worker: it leaves the rank at a boundary; the world stays."""


class Welcome(Message, frozen=True, tag="welcome"):
    """Node: who this rank is and where everything lies. Carries one descriptor, the control page.

    Attributes:
        slot: the node's name for this memory, for `Rejoin`.
        session_id: `None` for a standby, which waits for `Adopted`.
        places: one for each region of the manifest, as (extent, offset).
        extents: indices of this rank's extents; their descriptors follow in `Memory` messages.
        sizes: bytes of these extents.
        secret: proves a later `Rejoin`.
        revisions: of this rank that the node has taken in.
        fingerprint: what the slot was registered with, for `Handback`.
    """

    slot: str
    session_id: str | None
    rank: int
    ranks: int
    epoch: int
    manifest: Manifest
    places: tuple[Place, ...]
    extents: tuple[int, ...]
    sizes: tuple[int, ...]
    secret: str
    revisions: int
    fingerprint: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Welcome(slot={self.slot!r}, session_id={self.session_id!r}, rank={self.rank})"


class Memory(Message, frozen=True, tag="memory"):
    """Descriptors of a rank's extents, `count` of them.

    From the node in the order of `Welcome.extents`, from a worker in that of `Handback.sizes`.
    """

    count: int


class Refused(Message, frozen=True, tag="refused"):
    """Node: the first message was not accepted; `code` is that of an error of `worldmove.errors`."""

    code: str
    message: str


class Ping(Message, frozen=True, tag="ping"):
    """Node: is anybody there? Comes to ranks that wait for a word, and wants a `Pong`."""

    number: int


class Resume(Message, frozen=True, tag="resume"):
    """Node: generate on."""


class Advance(Message, frozen=True, tag="advance"):
    """Node: another rank got further; run on to `block` and stop there (the page says so too)."""

    block: int


class Moved(Message, frozen=True, tag="moved"):
    """Node: the session has a new owner; this rank is done."""

    destination: str
    endpoint: str | None = None


class Ended(Message, frozen=True, tag="ended"):
    """Node: the session or standby was ended here."""

    reason: str


class Adopted(Message, frozen=True, tag="adopted"):
    """Node: the standby holds this session from now on, at `block`; its host state is in the page."""

    session_id: str
    epoch: int
    block: int
    endpoint: str | None = None


WorkerMessage = Hello | Rejoin | Handback | Memory | Ready | Paused | Started | Revise | Pong | Bye
NodeMessage = Welcome | Memory | Refused | Ping | Resume | Advance | Moved | Ended | Adopted
Answer = Resume | Advance | Moved | Ended
