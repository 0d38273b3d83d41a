"""The REST calls as data: method, path, body and what comes back; both clients run them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import msgspec

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
    SessionPage,
    SessionSpec,
    SessionView,
)

T = TypeVar("T")
TIMEOUT = 10.0
"""Seconds in which a node must answer, unless the caller says otherwise."""
EVENT_SILENCE = 45.0
"""Seconds that an event stream may be silent; the server sends a comment every 15."""


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One request. `answer` is the type of a good answer; `patience` seconds are added to the time-out."""

    method: str
    path: str
    answer: type[T]
    query: Mapping[str, str | int | float] = {}
    body: Any = None
    headers: Mapping[str, str] = {}
    patience: float = 0.0


class Nodes(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/nodes`."""

    nodes: tuple[PeerNode, ...]


class Nothing(msgspec.Struct, frozen=True):
    """Answer without content."""


def _page(after: str | None, limit: int) -> dict[str, str | int | float]:
    query: dict[str, str | int | float] = {"limit": limit}
    return query if after is None else query | {"after": after}


def _in_path(text: str) -> str:
    return quote(text, safe="")


def _registration(spec: SessionSpec) -> dict[str, Any]:
    manifest = spec.manifest
    body = {
        "model": manifest.model,
        "endpoint": manifest.endpoint,
        "regions": msgspec.to_builtins(manifest.regions),
        "block_ms": manifest.block_ms,
        "horizon_ms": manifest.horizon_ms,
        "host_state_bytes": manifest.host_state_bytes,
        "snapshot_every": manifest.snapshot_every or None,
        "fingerprint": spec.fingerprint,
    }
    return {name: value for name, value in body.items() if value is not None}


def register(spec: SessionSpec) -> Call[Registration]:
    """`POST /v1/sessions`."""
    chosen = {} if spec.id is None else {"id": spec.id}
    return Call("POST", "/v1/sessions", Registration, body=_registration(spec) | chosen)


def open_standby(spec: SessionSpec) -> Call[Registration]:
    """`POST /v1/standbys`."""
    return Call("POST", "/v1/standbys", Registration, body=_registration(spec))


def drop_standby(standby_id: str) -> Call[Nothing]:
    """`DELETE /v1/standbys/{id}`."""
    return Call("DELETE", f"/v1/standbys/{_in_path(standby_id)}", Nothing)


def sessions(after: str | None, limit: int) -> Call[SessionPage]:
    """`GET /v1/sessions`."""
    return Call("GET", "/v1/sessions", SessionPage, query=_page(after, limit))


def session(session_id: str) -> Call[SessionView]:
    """`GET /v1/sessions/{id}`."""
    return Call("GET", f"/v1/sessions/{_in_path(session_id)}", SessionView)


def end_session(session_id: str) -> Call[Nothing]:
    """`DELETE /v1/sessions/{id}`."""
    return Call("DELETE", f"/v1/sessions/{_in_path(session_id)}", Nothing)


def resolve_session(session_id: str, decision: Literal["keep", "end"]) -> Call[Resolution]:
    """`POST /v1/sessions/{id}/resolve`."""
    path = f"/v1/sessions/{_in_path(session_id)}/resolve"
    body = {"decision": decision, "confirm": session_id}
    return Call("POST", path, Resolution, body=body, patience=20.0)


def session_events(session_id: str) -> str:
    """Path of `GET /v1/sessions/{id}/events`."""
    return f"/v1/sessions/{_in_path(session_id)}/events"


def digest(session_id: str) -> Call[DigestView]:
    """`GET /v1/sessions/{id}/digest`."""
    return Call("GET", f"/v1/sessions/{_in_path(session_id)}/digest", DigestView, patience=60.0)


def boundary(session_id: str, rank: int, block: int, host_state: bytes, wait_ms: float) -> Call[BoundaryView]:
    """`POST /v1/sessions/{id}/boundary`."""
    body = {
        "rank": rank,
        "block": block,
        "host_state": base64.b64encode(host_state).decode(),
        "wait_ms": wait_ms,
    }
    path = f"/v1/sessions/{_in_path(session_id)}/boundary"
    return Call("POST", path, BoundaryView, body=body, patience=wait_ms / 1000)


def attach(session_id: str, fingerprint: Mapping[str, str]) -> Call[Registration]:
    """`POST /v1/sessions/{id}/attach`."""
    path = f"/v1/sessions/{_in_path(session_id)}/attach"
    return Call("POST", path, Registration, body={"fingerprint": dict(fingerprint)})


def _move(request: MigrationRequest) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(request)
    return {name: value for name, value in built.items() if value is not None}


def migrate(request: MigrationRequest, idempotency_key: str | None) -> Call[MigrationView]:
    """`POST /v1/migrations`."""
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    return Call("POST", "/v1/migrations", MigrationView, body=_move(request), headers=headers, patience=20.0)


def dry_run(request: MigrationRequest) -> Call[DryRun]:
    """`POST /v1/migrations?dry_run=true`."""
    return Call(
        "POST", "/v1/migrations", DryRun, query={"dry_run": "true"}, body=_move(request), patience=20.0
    )


def migrations(after: str | None, limit: int) -> Call[MigrationPage]:
    """`GET /v1/migrations`."""
    return Call("GET", "/v1/migrations", MigrationPage, query=_page(after, limit))


def migration(migration_id: str) -> Call[MigrationView]:
    """`GET /v1/migrations/{id}`."""
    return Call("GET", f"/v1/migrations/{_in_path(migration_id)}", MigrationView)


def migration_events(migration_id: str) -> str:
    """Path of `GET /v1/migrations/{id}/events`."""
    return f"/v1/migrations/{_in_path(migration_id)}/events"


def cancel(migration_id: str) -> Call[MigrationView]:
    """`DELETE /v1/migrations/{id}`."""
    return Call("DELETE", f"/v1/migrations/{_in_path(migration_id)}", MigrationView, patience=20.0)


def nodes() -> Call[Nodes]:
    """`GET /v1/nodes`."""
    return Call("GET", "/v1/nodes", Nodes)


def node() -> Call[NodeView]:
    """`GET /v1/node`."""
    return Call("GET", "/v1/node", NodeView)
