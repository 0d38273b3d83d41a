"""Sessions on GPUs through real nodes. The GPUs are imagined (tests/fake_gpu): all but CUDA is tried here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
from gpu_kit import GPUS, SHAPES, clear, one_each, programs, run_dir, shared_pair

from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient
from worldmove.errors import ManifestError, NoMemoryError
from worldmove.faults.door import order
from worldmove.manifest import Manifest, Region
from worldmove.views import MigrationRequest, SessionSpec

OPTIONS = ["--path", "local", "--executors", "1", "--log-level", "info"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningNode]]:
    async with shared_pair(OPTIONS, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(imagined: None, pair: list[RunningNode]) -> AsyncIterator[list[RunningNode]]:
    """The pair of nodes that all tests share, empty again after each."""
    yield pair
    await clear(pair)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_session_goes_from_gpu_to_gpu_and_back(nodes: list[RunningNode], shape: str) -> None:
    """The actors compare every byte, in memory that was poisoned; see `bench.gpu_actor`."""
    async with shuttle(nodes, 0, programs(shape)) as way:
        for number in range(4):
            receipt = (await way.move("local")).receipt
            assert (receipt.path, receipt.destination) == ("local", "BA"[number % 2])
            assert receipt.sent_bytes == receipt.state_bytes
        async with AsyncClient(nodes[0].url) as client:
            digest = await client.digest("bench")
            assert digest.root


@pytest.mark.parametrize("fault", ["destination.prepared.executor-kill", "source.pausing.executor-kill"])
async def test_an_executor_that_dies_while_it_waits_for_the_stop_costs_no_move(
    nodes: list[RunningNode], fault: str
) -> None:
    """Its work was armed: another executor does it, when the node says so."""
    async with shuttle(nodes, 0, programs("small")) as way:
        for number in range(2):
            side = number if fault.startswith("source") else 1 - number
            await order(run_dir(nodes[side]), arm=fault)
            receipt = (await way.move("local")).receipt
            assert (receipt.state, receipt.repair_bytes) == ("released", 0)


async def test_a_bit_that_flips_in_memory_after_landing_is_found_and_sent_again(
    imagined: None, tmp_path: Path
) -> None:
    each = one_each()
    each["B"] += ["--faults", "land-flip-once"]
    async with (
        running_nodes(["A", "B"], OPTIONS, each, tmp_path) as nodes,
        shuttle(nodes, 0, programs("small")) as way,
    ):
        receipt = (await way.move("local")).receipt
        assert [damage.attempts for damage in receipt.damaged] == [1]
        assert receipt.repair_bytes > 0


async def test_a_node_shows_its_gpus(nodes: list[RunningNode]) -> None:
    async with AsyncClient(nodes[1].url) as client:
        view = await client.node()
        assert [(device.uuid, device.kind) for device in view.devices] == [
            ("host", "host"),
            (GPUS[1], "cuda"),
        ]
        assert 0 < view.devices[1].free_bytes < view.devices[1].total_bytes
        assert len(view.executors) == 2
    async with httpx.AsyncClient() as plain:
        assert (await plain.get(f"{nodes[1].url}/v1/readyz")).status_code == 200


def spec(*devices: str, elements: int = 1000) -> SessionSpec:
    regions = tuple(Region(f"r{n}", "uint8", (elements,), device=each) for n, each in enumerate(devices))
    return SessionSpec(id="w", manifest=Manifest("m", regions, block_ms=20.0, horizon_ms=50.0))


async def test_what_does_not_fit_on_a_gpu_is_refused_with_its_size(nodes: list[RunningNode]) -> None:
    async with AsyncClient(nodes[0].url) as client:
        with pytest.raises(NoMemoryError) as refused:
            await client.register(spec(GPUS[0], elements=(1 << 30) + 1))
        assert refused.value.details["required_bytes"] == (1 << 30) + (2 << 20)
        assert refused.value.details["available_bytes"] == 1 << 29
        assert (await client.register(spec(GPUS[0], "host"))).id == "w"


async def test_a_device_that_a_node_has_not_is_named(nodes: list[RunningNode]) -> None:
    async with AsyncClient(nodes[0].url) as client:
        with pytest.raises(ManifestError, match=GPUS[0]):
            await client.register(spec(GPUS[1]))
        with pytest.raises(ManifestError, match="GPU-…"):
            await client.register(spec("cuda:0"))


async def test_a_session_moves_only_to_its_own_kind_of_memory(nodes: list[RunningNode]) -> None:
    async with AsyncClient(nodes[0].url) as here, AsyncClient(nodes[1].url) as there:
        await here.register(spec(GPUS[0]))
        await there.open_standby(msgspec.structs.replace(spec("host"), id=None))
        request = MigrationRequest(session_id="w", destination="B", live=False)
        verdict = await here.dry_run(request)
        assert (verdict.admissible, verdict.code) == (False, "no-worker")
