"""GPUs that are imagined (tests/fake_gpu): everything but CUDA is tried on them, by real processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient

FAKE = Path(__file__).with_name("fake_gpu")
ROOT = FAKE.parent.parent
IMAGINED = os.pathsep.join([str(FAKE), str(ROOT), str(ROOT / "tests")])
"""The search path of processes that are to find them."""
GPUS = [f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6}" for byte in ("01", "02")]
SHAPES = {"odd": ("5", "1,3,44444"), "small": ("40", "5120")}


def programs(shape: str) -> list[tuple[str, ...]]:
    """The serving stacks of a `bench.moves.shuttle` between the two."""
    return [("worldmove.bench.gpu_actor", gpu, *SHAPES[shape]) for gpu in GPUS]


def one_each(*more: str) -> dict[str, list[str]]:
    """Options of two nodes with a GPU each."""
    return {name: ["--gpus", gpu, *more] for name, gpu in zip("AB", GPUS, strict=True)}


def run_dir(node: RunningNode) -> Path:
    """Where a node has its sockets."""
    words = Path(f"/proc/{node.pid}/cmdline").read_bytes().decode().split("\0")
    return Path(words[words.index("--run-dir") + 1])


def imagine(patch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on find imagined GPUs, until the patch is undone."""
    patch.setenv("PYTHONPATH", IMAGINED)


@asynccontextmanager
async def shared_pair(options: Sequence[str], logs: Path) -> AsyncIterator[list[RunningNode]]:
    """Nodes A and B with a GPU each and faults to arm, for several tests; `clear` them after each."""
    with pytest.MonkeyPatch.context() as patch:
        imagine(patch)
        async with running_nodes(["A", "B"], options, one_each("--faults", "arm"), logs) as running:
            yield running


async def clear(nodes: list[RunningNode]) -> None:
    """Ends what a test has left on nodes that others use after it."""
    for node in nodes:
        async with AsyncClient(node.url) as client:
            for session in (await client.sessions()).sessions:
                if session.owner == node.name:
                    await client.end_session(session.id)
            for standby in (await client.node()).standbys:
                await client.drop_standby(standby.id)
