"""Standbys: workers that wait on this node to be handed a session."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from starlette.responses import Response

from api import problems
from api.deps import IdPath, NodeDep, answer
from api.limits import limited
from api.openapi import describes
from api.schemas import StandbyBody
from api.security import WORKER, requires
from worldmove.errors import (
    ConflictError,
    ManifestError,
    NoMemoryError,
    NotFoundError,
    RateLimitedError,
    ValidationError,
)
from worldmove.views import Registration

router = APIRouter(prefix="/v1/standbys", tags=["standbys"], dependencies=[Depends(requires(WORKER))])


@router.post(
    "",
    status_code=201,
    dependencies=[Depends(limited("register"))],
    responses=describes(201, Registration)
    | problems.documented(ValidationError, ManifestError, NoMemoryError, RateLimitedError),
)
async def open_standby(body: StandbyBody, node: NodeDep) -> Response:
    """Registers a waiting worker and reserves its memory; a move binds it to a session."""
    registration = await node.open_standby(body.spec())
    return answer(registration, 201, Location=f"/v1/standbys/{registration.id}")


@router.delete(
    "/{id}",
    status_code=204,
    responses=problems.documented(ValidationError, NotFoundError, ConflictError),
)
async def drop_standby(node: NodeDep, id: IdPath) -> Response:  # noqa: A002 - the contract's name
    """Forgets a waiting worker and frees its memory."""
    await node.drop_standby(id)
    return Response(status_code=204)
