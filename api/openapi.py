"""The OpenAPI document: FastAPI's own for requests, and the schemas of `worldmove.views` for answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.problems import Problem
from worldmove import views
from worldmove.views import View

_TEMPLATE = "#/components/schemas/{name}"


class Health(View, frozen=True, kw_only=True):
    """Answer of `/v1/healthz`."""

    status: str


class Ready(View, frozen=True, kw_only=True):
    """Answer of `/v1/readyz`."""

    ready: bool


class Nodes(View, frozen=True, kw_only=True):
    """Answer of `/v1/nodes`."""

    nodes: tuple[views.PeerNode, ...]


ANSWERS: tuple[type[msgspec.Struct], ...] = (
    Health,
    Ready,
    Nodes,
    Problem,
    views.BoundaryView,
    views.DigestView,
    views.DryRun,
    views.MigrationPage,
    views.MigrationView,
    views.NodeView,
    views.Registration,
    views.Resolution,
    views.SessionEvent,
    views.SessionPage,
    views.SessionView,
)


def describes(status: int, view: type[msgspec.Struct] | str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` of a good answer."""
    name = view if isinstance(view, str) else view.__name__
    schema = {"$ref": _TEMPLATE.format(name=name)}
    return {status: {"description": "Done", "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """Builds the whole document; the result belongs to the caller."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    _, components = msgspec.json.schema_components(ANSWERS, ref_template=_TEMPLATE)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(components)
    made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"bearer": []}]
    return made
