"""`worldmove bench scale`: one node with thousands of sessions, hundreds of workers, dozens of moves.

What counts is how the node answers meanwhile: every kind of question that a gateway, an operator or a monitor
asks, again and again, while moves run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec
import uvloop

from worldmove.bench.asker import Asker, asker
from worldmove.bench.crowd import spec
from worldmove.bench.nodes import RunningNode, restarted, running_nodes
from worldmove.bench.processes import open_descriptors, own_bytes
from worldmove.bench.questions import TIMEOUT_S, Asked, call
from worldmove.bench.report import Line, at_most, show
from worldmove.bench.stats import median, quantile
from worldmove.errors import ProcessLostError
from worldmove.memory.limits import raise_descriptor_limit
from worldmove.page.control import page_bytes

P99_BAR_MS = 50.0
PER_SESSION = 1
"""Descriptors of a session with one extent and no worker, in its node and in the keeper."""
SPARE_DESCRIPTORS = 1000
REGISTERING = 16
CROWDS = 4
MOVE_BYTES = 4 << 20
LOOK_EVERY_S = 0.1
OPTIONS = ("--register-rate", "0", "--move-rate", "0", "--gate-rate", "100Mbit", "--path", "local")


class Wanted(NamedTuple):
    """How many of what; `calls` are answers that are measured while moves run."""

    sessions: int
    workers: int
    moves: int
    calls: int


class Round(NamedTuple):
    """All moves once: the state in which each ended, with its code where that is not `released`."""

    ends: tuple[str, ...]
    seconds: float

    @property
    def moved(self) -> int:
        """How many were released."""
        return self.ends.count("released")


class Restart(NamedTuple):
    """What a start of the node with all its sessions took."""

    seconds: float
    silent_s: float
    asked: list[Asked]
    sessions: int
    own_bytes: int


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    `own_bytes_per_session`: anonymous memory and page tables of node and keeper by which one idle session
    makes them grow; `page_bytes_per_session`: at most, its control page with 4 KiB of host state.
    `failures`: moves that were not released, by state and code. `descriptors`: of node or keeper, whoever has
    more. `restart_s`: from SIGTERM to the node until its next incarnation has settled every session;
    `restart_silent_s`: until it answers again; `restart_rest_ms_p99`: of answers between the two.
    """

    sessions: int
    workers: int
    moves: int
    rounds: int
    moved: int
    failures: dict[str, int]
    descriptors_limit: int
    register_per_s: float
    own_bytes_per_session: int
    page_bytes_per_session: int
    moves_s: float
    rest_calls: int
    rest_ms_p50: float
    rest_ms_p99: float
    rest_ms_max: float
    rest_ms_p99_by_call: dict[str, float]
    metrics_series: int
    descriptors: int
    restart_s: float
    restart_silent_s: float
    restart_rest_ms_p99: float
    restart_sessions: int
    restart_own_bytes_per_session: int


def run(
    *, sessions: int = 10_000, workers: int = 200, moves: int = 50, calls: int = 1500, json: bool = False
) -> int:
    """Measures and shows.

    Args:
        sessions: registered at one node; fewer where the limit of open descriptors does not allow as many.
        workers: connected worlds that generate meanwhile.
        moves: asked for at the same time, there and back, as often as it takes.
        calls: answers to be measured while moves run; fewer say little about a p99.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every move was released.

    Raises:
        WorldMoveError: a node or a worker failed.
    """
    limit = raise_descriptor_limit()
    possible = (limit - SPARE_DESCRIPTORS) // PER_SESSION - 3 * workers - 2 * moves
    wanted = Wanted(min(sessions, possible), workers, moves, calls)
    result = uvloop.run(_measure(wanted, limit))
    lines = [
        Line("sessions", str(result.sessions), f"{sessions} wanted, {limit} descriptors allowed"),
        Line("registered", f"{result.register_per_s:.0f} /s"),
        Line("node and keeper, each session", f"{result.own_bytes_per_session} bytes"),
        Line("moves released", f"{result.moved} of {result.rounds * moves}"),
        *(Line(f"  {end}", str(count)) for end, count in result.failures.items()),
        Line(f"all {moves} at once", f"{result.moves_s:.1f} s", "median of the rounds"),
        Line("REST p50 while moves run", f"{result.rest_ms_p50:.1f} ms"),
        Line("REST p99", f"{result.rest_ms_p99:.1f} ms", at_most(result.rest_ms_p99, P99_BAR_MS, "ms")),
        *(Line(f"  {name}", f"{took:.1f} ms") for name, took in result.rest_ms_p99_by_call.items()),
        Line("REST max", f"{result.rest_ms_max:.1f} ms"),
        Line("series at /metrics", str(result.metrics_series)),
        Line("descriptors of node or keeper", str(result.descriptors), f"of {limit}"),
        Line("node started again", f"{result.restart_s:.1f} s", "until every session is settled"),
        Line("  until it answers", f"{result.restart_silent_s:.1f} s"),
        Line("  REST p99 from then on", f"{result.restart_rest_ms_p99:.1f} ms"),
        Line("  each session", f"{result.restart_own_bytes_per_session} bytes"),
    ]
    title = f"one node with {result.sessions} sessions and {workers} workers, {moves} moves"
    show(title, result, lines, json=json)
    return 0 if result.moved == result.rounds * moves else 1


