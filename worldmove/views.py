"""What the service shows of itself: plain, frozen values that the REST layer and the clients share.

Times of day are ISO 8601 in UTC and only for people; every duration is measured on a monotonic clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worldmove.manifest import Manifest, Region

SessionState = Literal["live", "paused", "unattended", "fenced", "lost", "ended", "elsewhere"]
PathChoice = Literal["auto", "local", "direct", "staged"]
MoveState = Literal[
    "requested",
    "admitted",
    "prepared",
    "copying",
    "pausing",
    "finishing",
    "verifying",
    "committed",
    "adopted",
    "released",
    "rejected",
    "aborted",
]
ENDED_STATES = frozenset({"released", "rejected", "aborted"})


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all views."""


class Ticket(View, frozen=True, kw_only=True):
    """What one rank needs to fetch its descriptors: once, over the node's Unix socket."""

    rank: int
    token: str

    def __repr__(self) -> str:
        return f"Ticket(rank={self.rank})"


class Registration(View, frozen=True, kw_only=True):
    """Answer to a registration: a session, a standby, or an attachment."""

    id: str
    epoch: int
    socket: str
    tickets: tuple[Ticket, ...]


class SessionView(View, frozen=True, kw_only=True):
    """One session as the node that was asked sees it."""

    id: str
    model: str
    owner: str
    owner_url: str | None
    epoch: int
    block: int
    state: SessionState
    revision: int
    bytes: int
    ranks: int
    block_ms: float
    horizon_ms: float
    dirty_bytes_per_s: float | None = None
    snapshot_block: int | None = None
    endpoint: str | None = None
    migration_id: str | None = None


class Resolution(View, frozen=True, kw_only=True):
    """What an operator decided about a session; `session` is it as it is now, `None` where it has ended."""

    id: str
    decision: Literal["keep", "end"]
    session: SessionView | None


class SessionPage(View, frozen=True, kw_only=True):
    """A page of sessions, ordered by id; `next` is the cursor of the following page."""

    sessions: tuple[SessionView, ...]
    next: str | None = None


class StandbyView(View, frozen=True, kw_only=True):
    """A worker that waits on this node to be handed a session; `silent`: it owes the node a sign of life."""

    id: str
    model: str
    state: Literal["waiting", "attached", "bound", "silent"]
    bytes: int


class SessionEvent(View, frozen=True, kw_only=True):
    """One change of ownership, endpoint or state. `seq` grows by one per session and node."""

    seq: int
    type: Literal["registered", "state", "moving", "moved", "ended"]
    session: SessionView


class RegionDigest(View, frozen=True, kw_only=True):
    """Digest of one region's leaf table (BLAKE2b-256 of its concatenated leaf digests, hex)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaf_bytes: int
    leaves: int
    digest: str


class DigestView(View, frozen=True, kw_only=True):
    """The world's digest at one block. `seed` is the XXH3 seed of the session, decimal."""

    session_id: str
    epoch: int
    block: int
    seed: int
    root: str
    host_state: tuple[str, ...]
    regions: tuple[RegionDigest, ...]
    held_ms: float


class BoundaryView(View, frozen=True, kw_only=True):
    """Answer to a boundary over REST: generate on, ask again, or stop: the world has moved."""

    action: Literal["continue", "wait", "moved", "ended"]
    destination: str | None = None
    endpoint: str | None = None


class MigrationRequest(View, frozen=True, kw_only=True):
    """What an operator asks for. `None` stands for the session's or the node's own value.

    `devices`: where the regions of a device are to lie, source to destination; each by UUID, or by its number
    among the GPUs of its node.
    """

    session_id: str
    destination: str
    devices: dict[str, str] = {}
    horizon_ms: float | None = None
    deadline_ms: float | None = None
    live: bool = True
    codec: Literal["auto", "none"] = "auto"
    path: PathChoice | None = None
    allow_unattended: bool = False


class RoundView(View, frozen=True, kw_only=True):
    """One round of copying: what the destination asked for, and how long it took to land and be digested.

    `copied_bytes` of the state lay elsewhere in its memory, and were copied there. `again_bytes` of `bytes`
    came twice: they had begun at another stop of the world than that of the pause. `start_ms` after the
    request the source began it; `ms` is what the destination measured.
    """

    number: int
    final: bool
    leaves: int
    bytes: int
    ms: float
    copied_bytes: int = 0
    start_ms: float | None = None
    again_bytes: int = 0


class BlockEnd(View, frozen=True, kw_only=True):
    """The source saw, `ms` after the request of a move, that block `number` had ended.

    It looks about sixteen times a block; numbers that it left out ended between two looks.
    """

    number: int
    ms: float


class Damage(View, frozen=True, kw_only=True):
    """A leaf whose bytes at the destination did not match the source's table, and was sent again."""

    region: str
    leaf: int
    attempts: int


