"""The kernels for tests: compiled by NVRTC without a GPU, or by g++ to be run on the CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from worldmove.kernels.addresses import Bytes
from worldmove.kernels.pieces import PIECE, Pieces, leaf_total
from worldmove.kernels.runs import Runs, tile_total
from worldmove.kernels.sources import KERNELS, OPTIONS, source

TESTS = Path(__file__).parent
POISON = 0xA5

Launch = Callable[..., None]


def compiler() -> str | None:
    """g++ or another C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path) -> dict[str, Launch]:
    """Every kernel as a function of grid, block and arguments (numbers and arrays), run on the CPU."""
    texts = ['#include "kernels_host_shim.hpp"\n']
    for name, kernels in KERNELS.items():
        text = re.sub(r"^#line .*\n", "", source(name), flags=re.MULTILINE)
        texts += [f"namespace {name} {{\n{text}}}\n", *(f"HOST_KERNEL({name}, {k})\n" for k in kernels)]
    file, library = folder / "kernels.cpp", folder / "kernels.so"
    file.write_text("".join(texts))
    command = [
        str(compiler()),
        "-std=c++17",
        "-O2",
        "-w",
        "-U_FORTIFY_SOURCE",
        "-shared",
        "-fPIC",
        f"-I{TESTS}",
    ]
    subprocess.run([*command, str(file), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    names = [kernel for kernels in KERNELS.values() for kernel in kernels]
    return {kernel: _launcher(getattr(loaded, f"host_{kernel}")) for kernel in names}


def _launcher(function: Any) -> Launch:
    def launch(grid: int, block: int, *arguments: int | np.ndarray) -> None:
        numbers = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        function(grid, block, (ctypes.c_uint64 * len(numbers))(*numbers))

    return launch


def compile_cubin(name: str, architecture: str) -> tuple[bytes, str]:
    """Machine code, and ptxas's report, by NVRTC."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - not on every machine

    def checked(answer: tuple[Any, ...]) -> Any:
        assert answer[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, answer[0]
        return answer[1] if len(answer) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source(name).encode(), f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}", *OPTIONS, "--ptxas-options=-v"]
    answer = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b"\0" * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    report = log.decode().strip("\0 ")
    assert answer[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, report
    cubin = b"\0" * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin, report


def noise(nbytes: int, seed: int = 1, alignment: int = 256) -> Bytes:
    """Random bytes, the same for the same seed, at an address that is a multiple of `alignment`."""
    room = np.empty(nbytes + alignment, dtype=np.uint8)
    start = -room.ctypes.data % alignment
    data = room[start : start + nbytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return data


def new_table(rows: int) -> Bytes:
    """uint8[rows, 16] at a multiple of 16, poisoned."""
    table = noise(rows * 16).reshape(rows, 16)
    table[:] = POISON
    return table


def digest_with(
    launch: Launch, pieces: Pieces, seed: int, table: Bytes, *, share: int, threads: int = 128
) -> None:
    """Digests all pieces by one kernel, of whose threads `share` work on one leaf."""
    leaves = leaf_total(pieces) + int(np.count_nonzero(pieces["length"] == 0))
    if leaves:
        launch(-(-leaves * share // threads), threads, pieces, len(pieces), leaves, seed, table)


def single_leaves(addresses: list[int], lengths: list[int]) -> Pieces:
    """A piece for each leaf, also for those of zero bytes, which no plan would contain."""
    pieces = np.zeros(len(addresses), dtype=PIECE)
    pieces["address"], pieces["length"] = addresses, lengths
    pieces["leaf_bytes"] = np.maximum(lengths, 1)
    pieces["first_leaf"] = pieces["first"] = np.arange(len(addresses))
    return pieces


def run_with(
    launch: Launch, runs: Runs, *more: int | np.ndarray, blocks: int = 3, threads: int = 512
) -> None:
    """Launches a kernel that takes runs."""
    if len(runs):
        launch(min(blocks, tile_total(runs)), threads, runs, len(runs), tile_total(runs), *more)
