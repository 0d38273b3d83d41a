"""Sessions on GPUs over lanes and rings, between real nodes. The GPUs are imagined: see tests/fake_gpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_gpu_moves import FAKE, GPUS, ROOT, programs

from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import running_nodes

OPTIONS = ["--path", "staged", "--executors", "1", "--lanes", "2", "--log-level", "info"]


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), str(ROOT), str(ROOT / "tests")]))


@pytest.mark.parametrize("faulty", ["", "A", "B"])
async def test_a_session_goes_from_gpu_to_gpu_over_rings(imagined: None, tmp_path: Path, faulty: str) -> None:
    """There and back; the actors compare every byte, in memory that was poisoned.

    In the first move A is the source and B the destination: a byte that flips in the ring of either is found.
    """
    each = {name: ["--gpus", gpu] for name, gpu in zip("AB", GPUS, strict=True)}
    if faulty:
        each[faulty] += ["--faults", "ring-flip-once"]
    async with (
        running_nodes(["A", "B"], OPTIONS, each, tmp_path) as nodes,
        shuttle(nodes, 0, programs("odd")) as way,
    ):
        for number in range(1 if faulty else 3):
            receipt = (await way.move("staged")).receipt
            assert (receipt.path, receipt.lanes, receipt.destination) == ("staged", 2, "BA"[number % 2])
            assert receipt.sent_bytes >= receipt.state_bytes
            assert len(receipt.damaged) == (1 if faulty else 0)
