"""Sessions on GPUs over direct lanes, between real nodes. The GPUs are imagined: see tests/fake_gpu."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gpu_kit import GPUS, clear, one_each, programs, run_dir

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient
from worldmove.errors import MoveAbortedError, NoWorkerError, ValidationError
from worldmove.faults.door import order
from worldmove.views import PathChoice, Receipt

OPTIONS = ["--executors", "1", "--log-level", "info", "--direct-ring", "512MiB", "--peer-timeout-ms", "20000"]
ANY_RATE = ["--direct-min-gbps", "0"]
"""No GPU, no NVLink: what UCX falls back to is all there is."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("imagined")]
"""Two nodes are a dozen processes; on a busy machine they take a minute to start."""


async def moved(way: Shuttle, path: PathChoice = "direct") -> Receipt:
    """A move; where the standby is still being wiped after the last one, it is asked for again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return (await way.move(path)).receipt
            except NoWorkerError as error:
                await asyncio.sleep(error.details.get("retry_after_ms", 100) / 1000)


def share_nothing(nodes: list[RunningNode]) -> None:
    """As in containers without a common volume: no descriptors, no local path."""
    for node in nodes:
        (run_dir(node) / "peer.sock").unlink()


async def test_a_session_goes_from_gpu_to_gpu_and_back(tmp_path: Path) -> None:
    """The actors compare every byte, in memory that was poisoned; see `bench.gpu_actor`."""
    async with (
        running_nodes(["A", "B"], [*OPTIONS, *ANY_RATE], one_each(), tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        for path in ("direct", "direct", "auto"):
            receipt = await moved(way, path)
            assert (receipt.path, receipt.lanes) == (("direct", 1) if path == "direct" else ("local", 0))
            assert receipt.sent_bytes == receipt.state_bytes
            assert receipt.path_gbps is not None
            assert receipt.path_gbps > 0
        share_nothing(nodes)
        for _ in range(2):
            receipt = await moved(way, "auto")
            assert (receipt.path, receipt.path_reason) == ("direct", None)
        async with AsyncClient(nodes[0].url) as client:
            lanes = (await client.node()).lanes
            assert "direct" in [lane.kind for lane in lanes]
            assert all(lane.migration_id is None for lane in lanes)
    lines = [line for name in "AB" for line in (tmp_path / f"{name}.log").read_text().splitlines()]
    began = [json.loads(line) for line in lines if "direct-began" in line]
    assert len(began) == 4
    # On a busy machine the node's word may be there before the lane has looked.
    assert any(len(one["blocks"]) == 1 for one in began), "no lane has seen its world stand by itself"


async def test_what_is_foreseen_of_the_last_round_begins_at_the_stop(tmp_path: Path) -> None:
    """A cache that moves by strides, as its worker compares it: in the pause only what is new is sent."""
    async with running_nodes(["A", "B"], [*OPTIONS, *ANY_RATE], one_each(), tmp_path) as nodes:
        for pattern in ("shift", "ring", "rewrite"):
            actors = [("worldmove.bench.delta_gpu_actor", pattern, "250", uuid) for uuid in GPUS]
            async with shuttle(nodes, 32 * 10**6, actors) as way:
                for path in ("direct", "local"):
                    receipt = (await way.move(path, live=True)).receipt
                    assert (receipt.path, len(receipt.damaged)) == (path, 0), pattern
                    assert receipt.sent_bytes >= receipt.state_bytes
                    if pattern == "rewrite":
                        # A leaf that came live once the last block had written it is there already.
                        assert receipt.rounds[-1].bytes > 0.9 * receipt.state_bytes
                    else:
                        assert receipt.rounds[-1].bytes < 0.5 * receipt.state_bytes, pattern
            await clear(nodes)


async def test_what_goes_wrong_with_lanes_and_rings_harms_no_world(tmp_path: Path) -> None:
    """A byte flips, and is sent again; lanes die and stop at either side, and the next move goes well."""
    options = one_each("--faults", "arm")
    options["A"][-1] = "arm,ring-flip-once"
    async with (
        running_nodes(["A", "B"], [*OPTIONS, *ANY_RATE, "--stall-ms", "1500"], options, tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        assert len((await moved(way)).damaged) == 1
        for fault, node in (
            ("source.pausing.lane-kill", nodes[1]),  # it waits for the world to stand
            ("source.finishing.lane-kill", nodes[1]),
            ("destination.finishing.lane-stop", nodes[0]),
        ):
            folder = run_dir(node)
            await order(folder, arm=fault)
            with pytest.raises(MoveAbortedError):
                await moved(way)
            assert (await order(folder)).fired
        assert (await moved(way)).path == "direct"


async def test_a_way_that_does_not_open_costs_no_move(tmp_path: Path) -> None:
    """Also where it was known to be good: the token that its lane is told is wrong once."""
    async with (
        running_nodes(["A", "B"], [*OPTIONS, *ANY_RATE, "--faults", "arm"], one_each(), tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        share_nothing(nodes)
        assert [(await moved(way, "auto")).path for _ in range(2)] == ["direct", "direct"]
        await order(run_dir(nodes[0]), arm="source.admitted.lie-token")
        receipt = await moved(way, "auto")
        assert receipt.path == "staged"
        assert receipt.path_reason is not None


async def test_a_way_that_is_too_slow_is_refused_and_the_next_one_taken(tmp_path: Path) -> None:
    """UCX falls back to TCP here. Asked for, the path is refused; by itself the node takes the next one."""
    options = [*OPTIONS, "--direct-min-gbps", "90000"]
    async with (
        running_nodes(["A", "B"], options, one_each(), tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        with pytest.raises(MoveAbortedError, match="path direct brought"):
            await moved(way)
        share_nothing(nodes)
        for known in (True, False, True):
            receipt = await moved(way, "auto")
            assert receipt.path == "staged"
            assert known == (receipt.path_reason is None)
            assert known or "90000" in str(receipt.path_reason)


async def test_sessions_of_host_memory_have_no_direct_path(tmp_path: Path) -> None:
    async with (
        running_nodes(["A", "B"], [*OPTIONS, "--gpus", "none"], {}, tmp_path) as nodes,
        shuttle(nodes, 1 << 20) as way,
    ):
        with pytest.raises(ValidationError, match="GPUs of both nodes"):
            await way.move("direct")
