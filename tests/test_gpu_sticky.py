"""A GPU's context is lost in the middle of a move: its executor ends and is replaced, no world with it.

The GPUs are imagined (tests/fake_gpu): what CUDA says of a lost context is said there, by every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gpu_kit import GPUS, clear, run_dir, shared_pair

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode
from worldmove.client import AsyncClient
from worldmove.errors import MoveAbortedError, NoWorkerError
from worldmove.faults.door import order
from worldmove.soak.fleet import stopped
from worldmove.views import PathChoice, Receipt

OPTIONS = ["--executors", "1", "--log-level", "info", "--peer-timeout-ms", "20000", "--stall-ms", "8000"]
STATE = 4 * 10**6
POINTS: dict[PathChoice, tuple[str, ...]] = {
    "local": ("destination.copying", "source.copying", "source.pausing"),
    "staged": ("destination.finishing", "source.pausing"),
}
"""Side and phase. By rings both executors have a part in the paused round that can not be done before."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where a file with its pid for a name takes a process's context away."""
    return tmp_path_factory.mktemp("losses")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, losses: Path) -> AsyncIterator[list[RunningNode]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMAGINED_LOST", str(losses))
        patch.setenv("IMAGINED_ROOM", f"sticky-{os.getpid()}")
        async with shared_pair(OPTIONS, tmp_path_factory.mktemp("logs")) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(imagined: None, pair: list[RunningNode]) -> AsyncIterator[list[RunningNode]]:
    """The pair of nodes that tests share, empty again after each."""
    yield pair
    await clear(pair)


async def moved(way: Shuttle, path: PathChoice) -> Receipt:
    """A live move; where the standby is still being wiped after the last one, it is asked for again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return (await way.move(path, live=True)).receipt
            except NoWorkerError as error:
                await asyncio.sleep(error.details.get("retry_after_ms", 100) / 1000)


async def gpu_executors(node: RunningNode) -> list[int]:
    """The process that holds the node's context; none while it is replaced."""
    async with AsyncClient(node.url) as client:
        return [pid for pid in (await client.node()).executors if on_gpu(pid)]


def on_gpu(pid: int) -> bool:
    try:
        return b"executor.cuda" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def replaced(node: RunningNode, lost: int) -> None:
    """Returns when the process that had lost its context is gone, and another one there."""
    async with asyncio.timeout(20):
        while await gpu_executors(node) in ([], [lost]):  # noqa: ASYNC110 - it starts by itself
            await asyncio.sleep(0.05)
    assert not on_gpu(lost)


async def free_bytes(nodes: list[RunningNode]) -> list[int]:
    """Of each node's GPU."""
    found = []
    for node in nodes:
        async with AsyncClient(node.url) as client:
            found += [one.free_bytes for one in (await client.node()).devices if one.kind == "cuda"]
    return found


async def lose_context(node: RunningNode, losses: Path) -> int:
    """Once the fault has stopped the node's executors: the GPU's loses its context, and all go on."""
    async with asyncio.timeout(30):
        async with AsyncClient(node.url) as client:
            pids = (await client.node()).executors
        while not all(stopped(pid) for pid in pids):  # noqa: ASYNC110 - by a signal, in a phase of a move
            await asyncio.sleep(0.005)
    lost = next(pid for pid in pids if on_gpu(pid))
    (losses / str(lost)).touch()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return lost


@pytest.mark.parametrize("path", POINTS)
async def test_a_lost_context_ends_a_move_and_no_world(
    nodes: list[RunningNode], losses: Path, path: PathChoice
) -> None:
    """In a live round and while the world stands, at either side; the workers compare every byte."""
    actors = [("worldmove.bench.delta_gpu_actor", "rewrite", "100", uuid) for uuid in GPUS]
    async with shuttle(nodes, STATE, actors) as way:
        await moved(way, path)
        await way.turn()
        before = await free_bytes(nodes)
        for point in POINTS[path]:
            at = nodes[way.home if point.startswith("source") else 1 - way.home]
            await order(run_dir(at), arm=f"{point}.executor-stop")
            losing = asyncio.create_task(lose_context(at, losses))
            if (path, point) == ("local", "source.pausing"):
                # What it still had to do, if anything, another one may have done.
                with contextlib.suppress(MoveAbortedError):
                    await moved(way, path)
            else:
                with pytest.raises(MoveAbortedError, match="executor"):
                    await moved(way, path)
            await replaced(at, await losing)
        for _ in range(2):
            receipt = await moved(way, path)
            assert (receipt.path, receipt.damaged) == (path, ())
        await way.turn()
        async with asyncio.timeout(5):
            while await free_bytes(nodes) != before:  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.05)


async def test_a_context_that_was_lost_at_rest_costs_no_second_move(
    nodes: list[RunningNode], losses: Path
) -> None:
    """Nothing was under way that would have failed: the first thing that is asked for finds it lost."""
    actors = [("worldmove.bench.delta_gpu_actor", "rewrite", "100", uuid) for uuid in GPUS]
    async with shuttle(nodes, STATE, actors) as way:
        (lost,) = await gpu_executors(nodes[1])
        (losses / str(lost)).touch()
        with contextlib.suppress(MoveAbortedError):  # somebody may have asked for something else before
            await moved(way, "local")
        await replaced(nodes[1], lost)
        assert (await moved(way, "local")).damaged == ()
