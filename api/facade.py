"""What the HTTP layer needs of a node, and of a peer's channel: the seam between `api` and `worldmove`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from worldmove.config import Settings
from worldmove.views import (
    BoundaryView,
    DigestView,
    DryRun,
    MigrationPage,
    MigrationRequest,
    MigrationView,
    NodeView,
    PeerNode,
    Registration,
    Resolution,
    SessionEvent,
    SessionPage,
    SessionSpec,
    SessionView,
)


class PeerChannel(Protocol):
    """One control connection of one move, as the node is handed it; messages are whole and in order."""

    @property
    def move_id(self) -> str:
        """The move that the peer named in the address."""

    async def send(self, message: bytes) -> None:
        """Sends one message; raises ConnectionLostError or FramingError (too long)."""

    async def receive(self) -> bytes:
        """The next message; raises ConnectionLostError or FramingError (text instead of bytes)."""

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes; never raises, may be called twice."""


class NodeFacade(Protocol):
    """`worldmove.node.Node`, as far as HTTP is concerned. All errors are `worldmove.errors`."""

    @property
    def name(self) -> str:
        """The node's stable name."""

    @property
    def settings(self) -> Settings:
        """The options it was started with."""

    async def start(self) -> None:
        """Claims the name in the ledger and starts keeper, executors and lanes."""

    async def close(self) -> None:
        """Finishes or rolls back every move, then ends what it started."""

    async def abort(self) -> None:
        """Ends at once; every move is left to the ledger's record."""

    async def fenced(self) -> None:
        """Returns when a later incarnation has claimed the node's name: nothing is left but to `abort`."""

    async def ready(self) -> list[str]:
        """What is missing before moves can be accepted; empty when ready."""

    async def register(self, spec: SessionSpec) -> Registration:
        """Registers a running world."""

    async def open_standby(self, spec: SessionSpec) -> Registration:
        """Registers a worker that waits for a world."""

    async def drop_standby(self, standby_id: str, /) -> None:
        """Forgets a waiting worker and frees its memory."""

    async def sessions(self, after: str | None, limit: int) -> SessionPage:
        """A page of sessions, ordered by id."""

    async def session(self, session_id: str, /) -> SessionView:
        """One session."""

    async def end_session(self, session_id: str, /) -> None:
        """Ends a session and frees its memory."""

    async def resolve_session(self, session_id: str, decision: Literal["keep", "end"], /) -> Resolution:
        """An operator's way out of a fenced or lost session."""

    def session_events(self, session_id: str, after_seq: int | None, /) -> AsyncIterator[SessionEvent]:
        """Changes of one session, after `after_seq`; the present state first where it is `None`."""

    async def digest(self, session_id: str, /) -> DigestView:
        """The digest of one block."""

    async def boundary(
        self, session_id: str, rank: int, block: int, host_state: bytes, wait_ms: float, /
    ) -> BoundaryView:
        """The boundary for stacks that can't map the control page."""

    async def attach(self, session_id: str, fingerprint: dict[str, str], /) -> Registration:
        """Hands an unattended session to another worker."""

    async def migrate(self, request: MigrationRequest, idempotency_key: str | None, /) -> MigrationView:
        """Takes on a move."""

    async def dry_run(self, request: MigrationRequest, /) -> DryRun:
        """Would a move be taken on now?"""

    async def migrations(self, after: str | None, limit: int) -> MigrationPage:
        """A page of moves, newest first."""

    async def migration(self, migration_id: str, /) -> MigrationView:
        """One move."""

    def migration_events(self, migration_id: str, /) -> AsyncIterator[MigrationView]:
        """Progress of one move; ends after its last state."""

    async def cancel(self, migration_id: str, /) -> MigrationView:
        """Aborts a move to its source."""

    async def nodes(self) -> list[PeerNode]:
        """The nodes that the ledger knows."""

    async def view(self) -> NodeView:
        """This node."""

    def metrics(self) -> bytes:
        """Prometheus text."""

    async def serve_peer(self, channel: PeerChannel, /) -> None:
        """Speaks with the source of one inbound move until it ends."""
