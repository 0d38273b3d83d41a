"""Runs of bytes in device memory: the same as `runs.py`, in one launch each.

Addresses may be of any memory that the current device can reach: a peer's (a copy is then a pull or a push
over NVLink) or pinned host memory, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import cupy
import numpy as np

from worldmove.kernels.device import Kernel, Records, load, multiprocessors, upload
from worldmove.kernels.runs import Runs, make_runs, tile_total

THREADS = 512
BLOCKS_PER_PROCESSOR = 2


class RunKernels:
    """Copy, fill and read, loaded on the current device.

    Gather and scatter are copies of `gather_runs` and `scatter_runs`.

    Args:
        defines: macros of runs.cuh, for trying other shapes.
        threads: of a thread block; `RUN_THREADS` must be the same.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses the source.
    """

    def __init__(self, defines: Mapping[str, int] | None = None, threads: int = THREADS) -> None:
        self._copy: Kernel = load("copy_runs", defines)["copy_runs"]
        self._fill: Kernel = load("fill_runs", defines)["fill_runs"]
        self._read: Kernel = load("read_runs", defines)["read_runs"]
        self._threads = threads
        self._blocks = BLOCKS_PER_PROCESSOR * multiprocessors()

    def plan(self, runs: Runs) -> Records:
        """Brings runs to the device, for any number of launches; kept until the last is through."""
        return upload(runs, tile_total(runs))

    def plans(self, launches: Iterable[Runs]) -> list[Records]:
        """As `plan` for one launch after another, all brought to the device in one go."""
        made = [runs for runs in launches if runs.size]
        if not made:
            return []
        whole, at = upload(np.concatenate(made), 0), 0
        found = []
        for runs in made:
            data = whole.data[at : at + runs.nbytes]
            found.append(Records(data, runs.size, tile_total(runs)))
            at += runs.nbytes
        return found

    def copy(self, plan: Records, blocks: int | None = None) -> None:
        """Copies all runs, on the current stream.

        Args:
            plan: runs whose targets overlap neither each other nor a source.
            blocks: thread blocks at most: how much of the device it may take. `None`: as many as fill it.
        """
        self._launch(self._copy, plan, blocks)

    def fill(self, plan: Records, value: int, blocks: int | None = None) -> None:
        """Writes the byte `value` (0 to 255) all over every target, on the current stream."""
        self._launch(self._fill, plan, blocks, np.uint64(value))

    def read(self, plan: Records, blocks: int | None = None) -> cupy.ndarray:
        """Reads all sources, as fast as a kernel can: a yardstick.

        Returns:
            uint64, one for each thread; their XOR is that of all words read (`runs.read_runs`).
        """
        grid = self._grid(plan, blocks)
        sums = cupy.zeros(max(grid, 1) * self._threads, dtype=cupy.uint64)
        self._launch(self._read, plan, blocks, sums)
        return sums

    def warm_up(self) -> None:
        """Launches every kernel once on a little memory and waits."""
        data, out = cupy.zeros(256, dtype=cupy.uint8), cupy.zeros(256, dtype=cupy.uint8)
        plan = self.plan(make_runs([data.data.ptr], [out.data.ptr], [256]))
        self.copy(plan)
        self.fill(plan, 0)
        self.read(plan)
        cupy.cuda.get_current_stream().synchronize()

    def _grid(self, plan: Records, blocks: int | None) -> int:
        return min(plan.work, self._blocks if blocks is None else blocks)

    def _launch(
        self, kernel: Kernel, plan: Records, blocks: int | None, *more: np.uint64 | cupy.ndarray
    ) -> None:
        if plan.work:
            kernel((self._grid(plan, blocks),), (self._threads,), (*plan.arguments, *more))
