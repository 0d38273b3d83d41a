"""The kernels on a real GPU, against their references: fresh random inputs, poisoned outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "gpu_kernels_check.py"


def gpus() -> tuple[int, str]:
    """How many GPUs CuPy finds, and why it finds none."""
    try:
        import cupy  # noqa: PLC0415 - not on every machine
    except ImportError:
        return 0, "CuPy isn't installed"
    try:
        return int(cupy.cuda.runtime.getDeviceCount()), "no GPU here"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, f"no GPU here: {error}"


@pytest.fixture(scope="module")
def gpu() -> None:
    count, reason = gpus()
    if not count:
        pytest.skip(reason)


@pytest.mark.usefixtures("gpu")
def test_every_kernel_equals_its_reference() -> None:
    """In a process of its own: a faulting kernel breaks the CUDA context of the whole process."""
    answer = subprocess.run(
        [sys.executable, str(TOOL)], check=False, capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
