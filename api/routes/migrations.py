"""Migrations: request, dry run, progress, receipt, cancellation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from api import problems
from api.deps import After, IdempotencyKey, IdPath, Limit, NodeDep, Stopping, answer, stream
from api.limits import limited
from api.openapi import describes
from api.schemas import MigrationBody
from api.security import ANYBODY, OPERATOR, requires
from worldmove.errors import (
    AlreadyMovingError,
    ConflictError,
    FingerprintMismatchError,
    GateFullError,
    IdempotencyMismatchError,
    InadmissibleError,
    LedgerError,
    ManifestError,
    NoMemoryError,
    NotFoundError,
    NotOwnerError,
    NoWorkerError,
    PeerError,
    RateLimitedError,
    SamePlaceError,
    ValidationError,
)
from worldmove.views import DryRun, MigrationPage, MigrationView

router = APIRouter(prefix="/v1/migrations", tags=["migrations"])
_ANYBODY = [Depends(requires(ANYBODY))]
_OPERATOR = [Depends(requires(OPERATOR))]
_REFUSALS = (
    ValidationError,
    ManifestError,
    IdempotencyMismatchError,
    NotFoundError,
    FingerprintMismatchError,
    AlreadyMovingError,
    NotOwnerError,
    SamePlaceError,
    InadmissibleError,
    GateFullError,
    NoMemoryError,
    NoWorkerError,
    RateLimitedError,
    PeerError,
    LedgerError,
)


@router.post(
    "",
    status_code=202,
    dependencies=[*_OPERATOR, Depends(limited("move"))],
    responses=describes(202, MigrationView) | describes(200, DryRun) | problems.documented(*_REFUSALS),
)
async def migrate(
    body: MigrationBody,
    node: NodeDep,
    idempotency_key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Only say whether the move would be taken on.")] = False,
) -> Response:
    """Takes on a move, or refuses it with what was required and available."""
    if dry_run:
        return answer(await node.dry_run(body.request()))
    move = await node.migrate(body.request(), idempotency_key)
    return answer(move, 202, Location=f"/v1/migrations/{move.id}")


@router.get(
    "",
    dependencies=_ANYBODY,
    responses=describes(200, MigrationPage) | problems.documented(ValidationError),
)
async def migrations(node: NodeDep, after: After = None, limit: Limit = 100) -> Response:
    """Lists the moves that this node knows, newest first."""
    return answer(await node.migrations(after, limit))


@router.get(
    "/{id}",
    dependencies=_ANYBODY,
    responses=describes(200, MigrationView) | problems.documented(ValidationError, NotFoundError),
)
async def migration(node: NodeDep, id: IdPath) -> Response:  # noqa: A002 - the contract's name
    """Shows one move: state, rounds, bytes, times, and the receipt once it ended."""
    return answer(await node.migration(id))


async def _known(node: NodeDep, id: IdPath) -> None:  # noqa: A002
    # Before the stream starts: afterwards its status can no longer say 404.
    await node.migration(id)


@router.get(
    "/{id}/events",
    dependencies=[*_ANYBODY, Depends(_known)],
    response_class=EventSourceResponse,
    responses=problems.documented(ValidationError, NotFoundError),
)
async def migration_events(
    node: NodeDep,
    stopping: Stopping,
    id: IdPath,  # noqa: A002
) -> AsyncIterator[ServerSentEvent]:
    """Streams the progress of one move; ends after its last state."""
    async for event in stream(stopping, node.migration_events(id), _shown):
        yield event


def _shown(move: MigrationView) -> ServerSentEvent:
    return ServerSentEvent(event=move.state, raw_data=msgspec.json.encode(move).decode())


@router.delete(
    "/{id}",
    dependencies=_OPERATOR,
    responses=describes(200, MigrationView)
    | problems.documented(ValidationError, NotFoundError, ConflictError),
)
async def cancel(node: NodeDep, id: IdPath) -> Response:  # noqa: A002
    """Cancels a move: it aborts to its source. A move that was committed already stays committed."""
    return answer(await node.cancel(id))
