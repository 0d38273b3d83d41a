"""Blocking client of a node's REST interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import httpx

from worldmove.client import calls
from worldmove.client.answers import EventReader, error_of, event_view, owner_of, unreachable, view_of
from worldmove.client.calls import EVENT_SILENCE, TIMEOUT, Call
from worldmove.dialing import http_options
from worldmove.errors import ConnectionLostError, NotOwnerError
from worldmove.views import (
    ENDED_STATES,
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

T = TypeVar("T")


class Client:
    """One node's REST interface, blocking; may be shared by threads.

    A node that doesn't own a session says who does, and the call is made there instead. All errors are
    `worldmove.errors`: the class that the problem's code names, PeerError where the node can't be
    reached, DeadlineError where it doesn't answer.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = TIMEOUT,
        tls_ca: Path | str | None = None,
    ) -> None:
        """Connects lazily.

        Args:
            url: of any node.
            token: bearer token.
            timeout: seconds for an answer.
            tls_ca: PEM file of the authorities that are trusted; the system's own if left out.

        Raises:
            ConfigError: `tls_ca` can't be used.
        """
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._http = httpx.Client(**http_options(token, timeout, tls_ca))
        self._moves: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def register(self, spec: SessionSpec) -> Registration:
        """Registers a running world."""
        return self._run(calls.register(spec))

    def open_standby(self, spec: SessionSpec) -> Registration:
        """Registers a worker that waits for a world."""
        return self._run(calls.open_standby(spec))

    def drop_standby(self, standby_id: str) -> None:
        """Forgets a waiting worker."""
        self._run(calls.drop_standby(standby_id))

    def sessions(self, after: str | None = None, limit: int = 100) -> SessionPage:
        """A page of sessions."""
        return self._run(calls.sessions(after, limit))

    def session(self, session_id: str) -> SessionView:
        """One session."""
        return self._run(calls.session(session_id))

    def end_session(self, session_id: str) -> None:
        """Ends a session."""
        self._run(calls.end_session(session_id))

    def resolve_session(self, session_id: str, decision: Literal["keep", "end"]) -> Resolution:
        """Decides, as an operator, about a session that nothing else settles; see docs/operations.md."""
        return self._run(calls.resolve_session(session_id, decision))

    def digest(self, session_id: str) -> DigestView:
        """The digest of one block; holds the world at a boundary meanwhile."""
        return self._run(calls.digest(session_id))

    def boundary(
        self, session_id: str, *, rank: int = 0, block: int, host_state: bytes = b"", wait_ms: float = 0.0
    ) -> BoundaryView:
        """The boundary for stacks that can't map the control page."""
        return self._run(calls.boundary(session_id, rank, block, host_state, wait_ms))

    def attach(self, session_id: str, fingerprint: Mapping[str, str]) -> Registration:
        """Takes up a session whose worker is gone."""
        return self._run(calls.attach(session_id, fingerprint))

    def migrate(self, request: MigrationRequest, idempotency_key: str | None = None) -> MigrationView:
        """Asks for a move."""
        call = calls.migrate(request, idempotency_key)
        view, where = self._follow(call, self.url)
        if where != self.url:
            self._moves[view.id] = where
        return view

    def dry_run(self, request: MigrationRequest) -> DryRun:
        """Would the move be taken on now?"""
        return self._run(calls.dry_run(request))

    def migrations(self, after: str | None = None, limit: int = 100) -> MigrationPage:
        """A page of moves, newest first."""
        return self._run(calls.migrations(after, limit))

    def migration(self, migration_id: str) -> MigrationView:
        """One move."""
        return self._follow(calls.migration(migration_id), self._home(migration_id))[0]

    def cancel(self, migration_id: str) -> MigrationView:
        """Aborts a move to its source."""
        return self._follow(calls.cancel(migration_id), self._home(migration_id))[0]

    def nodes(self) -> tuple[PeerNode, ...]:
        """The nodes of the fleet."""
        return self._run(calls.nodes()).nodes

    def node(self) -> NodeView:
        """The asked node itself."""
        return self._run(calls.node())

    def session_events(self, session_id: str, after_seq: int | None = None) -> Iterator[SessionEvent]:
        """Changes of one session until the stream ends; go on after the last event's `seq`."""
        headers = {} if after_seq is None else {"Last-Event-ID": str(after_seq)}
        yield from self._events(self.url, calls.session_events(session_id), SessionEvent, headers)

    def migration_events(self, migration_id: str) -> Iterator[MigrationView]:
        """Progress of one move; ends after its last state."""
        path = calls.migration_events(migration_id)
        yield from self._events(self._home(migration_id), path, MigrationView, {})

    def wait(self, migration_id: str) -> MigrationView:
        """The move once it has ended.

        Raises:
            ConnectionLostError: the node went away before.
        """
        for view in self.migration_events(migration_id):
            if view.state in ENDED_STATES:
                return view
        raise ConnectionLostError(f"the events of move {migration_id} stopped before it ended")

    def _home(self, migration_id: str) -> str:
        return self._moves.get(migration_id, self.url)

    def _run(self, call: Call[T]) -> T:
        return self._follow(call, self.url)[0]

    def _follow(self, call: Call[T], base: str) -> tuple[T, str]:
        tried = {base}
        while True:
            try:
                return view_of(call, self._send(call, base)), base
            except NotOwnerError as error:
                owner = owner_of(error, tried, base)
                if owner is None:
                    raise
                tried.add(base := owner)

    def _send(self, call: Call[T], base: str) -> httpx.Response:
        try:
            return self._http.request(
                call.method,
                base + call.path,
                params=dict(call.query),
                json=call.body,
                headers=dict(call.headers),
                timeout=self._timeout + call.patience,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(base, error) from error

    def _events(self, base: str, path: str, kind: type[T], headers: dict[str, str]) -> Iterator[T]:
        reader = EventReader()
        timeout = httpx.Timeout(self._timeout, read=EVENT_SILENCE)
        try:
            with self._http.stream("GET", base + path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise error_of(response.status_code, response.read())
                for line in response.iter_lines():
                    event = reader.feed(line)
                    if event is not None:
                        yield event_view(event, kind)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(base, error) from error