class Receipt(View, frozen=True, kw_only=True):
    """The permanent record of a move that got as far as copying or further.

    `sent_bytes` are those of all rounds, and the `repair_bytes` that came again in place of damaged leaves;
    `kept_bytes` of the state were at the destination before the last round, and `copied_bytes` at another
    place there. `devices`: pairs of a GPU of the source and the one to which regions of it went. `path_gbps`:
    what a bare transfer over the path brought when it was opened, in 10⁹ bit/s, where that is measured
    (direct); else what the longest round brought. `path_reason`: why a better path was not taken, where one
    was tried.

    The source's clock, in ms since the request: `blocks` that ended before the world stood (256 at most),
    `stopped_ms` when it stood, `resumed_ms` when the source heard that it could go on, or let it go on there.
    """

    migration_id: str
    session_id: str
    source: str
    destination: str
    state: MoveState
    path: str | None
    live: bool
    epoch: int
    block: int | None
    state_bytes: int
    sent_bytes: int
    kept_bytes: int
    rounds: tuple[RoundView, ...]
    damaged: tuple[Damage, ...]
    source_root: str | None
    destination_root: str | None
    pause_ms: float | None
    data_ms: float | None
    commit_ms: float | None
    resume_ms: float | None
    total_ms: float
    missed: bool
    lanes: int
    finished_at: str
    code: str | None = None
    reason: str | None = None
    repair_bytes: int = 0
    devices: tuple[tuple[str, str], ...] = ()
    copied_bytes: int = 0
    blocks: tuple[BlockEnd, ...] = ()
    stopped_ms: float | None = None
    resumed_ms: float | None = None
    path_gbps: float | None = None
    path_reason: str | None = None


class MigrationView(View, frozen=True, kw_only=True):
    """A move in progress or ended."""

    id: str
    session_id: str
    source: str
    destination: str
    state: MoveState
    live: bool
    path: str | None
    round: int
    state_bytes: int
    sent_bytes: int
    created_at: str
    elapsed_ms: float
    code: str | None = None
    reason: str | None = None
    receipt: Receipt | None = None


class MigrationPage(View, frozen=True, kw_only=True):
    """Moves that this node knows, newest first."""

    migrations: tuple[MigrationView, ...]
    next: str | None = None


class DryRun(View, frozen=True, kw_only=True):
    """Would the move be taken on now? `required` and `available` hold every term that was looked at.

    Names end in their unit; what both name is compared. `unmeasured` terms limit nothing: the move would
    measure them before its world stops, and might be given up then; so might one that is `provisional`, which
    counts on more than what was measured. `retry_after_ms`: when it would be possible, where waiting helps.
    """

    admissible: bool
    code: str | None = None
    condition: str | None = None
    reason: str | None = None
    required: dict[str, float] = {}
    available: dict[str, float] = {}
    unmeasured: tuple[str, ...] = ()
    provisional: bool = False
    retry_after_ms: float | None = None


class DeviceView(View, frozen=True, kw_only=True):
    """One device of a node; `total_bytes` and `free_bytes` count what sessions may still reserve."""

    uuid: str
    kind: Literal["host", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int


class GateView(View, frozen=True, kw_only=True):
    """The receiver's token bucket, and what it has found out about its line.

    `outstanding_bytes` never exceed `bound_bytes`, but for a single grant that is larger. `senders` answer at
    this moment, of `most_senders` that may; `waiting` requests wait for a grant, `waiting_pauses` moves for
    leave to stop their world. `cut_off` counts grants that a sender let go by.
    """

    rate_bytes_per_s: float | None
    outstanding_bytes: int
    granted_bytes: int
    waiting: int
    bound_bytes: int = 0
    senders: int = 0
    most_senders: int = 0
    collapses: int = 0
    cut_off: int = 0
    moves: int = 0
    waiting_pauses: int = 0
    goodput_bytes_per_s: float | None = None


class LaneView(View, frozen=True, kw_only=True):
    """One data-plane process."""

    pid: int
    kind: str
    port: int
    migration_id: str | None


class NodeView(View, frozen=True, kw_only=True):
    """`GET /v1/node`.

    `measured` holds what moves are judged by, by name: rates in bytes per second, times in seconds, each with
    its safety quantile. `reserved_bytes_per_s` is promised to moves that were taken on; `rejected` counts by
    code.
    """

    name: str
    incarnation: int
    version: str
    url: str
    boot_id: str
    devices: tuple[DeviceView, ...]
    path_gbps: dict[str, float]
    gate: GateView
    measured: dict[str, float] = {}
    reserved_bytes_per_s: float = 0.0
    rejected: dict[str, int] = {}
    lanes: tuple[LaneView, ...]
    executors: tuple[int, ...]
    keeper: int
    sessions: int
    standbys: tuple[StandbyView, ...]
    migrations: int


class PeerNode(View, frozen=True, kw_only=True):
    """A node as the ledger knows it; `alive` as far as the asked node has seen its lease renewed."""

    name: str
    incarnation: int
    url: str
    boot_id: str
    alive: bool


class SessionSpec(View, frozen=True, kw_only=True):
    """A validated registration: what `POST /v1/sessions` and `/v1/standbys` carry."""

    manifest: Manifest
    fingerprint: dict[str, str] = {}
    id: str | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """The manifest's regions."""
        return self.manifest.regions
