"""`worldmove bench scale`: one node with thousands of sessions, hundreds of workers, dozens of moves.

What counts is how the node answers meanwhile: every kind of question that a gateway, an operator or a monitor
asks, again and again, while moves run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any

import httpx
import msgspec
import uvloop

from worldmove.bench.crowd import spec
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.bench.processes import own_bytes
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import quantile
from worldmove.errors import PeerError, ProcessLostError
from worldmove.memory.limits import raise_descriptor_limit
from worldmove.page.control import page_bytes

P99_BAR_MS = 50.0
PER_SESSION = 2
"""Descriptors of a session with one extent, in its node and in the keeper."""
SPARE_DESCRIPTORS = 1000
REGISTERING = 16
CROWDS = 4
MOVE_BYTES = 4 << 20
ASK_EVERY_S = 0.005
TIMEOUT_S = 60.0
OPTIONS = ("--register-rate", "0", "--move-rate", "0", "--gate-rate", "100Mbit", "--path", "local")


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    `own_bytes_per_session`: anonymous memory and page tables of node and keeper by which one idle session
    makes them grow; `page_bytes_per_session`: at most, its control page with 4 KiB of host state.
    """

    sessions: int
    workers: int
    moves: int
    moved: int
    descriptors_limit: int
    register_per_s: float
    own_bytes_per_session: int
    page_bytes_per_session: int
    moves_s: float
    rest_calls: int
    rest_ms_p50: float
    rest_ms_p99: float
    rest_ms_max: float
    metrics_series: int


def run(*, sessions: int = 10_000, workers: int = 200, moves: int = 50, json: bool = False) -> int:
    """Measures and shows.

    Args:
        sessions: registered at one node; fewer where the limit of open descriptors does not allow as many.
        workers: connected worlds that generate meanwhile.
        moves: asked for at the same time.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move was released.

    Raises:
        WorldMoveError: a node or a worker failed.
    """
    limit = raise_descriptor_limit()
    possible = (limit - SPARE_DESCRIPTORS) // PER_SESSION - 2 * workers - moves
    result = uvloop.run(_measure(min(sessions, possible), workers, moves, limit))
    lines = [
        Line("sessions", str(result.sessions), f"{sessions} wanted, {limit} descriptors allowed"),
        Line("registered", f"{result.register_per_s:.0f} /s"),
        Line("node and keeper, each session", f"{result.own_bytes_per_session} bytes"),
        Line("moves released", f"{result.moved} of {result.moves} in {result.moves_s:.1f} s"),
        Line("REST p50 while moves run", f"{result.rest_ms_p50:.1f} ms"),
        Line("REST p99", f"{result.rest_ms_p99:.1f} ms", at_most(result.rest_ms_p99, P99_BAR_MS, "ms")),
        Line("REST max", f"{result.rest_ms_max:.1f} ms"),
        Line("series at /metrics", str(result.metrics_series)),
    ]
    title = f"one node with {result.sessions} sessions and {workers} workers, {moves} moves"
    show(title, result, lines, json=json)
    return 0 if result.moved == result.moves else 1


async def _measure(sessions: int, workers: int, moves: int, limit: int) -> ScaleResult:
    client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
    async with client, running_nodes(("A", "B"), OPTIONS) as nodes:
        here = nodes[0]
        view = (await _call(client, "GET", f"{here.url}/v1/node")).json()
        pids = [here.pid, view["keeper"]]
        before, began = own_bytes(pids), time.perf_counter()
        await _register(client, here, "idle", sessions, spec())
        register_s = time.perf_counter() - began
        each = (own_bytes(pids) - before) // max(sessions, 1)
        large = spec() | {"regions": [{"name": "k", "dtype": "uint8", "shape": [MOVE_BYTES]}]}
        await _register(client, here, "moving", moves, large)
        async with _crowds(here, workers):
            began = time.perf_counter()
            over = asyncio.Event()
            moved, took = await _all([_move_all(client, here, moves, over), _ask(here, sessions, over)])
            moves_s = time.perf_counter() - began
            text = (await _call(client, "GET", f"{here.url}/metrics")).text
        return ScaleResult(
            sessions=sessions,
            workers=workers,
            moves=moves,
            moved=moved,
            descriptors_limit=limit,
            register_per_s=sessions / register_s,
            own_bytes_per_session=each,
            page_bytes_per_session=page_bytes(1, 4096),
            moves_s=moves_s,
            rest_calls=len(took),
            rest_ms_p50=quantile(took, 0.5),
            rest_ms_p99=quantile(took, 0.99),
            rest_ms_max=max(took),
            metrics_series=sum(not line.startswith("#") for line in text.splitlines()),
        )


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all of it gives; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _call(client: httpx.AsyncClient, method: str, url: str, **body: object) -> httpx.Response:
    try:
        response = await client.request(method, url, json=body or None)
    except httpx.HTTPError as error:
        raise PeerError(f"{url} did not answer: {error!r}") from error
    if not response.is_success:
        raise PeerError(f"{url} answered {response.status_code}: {response.text[:500]}")
    return response


async def _register(
    client: httpx.AsyncClient, node: RunningNode, prefix: str, count: int, body: dict[str, object]
) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await _call(client, "POST", f"{node.url}/v1/sessions", id=f"{prefix}-{number:05}", **body)

    await _all(some() for _ in range(REGISTERING))


@contextlib.asynccontextmanager
async def _crowds(node: RunningNode, workers: int) -> AsyncIterator[None]:
    """Worlds that generate, in a few processes."""
    counts = [len(range(number, workers, CROWDS)) for number in range(CROWDS)]
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worldmove.bench.crowd", node.url, f"crowd{number}", str(count)),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for number, count in enumerate(counts)
        if count
    ]
    try:
        for process in processes:
            if process.stdout is None or await process.stdout.readline() != b"ready\n":
                raise ProcessLostError("the workers of the benchmark failed")
        yield
    finally:
        await asyncio.shield(_end(processes))


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    for process in processes:
        await process.wait()


async def _move_all(client: httpx.AsyncClient, node: RunningNode, moves: int, over: asyncio.Event) -> int:
    """Asks for all moves at once, and returns how many were released; sets `over` then."""

    async def one(number: int) -> bool:
        request = {"session_id": f"moving-{number:05}", "destination": "B", "allow_unattended": True}
        move = (await _call(client, "POST", f"{node.url}/v1/migrations", **request)).json()
        while move["state"] not in ("released", "aborted", "rejected"):
            await asyncio.sleep(0.2)
            move = (await _call(client, "GET", f"{node.url}/v1/migrations/{move['id']}")).json()
        return bool(move["state"] == "released")

    try:
        return sum(await _all(one(number) for number in range(moves)))
    finally:
        over.set()


async def _ask(node: RunningNode, sessions: int, over: asyncio.Event) -> list[float]:
    """Asks everything in turn until the moves are over; milliseconds of each answer."""
    took: list[float] = []
    choose = random.Random(1)  # noqa: S311 - which session is asked for, no secret
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        while not over.is_set():
            name = f"idle-{choose.randrange(max(sessions, 1)):05}"
            for path in (
                "/v1/healthz",
                f"/v1/sessions/{name}",
                f"/v1/sessions?limit=100&after={name}",
                "/v1/node",
                "/v1/migrations",
                "/v1/nodes",
                "/metrics",
            ):
                began = time.perf_counter()
                await _call(client, "GET", f"{node.url}{path}")
                took.append((time.perf_counter() - began) * 1000)
                await asyncio.sleep(ASK_EVERY_S)
    return took
