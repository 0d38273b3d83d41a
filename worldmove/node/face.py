"""What callers ask of a node about sessions, standbys and moves, and who in it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from worldmove.driver import PeerChannel
from worldmove.node.moving import Moves
from worldmove.node.registering import Registrar
from worldmove.node.resolving import Decision
from worldmove.views import (
    BoundaryView,
    DigestView,
    DryRun,
    MigrationPage,
    MigrationRequest,
    MigrationView,
    Registration,
    Resolution,
    SessionEvent,
    SessionPage,
    SessionSpec,
    SessionView,
)


class Face:
    """A node as its callers see it, once it has started."""

    def __init__(self) -> None:
        self._registrar: Registrar
        self._moves: Moves
        self._lost: set[str] = set()

    async def register(self, spec: SessionSpec) -> Registration:
        """Registers a running world; see `Registrar.register`."""
        return await self._registrar.register(spec)

    async def open_standby(self, spec: SessionSpec) -> Registration:
        """Registers a worker that waits for a world; see `Registrar.open_standby`."""
        return await self._registrar.open_standby(spec)

    async def drop_standby(self, standby_id: str, /) -> None:
        """Forgets a waiting worker and frees its memory; see `Registrar.drop_standby`."""
        self._registrar.drop_standby(standby_id)

    async def sessions(self, after: str | None, limit: int) -> SessionPage:
        """A page of sessions, ordered by id."""
        return await self._registrar.page(after, limit)

    async def session(self, session_id: str, /) -> SessionView:
        """One session, wherever it is."""
        return await self._registrar.session(session_id)

    async def end_session(self, session_id: str, /) -> None:
        """Ends a session; see `Registrar.end`."""
        await self._registrar.end(session_id)
        self._lost.discard(session_id)

    async def resolve_session(self, session_id: str, decision: Decision, /) -> Resolution:
        """An operator's way out of a fenced or lost session; see `Resolver.resolve`."""
        session = await self._registrar.resolve(session_id, decision)
        self._lost.discard(session_id)
        return Resolution(id=session_id, decision=decision, session=session)

    def session_events(self, session_id: str, after_seq: int | None, /) -> AsyncIterator[SessionEvent]:
        """News of a session."""
        return self._registrar.events(session_id, after_seq)

    async def digest(self, session_id: str, /) -> DigestView:
        """The digest of a world at its next boundary; see `Registrar.digest`."""
        return await self._registrar.digest(session_id)

    async def boundary(
        self, session_id: str, rank: int, block: int, host_state: bytes, wait_ms: float
    ) -> BoundaryView:
        """A boundary of a worker without a control page; see `Registrar.boundary`."""
        return await self._registrar.boundary(session_id, rank, block, host_state, wait_ms)

    async def attach(self, session_id: str, fingerprint: dict[str, str], /) -> Registration:
        """Tickets to take up an unattended session; see `Registrar.attach`."""
        return await self._registrar.attach(session_id, fingerprint)

    async def migrate(self, request: MigrationRequest, idempotency_key: str | None, /) -> MigrationView:
        """Starts a move; see `Moves.migrate`."""
        return await self._moves.migrate(request, idempotency_key)

    async def dry_run(self, request: MigrationRequest, /) -> DryRun:
        """The verdict alone; see `Moves.dry_run`."""
        return await self._moves.dry_run(request)

    async def migrations(self, after: str | None, limit: int) -> MigrationPage:
        """Moves that this node knows, newest first."""
        return await self._moves.migrations(after, limit)

    async def migration(self, migration_id: str, /) -> MigrationView:
        """One move; see `Moves.migration`."""
        return await self._moves.migration(migration_id)

    def migration_events(self, migration_id: str, /) -> AsyncIterator[MigrationView]:
        """A move as it goes on."""
        return self._moves.events(migration_id)

    async def cancel(self, migration_id: str, /) -> MigrationView:
        """Gives a move up; see `Moves.cancel`."""
        return await self._moves.cancel(migration_id)

    async def serve_peer(self, channel: PeerChannel, /) -> None:
        """The destination's side of a move; see `Moves.serve_peer`."""
        await self._moves.serve_peer(channel)
