"""Live moves of sessions on GPUs that end between `Pausing` and the last round, or right after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from gpu_kit import GPUS, clear, run_dir, shared_pair

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode
from worldmove.errors import MoveAbortedError, NoWorkerError
from worldmove.faults.door import order
from worldmove.views import PathChoice, Receipt

OPTIONS = [
    *("--executors", "1", "--log-level", "info", "--direct-ring", "512MiB", "--peer-timeout-ms", "20000"),
    *("--direct-min-gbps", "0", "--stall-ms", "1500"),
]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


class Ground(NamedTuple):
    """Two nodes, and the path to take between them."""

    path: PathChoice
    nodes: list[RunningNode]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "direct"])
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    logs = tmp_path_factory.mktemp("logs")
    async with shared_pair(OPTIONS, logs) as running:
        yield Ground(request.param, running)
    for name in "AB":
        assert "unexpected error" not in (logs / f"{name}.log").read_text()


@pytest_asyncio.fixture(loop_scope="module")
async def ground(imagined: None, pair: Ground) -> AsyncIterator[Ground]:
    """The nodes of a path, empty again after each test."""
    yield pair
    await clear(pair.nodes)


async def moved(way: Shuttle, path: PathChoice) -> Receipt:
    async with asyncio.timeout(60):
        while True:
            try:
                return (await way.move(path, live=True)).receipt
            except NoWorkerError as error:
                await asyncio.sleep(error.details.get("retry_after_ms", 100) / 1000)


def opened(nodes: list[RunningNode]) -> int:
    return sum(len(list(Path(f"/proc/{node.pid}/fd").iterdir())) for node in nodes)


async def test_what_an_executors_end_leaves_behind_refuses_no_move(ground: Ground) -> None:
    """Not even where nobody knew the path, to a world that writes more than any path here brings.

    The source says that a move was aborted while the destination, without its executor, has still to wipe.
    """
    path, nodes = ground
    actors = [("worldmove.bench.delta_gpu_actor", "rewrite", "20", uuid) for uuid in GPUS]
    async with shuttle(nodes, 16 * 10**6, actors) as way:
        for side in ("destination", "source", "source", "destination"):
            fault, at = f"{side}.finishing.executor-kill", way.home if side == "source" else 1 - way.home
            await order(run_dir(nodes[at]), arm=fault)
            with contextlib.suppress(MoveAbortedError):  # what it owed was done, where it dies late
                await moved(way, path)
            assert fault in (await order(run_dir(nodes[at]))).fired
        for _ in range(2):
            assert not (await moved(way, path)).damaged


async def test_a_last_round_that_fails_leaves_no_descriptor_behind(ground: Ground) -> None:
    """Nor anything that would keep the next move from going well."""
    path, nodes = ground
    actors = [("worldmove.bench.delta_gpu_actor", "rewrite", "250", uuid) for uuid in GPUS]
    faults = [
        ("source.pausing.cut", 0),
        ("destination.finishing.cut", 1),
    ]
    if path == "direct":
        faults += [
            ("source.pausing.lane-kill", 0),
            ("source.pausing.lane-stop", 0),
            ("destination.finishing.lane-kill", 1),
        ]
    async with shuttle(nodes, 16 * 10**6, actors) as way:
        for _ in range(2):
            await moved(way, path)
        before = opened(nodes)
        for fault, at in faults:
            await order(run_dir(nodes[at]), arm=fault)
            with pytest.raises(MoveAbortedError):
                await moved(way, path)
            assert fault in (await order(run_dir(nodes[at]))).fired
        for _ in range(2):
            receipt = await moved(way, path)
            assert not receipt.damaged
            # A live round may have read leaves after the world's last write to them: these are kept.
            last = receipt.rounds[-1]
            assert last.bytes + receipt.kept_bytes == receipt.state_bytes + last.again_bytes
        async with asyncio.timeout(20):
            while opened(nodes) > before:  # noqa: ASYNC110 - lanes are still replaced
                await asyncio.sleep(0.1)
