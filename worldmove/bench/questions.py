"""Everything that gateways, operators and monitors ask a node, asked in turn, for `worldmove bench scale`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from worldmove.errors import PeerError

ASK_EVERY_S = 0.005
TIMEOUT_S = 60.0


class Asked(NamedTuple):
    """Milliseconds of one answer, the asking client's own share included; `call` is the route."""

    call: str
    took_ms: float


async def call(client: httpx.AsyncClient, method: str, url: str, **body: object) -> httpx.Response:
    """One call that has to succeed.

    Raises:
        PeerError: there was no answer, or it was a problem.
    """
    try:
        response = await client.request(method, url, json=body or None)
    except httpx.HTTPError as error:
        raise PeerError(f"{url} did not answer: {error!r}") from error
    if not response.is_success:
        raise PeerError(f"{url} answered {response.status_code}: {response.text[:500]}")
    return response


async def ask(url: str, names: Sequence[str], over: asyncio.Event) -> list[Asked]:
    """Asks the node at `url` until `over`, at least once.

    Args:
        url: of the node.
        names: ids of sessions to ask for.
        over: ends it, after the question under way.

    Raises:
        PeerError: a question had no good answer.
    """
    asked: list[Asked] = []
    choose = random.Random(1)  # noqa: S311 - which session is asked for, no secret
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        while True:
            name = choose.choice(names)
            for route, path in (
                ("healthz", "/v1/healthz"),
                ("session", f"/v1/sessions/{name}"),
                ("sessions", f"/v1/sessions?limit=100&after={name}"),
                ("node", "/v1/node"),
                ("migrations", "/v1/migrations"),
                ("nodes", "/v1/nodes"),
                ("metrics", "/metrics"),
            ):
                began = time.perf_counter()
                await call(client, "GET", f"{url}{path}")
                asked.append(Asked(route, (time.perf_counter() - began) * 1000))
                if over.is_set():
                    return asked
                await asyncio.sleep(ASK_EVERY_S)
