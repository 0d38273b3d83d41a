"""Asks nodes for their health while something else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import httpx

from worldmove.errors import PeerError

EVERY_S = 0.01
TIMEOUT_S = 10.0


class Answers(NamedTuple):
    """Milliseconds that each answer took, the client's own share included."""

    took_ms: list[float]


@contextlib.asynccontextmanager
async def answering(urls: Sequence[str]) -> AsyncIterator[Answers]:
    """Asks every node for `/v1/healthz` again and again while the block runs.

    Raises:
        PeerError: a node did not answer, or not well.
    """
    answers = Answers([])
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            await _ask(client, url)
        tasks = [asyncio.create_task(_keep_asking(client, url, answers)) for url in urls]
        try:
            yield answers
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, PeerError):
            raise result


async def _keep_asking(client: httpx.AsyncClient, url: str, answers: Answers) -> None:
    while True:
        answers.took_ms.append(await _ask(client, url))
        await asyncio.sleep(EVERY_S)


async def _ask(client: httpx.AsyncClient, url: str) -> float:
    start = time.perf_counter()
    try:
        response = await client.get(f"{url}/v1/healthz")
    except httpx.HTTPError as error:
        raise PeerError(f"{url} did not answer: {error}") from error
    if not response.is_success:
        raise PeerError(f"{url} answered {response.status_code}")
    return (time.perf_counter() - start) * 1000
