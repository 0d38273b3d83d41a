"""Sessions: registration, listing, events, digest, the boundary over HTTP, attachment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from api import problems
from api.deps import After, IdPath, Limit, NodeDep, Stopping, answer, stream
from api.limits import limited
from api.openapi import describes
from api.schemas import AttachBody, BoundaryBody, ResolveBody, SessionBody
from api.security import ANYBODY, OPERATOR, WORKER, requires
from worldmove.errors import (
    ConflictError,
    DeadlineError,
    FingerprintMismatchError,
    LedgerError,
    ManifestError,
    NoMemoryError,
    NotFoundError,
    NotOwnerError,
    NoWorkerError,
    RateLimitedError,
    SessionExistsError,
    ValidationError,
)
from worldmove.views import (
    BoundaryView,
    DigestView,
    Registration,
    Resolution,
    SessionEvent,
    SessionPage,
    SessionView,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
_ANYBODY = [Depends(requires(ANYBODY))]
_OPERATOR = [Depends(requires(OPERATOR))]
_WORKER = [Depends(requires(WORKER))]


@router.post(
    "",
    status_code=201,
    dependencies=[*_WORKER, Depends(limited("register"))],
    responses=describes(201, Registration)
    | problems.documented(
        ValidationError,
        ManifestError,
        SessionExistsError,
        NoMemoryError,
        RateLimitedError,
    ),
)
async def register(body: SessionBody, node: NodeDep) -> Response:
    """Registers a running world; the answer says where its ranks fetch their descriptors."""
    registration = await node.register(body.spec(body.id))
    return answer(registration, 201, Location=f"/v1/sessions/{registration.id}")


@router.get(
    "",
    dependencies=_ANYBODY,
    responses=describes(200, SessionPage) | problems.documented(ValidationError),
)
async def sessions(node: NodeDep, after: After = None, limit: Limit = 100) -> Response:
    """Lists sessions of this node, ordered by id."""
    return answer(await node.sessions(after, limit))


@router.get(
    "/{id}",
    dependencies=_ANYBODY,
    responses=describes(200, SessionView) | problems.documented(ValidationError, NotFoundError),
)
async def session(node: NodeDep, id: IdPath) -> Response:  # noqa: A002 - the contract's name
    """Shows one session, also one that another node owns."""
    return answer(await node.session(id))


@router.delete(
    "/{id}",
    status_code=204,
    dependencies=_WORKER,
    responses=problems.documented(ValidationError, NotFoundError, NotOwnerError, ConflictError),
)
async def end_session(node: NodeDep, id: IdPath) -> Response:  # noqa: A002
    """Ends a session: its worker is told, its memory is freed."""
    await node.end_session(id)
    return Response(status_code=204)


async def _known(node: NodeDep, id: IdPath) -> None:  # noqa: A002
    # Before the stream starts: afterwards its status can no longer say 404.
    await node.session(id)


@router.get(
    "/{id}/events",
    dependencies=[*_ANYBODY, Depends(_known)],
    response_class=EventSourceResponse,
    responses=problems.documented(ValidationError, NotFoundError),
)
async def session_events(
    node: NodeDep,
    stopping: Stopping,
    id: IdPath,  # noqa: A002
    after_seq: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Streams changes of owner, endpoint and state: what a gateway needs to route viewers."""
    after = after_seq if last_event_id is None else last_event_id
    async for event in stream(stopping, node.session_events(id, after), _shown):
        yield event


def _shown(event: SessionEvent) -> ServerSentEvent:
    return ServerSentEvent(id=str(event.seq), event=event.type, raw_data=msgspec.json.encode(event).decode())


@router.get(
    "/{id}/digest",
    dependencies=_ANYBODY,
    responses=describes(200, DigestView)
    | problems.documented(ValidationError, NotFoundError, NotOwnerError, ConflictError, DeadlineError),
)
async def digest(node: NodeDep, id: IdPath) -> Response:  # noqa: A002
    """Digests one block; the world stands at a boundary meanwhile, for at most the horizon."""
    return answer(await node.digest(id))


@router.post(
    "/{id}/boundary",
    dependencies=_WORKER,
    responses=describes(200, BoundaryView)
    | problems.documented(ValidationError, NotFoundError, NotOwnerError, ConflictError),
)
async def boundary(node: NodeDep, id: IdPath, body: BoundaryBody) -> Response:  # noqa: A002
    """The boundary for stacks that can't map the control page; long poll of up to `wait_ms`."""
    return answer(await node.boundary(id, body.rank, body.block, body.decoded_state(), body.wait_ms))


@router.post(
    "/{id}/attach",
    dependencies=_WORKER,
    responses=describes(200, Registration)
    | problems.documented(
        ValidationError, NotFoundError, NotOwnerError, ConflictError, FingerprintMismatchError, NoWorkerError
    ),
)
async def attach(node: NodeDep, id: IdPath, body: AttachBody) -> Response:  # noqa: A002
    """Hands a session whose worker is gone to another worker."""
    return answer(await node.attach(id, dict(body.fingerprint)))


@router.post(
    "/{id}/resolve",
    dependencies=_OPERATOR,
    responses=describes(200, Resolution)
    | problems.documented(
        ValidationError, NotFoundError, NotOwnerError, ConflictError, DeadlineError, LedgerError
    ),
)
async def resolve(node: NodeDep, id: IdPath, body: ResolveBody) -> Response:  # noqa: A002
    """Decides about a session that no record settles, or that nobody holds any more. Break-glass."""
    body.check(id)
    return answer(await node.resolve_session(id, body.decision))
