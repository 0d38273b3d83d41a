"""The HTTP application of one node."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from api import openapi, problems
from api.facade import NodeFacade
from api.guard import Guard
from api.limits import Limits
from api.routes import health, migrations, peers, sessions, standbys
from api.security import Security

DESCRIPTION = "Moves live sessions between devices: bit-identical, or nothing is installed."


class App(FastAPI):
    """FastAPI whose document shows the structs that the node answers with."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, built at first use."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.document(self)
        return self.openapi_schema


def create_app(node: NodeFacade) -> App:
    """The application over `node`, which the caller starts and closes.

    Set `app.state.stopping` before shutting the server down: open event streams end on it.

    Raises:
        ConfigError: the token file is wrong.
    """
    security = Security(node.settings)
    # The interactive docs page would load scripts from elsewhere into the node's own origin.
    app = App(
        title="WorldMove",
        version=version("worldmove"),
        description=DESCRIPTION,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.node = node
    app.state.security = security
    app.state.limits = Limits(node.settings)
    app.state.stopping = asyncio.Event()
    problems.install(app)
    for module in (health, sessions, standbys, migrations, peers):
        app.include_router(module.router)
    app.add_middleware(Guard, security=security)
    return app
