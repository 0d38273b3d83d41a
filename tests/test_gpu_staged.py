"""Sessions on GPUs over lanes and rings, between real nodes. The GPUs are imagined: see tests/fake_gpu."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gpu_kit import clear, one_each, programs, run_dir, shared_pair

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.errors import MoveAbortedError, NoWorkerError
from worldmove.faults.door import order
from worldmove.views import Receipt

OPTIONS = ["--path", "staged", "--executors", "1", "--lanes", "2", "--log-level", "info"]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningNode]]:
    async with shared_pair([*OPTIONS, "--stall-ms", "1000"], tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(imagined: None, pair: list[RunningNode]) -> AsyncIterator[list[RunningNode]]:
    """The pair of nodes that tests share, empty again after each."""
    yield pair
    await clear(pair)


async def test_a_session_goes_from_gpu_to_gpu_over_rings(nodes: list[RunningNode]) -> None:
    """There and back; the actors compare every byte, in memory that was poisoned."""
    async with shuttle(nodes, 0, programs("odd")) as way:
        for number in range(3):
            receipt = (await way.move("staged")).receipt
            assert (receipt.path, receipt.lanes, receipt.destination) == ("staged", 2, "BA"[number % 2])
            assert receipt.sent_bytes >= receipt.state_bytes
            assert receipt.damaged == ()


@pytest.mark.parametrize("faulty", ["A", "B"])
async def test_a_byte_that_flips_in_a_ring_is_found(imagined: None, tmp_path: Path, faulty: str) -> None:
    """In that of the source, or in that of the destination."""
    each = one_each()
    each[faulty] += ["--faults", "ring-flip-once"]
    async with (
        running_nodes(["A", "B"], OPTIONS, each, tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        receipt = (await way.move("staged")).receipt
        assert (receipt.path, receipt.lanes, receipt.destination) == ("staged", 2, "B")
        assert receipt.sent_bytes >= receipt.state_bytes
        assert len(receipt.damaged) == 1


async def moved(way: Shuttle) -> Receipt:
    """A move; where the standby is still being wiped after the last one, it is asked for again."""
    async with asyncio.timeout(30):
        while True:
            try:
                return (await way.move("staged")).receipt
            except NoWorkerError as error:
                await asyncio.sleep(error.details.get("retry_after_ms", 100) / 1000)


@pytest.mark.parametrize("what", ["lane-kill", "executor-kill", "lane-stop"])
async def test_what_dies_in_a_move_ends_it_and_the_next_one_goes_well(
    nodes: list[RunningNode], what: str
) -> None:
    """First at the source, then at the destination; the world goes on as it was, and moves later."""
    async with shuttle(nodes, 0, programs("odd")) as way:
        at = 0
        for side in ("source", "destination"):
            folder = run_dir(nodes[at if side == "source" else 1 - at])
            await order(folder, arm=f"{side}.finishing.{what}")
            try:
                await moved(way)
            except MoveAbortedError:
                pass
            else:
                # An executor may be replaced before anybody needs it.
                assert what == "executor-kill"
                at = 1 - at
            assert (await order(folder)).fired
        for _ in range(2):
            assert (await moved(way)).damaged == ()
