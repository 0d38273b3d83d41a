"""Which copies are the driver's, and which share a kernel; with an imagined GPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from gpu_kit import IMAGINED

PROGRAM = """
import json, sys
import cupy
from worldmove.kernels.streams import begin_copies

class Kernels:
    def plan(self, runs):
        return runs
    def copy(self, plan):
        done["kernel"] += len(plan)

done = {"engine": [], "kernel": 0}
cupy.cuda.runtime.memcpyAsync = lambda _to, _from, length, *_more: done["engine"].append(length)
sizes = json.loads(sys.argv[1])
begin_copies(Kernels(), cupy.cuda.Stream(non_blocking=True), [(0, 0, size) for size in sizes])
print(json.dumps([sorted(done["engine"]), done["kernel"]]))
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "engine", "kernel"),
    [
        ([MIB, 5, 0, 7], [5, 7, MIB], 0),
        ([3] * 16, [3] * 16, 0),
        ([3] * 17 + [2 * MIB, 0], [2 * MIB], 17),
        ([], [], 0),
        ([0, 0], [], 0),
    ],
)
def test_few_small_copies_are_the_engines(sizes: list[int], engine: list[int], kernel: int) -> None:
    """A kernel would take a turn on the GPU from a world that generates there."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(sizes)],
        env=os.environ | {"PYTHONPATH": IMAGINED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == [engine, kernel]