async def _measure(wanted: Wanted, limit: int) -> ScaleResult:
    client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
    async with client, running_nodes(("A", "B"), OPTIONS) as nodes:
        here = nodes[0]
        pids = [here.pid, await _keeper(client, here)]
        before, began = own_bytes(pids), time.perf_counter()
        await _register(client, here, "idle", wanted.sessions, spec())
        register_s = time.perf_counter() - began
        each = (own_bytes(pids) - before) // wanted.sessions
        large = spec() | {"regions": [{"name": "k", "dtype": "uint8", "shape": [MOVE_BYTES]}]}
        await _register(client, here, "moving", wanted.moves, large)
        async with _crowds(here, wanted.workers), asker(wanted.sessions) as other:
            descriptors = max(open_descriptors(pid) for pid in pids)
            rounds, asked = await _move_and_ask(client, nodes, wanted, other)
            text = (await call(client, "GET", f"{here.url}/metrics")).text
            again = await _restart(client, here, other)
        took = [one.took_ms for one in asked]
        return ScaleResult(
            sessions=wanted.sessions,
            workers=wanted.workers,
            moves=wanted.moves,
            rounds=len(rounds),
            moved=sum(one.moved for one in rounds),
            failures=dict(Counter(end for one in rounds for end in one.ends if end != "released")),
            descriptors_limit=limit,
            register_per_s=wanted.sessions / register_s,
            own_bytes_per_session=each,
            page_bytes_per_session=page_bytes(1, 4096),
            moves_s=median([one.seconds for one in rounds]),
            rest_calls=len(took),
            rest_ms_p50=quantile(took, 0.5),
            rest_ms_p99=quantile(took, 0.99),
            rest_ms_max=max(took),
            rest_ms_p99_by_call={
                name: quantile([one.took_ms for one in asked if one.call == name], 0.99)
                for name in dict.fromkeys(one.call for one in asked)
            },
            metrics_series=sum(not line.startswith("#") for line in text.splitlines()),
            descriptors=descriptors,
            restart_s=again.seconds,
            restart_silent_s=again.silent_s,
            restart_rest_ms_p99=quantile([one.took_ms for one in again.asked], 0.99),
            restart_sessions=again.sessions,
            restart_own_bytes_per_session=(again.own_bytes - before) // wanted.sessions,
        )


async def _restart(client: httpx.AsyncClient, node: RunningNode, other: Asker) -> Restart:
    """Starts the node anew while its worlds generate, and asks it while it settles their sessions."""
    began = time.perf_counter()
    async with restarted(node) as again:
        silent_s = time.perf_counter() - began
        async with other.asking(again.url) as asked:
            seconds = await _settled(client, again, began)
        view = (await call(client, "GET", f"{again.url}/v1/node")).json()
        own = own_bytes([again.pid, view["keeper"]])
        return Restart(seconds, silent_s, asked, view["sessions"], own)


async def _settled(client: httpx.AsyncClient, node: RunningNode, began: float) -> float:
    """Seconds since `began` when no session of the node is fenced any more."""
    while True:
        text = (await call(client, "GET", f"{node.url}/metrics")).text
        if 'worldmove_sessions{state="fenced"} 0.0' in text.splitlines():
            return time.perf_counter() - began
        await asyncio.sleep(LOOK_EVERY_S)


async def _keeper(client: httpx.AsyncClient, node: RunningNode) -> int:
    return int((await call(client, "GET", f"{node.url}/v1/node")).json()["keeper"])


async def _move_and_ask(
    client: httpx.AsyncClient, nodes: Sequence[RunningNode], wanted: Wanted, other: Asker
) -> tuple[list[Round], list[Asked]]:
    """Moves all there and back, in turn, until the first node has answered often enough meanwhile."""
    rounds: list[Round] = []
    asked: list[Asked] = []
    while len(asked) < wanted.calls:
        away = len(rounds) % 2 == 0
        source, destination = nodes if away else reversed(nodes)
        async with other.asking(nodes[0].url) as answers:
            rounds.append(await _move_all(client, source, destination.name, wanted.moves))
        asked += answers
        if rounds[-1].moved < wanted.moves:
            break
    return rounds, asked


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all of it gives; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _register(
    client: httpx.AsyncClient, node: RunningNode, prefix: str, count: int, body: dict[str, object]
) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await call(client, "POST", f"{node.url}/v1/sessions", id=f"{prefix}-{number:05}", **body)

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


async def _move_all(client: httpx.AsyncClient, node: RunningNode, destination: str, moves: int) -> Round:
    """Asks for all moves at once, and counts how many were released."""

    async def one(number: int) -> str:
        name = f"moving-{number:05}"
        request = {"session_id": name, "destination": destination, "allow_unattended": True}
        move = (await call(client, "POST", f"{node.url}/v1/migrations", **request)).json()
        while move["state"] not in ("released", "aborted", "rejected"):
            await asyncio.sleep(0.2)
            move = (await call(client, "GET", f"{node.url}/v1/migrations/{move['id']}")).json()
        return str(move["state"]) if move["code"] is None else f"{move['state']}: {move['code']}"

    began = time.perf_counter()
    ends = await _all(one(number) for number in range(moves))
    return Round(tuple(ends), time.perf_counter() - began)
