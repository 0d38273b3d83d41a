"""What a node and its lane processes say to each other over their socket pair (see `worldmove.ipc`).

One command at a time is under way, `Pull`, `Staged`, `Look` and `Go` excepted; each is answered by `Done` or
`Refused`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worldmove.errors import (
    ConnectionLostError,
    DeadlineError,
    FramingError,
    TransportError,
    WorldMoveError,
)
from worldmove.executor.messages import Stop


class Extents(msgspec.Struct, frozen=True, tag="extents"):
    """Sizes in bytes of the extents whose descriptors come along; repeated for more than fit a packet."""

    sizes: list[int]
    writable: bool


class Bind(msgspec.Struct, frozen=True, tag="bind"):
    """Takes up a lease of the extents sent before. `regions`: i64[n, 3] of (extent, offset, nbytes).

    `ring`: slots and bytes of each, where the one extent is a ring through which all regions pass; extent and
    offset then mean nothing. `cpus`: the only ones to run on during the lease; empty: as it was started.
    """

    move_id: str
    regions: bytes
    ring: tuple[int, int] | None = None
    cpus: tuple[int, ...] = ()


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Accept the one caller that proves this token; `fault` befalls the lease, where faults are allowed.

    `paced`: ask by `Leave` before each message is sent. `held`: read nothing before the world stands, as
    a page (`Watch`) shows or `Go` says.
    """

    token: bytes
    fault: str = ""
    paced: bool = False
    held: bool = False

    def __repr__(self) -> str:
        return "Serve(...)"


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Before `Serve`: the world's control page, whose descriptor comes along, and its words."""

    nbytes: int
    stop: Stop


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """While it serves: reads nothing from now on before the world stands, as with `Serve.held`."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The world is asked to stop: look at its page from now on; not answered."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The world stands: as source begin, as destination expect what was pulled ahead; not answered."""


class Wish(msgspec.Struct, frozen=True):
    """How a direct lane is to carry what it pulls: see `packing.Shape`, and where long messages are received.

    `landing`: `ring`, `straight` where they belong, or `auto`, there if that is as fast.
    """

    chunk_bytes: int = 128 << 20
    depth: int = 3
    landing: Literal["auto", "ring", "straight"] = "auto"


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Call a serving lane; the deadline in seconds covers the introduction too."""

    host: str
    port: int
    token: bytes
    deadline_s: float
    wish: Wish = Wish()

    def __repr__(self) -> str:
        return f"Connect({self.host}:{self.port})"


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Fetch spans (packed as `framing.SPAN`); answered by `Pulled` or `NotPulled`.

    `slot`: of the ring, into which they are to be landed. `ahead`: the other side is held until its
    world stands.
    """

    number: int
    spans: bytes
    slot: int | None = None
    ahead: bool = False


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The slot that `Wanted` asked to be filled is full, or `Leave` is granted; not answered."""

    number: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the lease cleanly and unmap everything."""

    deadline_s: float


Command = Extents | Bind | Watch | Serve | Hold | Connect | Pull | Staged | Look | Go | Release


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The lane listens; its first message."""

    port: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command was carried out.

    `gbps`: what a direct lane measured when it was connected; `rates`: of each way that it tried; `straight`:
    it takes the one without its ring. `account`: of a lease that was released, see `account`.
    """

    gbps: float = 0.0
    straight: bool = False
    rates: dict[str, float] = {}
    account: dict[str, dict[str, float]] = {}


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command is not possible; the lane is as it was before. `short_of` as in the executors' `Failed`."""

    reason: str
    short_of: dict[str, int] | None = None


class Pulled(msgspec.Struct, frozen=True, tag="pulled"):
    """All bytes of a pull are in the lane's memory."""

    number: int
    nbytes: int


class NotPulled(msgspec.Struct, frozen=True, tag="not-pulled"):
    """A pull was refused or broke off; `code` is the error class's."""

    number: int
    code: str
    reason: str


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """Asks for bytes in a slot of the ring; `rows` as `slots.ROW`. Answered by `Staged`."""

    number: int
    slot: int
    rows: bytes


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Asks to send so many bytes; answered by `Staged`."""

    number: int
    nbytes: int


class Stood(msgspec.Struct, frozen=True, tag="stood"):
    """A world that was waited for stands; at `block`, as its page has shown, or `framing.UNSEEN`.

    A source says it when its first messages are on their way, a destination when it hears of it.
    """

    block: int


class Stale(msgspec.Struct, frozen=True, tag="stale"):
    """A lane that this one has exchanged with is gone, and memory of it stays open here: see `acquaintances`.

    The process should end once it is idle.
    """


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life, several within a stall deadline."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The lease is lost and the process ends; `code` is the error class's."""

    code: str
    reason: str


Report = Ready | Done | Refused | Pulled | NotPulled | Wanted | Leave | Stood | Stale | Alive | Failed

_ERRORS: dict[str, type[WorldMoveError]] = {
    kind.code: kind for kind in (DeadlineError, FramingError, ConnectionLostError)
}


def error_of(code: str, message: str) -> WorldMoveError:
    """What a lane's `Failed` or `NotPulled` raises in its node: of its class there, if that is known."""
    return _ERRORS.get(code, TransportError)(message)
