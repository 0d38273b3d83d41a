"""Every kernel compiles by NVRTC for every architecture we serve, without a GPU, and spills no register."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels_kit import compile_cubin

import worldmove.kernels
from worldmove.kernels.sources import KERNELS, source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FOLDER = Path(worldmove.kernels.__file__).parent

# Registers a thread may use, so that as many thread blocks fit on a multiprocessor as the launch counts on.
REGISTERS = {"leaf_digest": 128, "copy_runs": 64, "fill_runs": 64, "read_runs": 64, "table_diff": 64}

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


@pytest.fixture(scope="module")
def nvrtc() -> None:
    """Skips where the compiler's library can't be loaded."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings isn't installed")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library can't be loaded: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("nvrtc")
def test_kernels_compile_without_spills(name: str, architecture: str) -> None:
    cubin, report = compile_cubin(name, architecture)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in report
    assert sorted(ENTRY.findall(report)) == sorted(KERNELS[name])
    stacks = STACK.findall(report)
    assert stacks == [("0", "0", "0")] * len(KERNELS[name]), report
    used = [int(number) for number in USED.findall(report)]
    assert len(used) == len(KERNELS[name])
    assert max(used) <= REGISTERS[name], report


def test_every_device_file_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_sources_stand_alone(name: str) -> None:
    text = source(name)
    assert "#include" not in text
    assert text.count("typedef unsigned long long u64;") == 1
    assert all(f"{kernel}(" in text for kernel in KERNELS[name])
