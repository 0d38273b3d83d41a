"""Work on a stream of a GPU: begun here, done by itself, asked after without waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import cupy

from worldmove.errors import DeviceError
from worldmove.kernels.runs import make_runs
from worldmove.kernels.runs_cuda import RunKernels

ENGINE_BYTES = 1 << 20
"""From this size on a copy is the driver's by itself; smaller ones share one kernel, where they are many."""
FEW_COPIES = 16
"""So few small copies are the driver's, too: its engines take nothing from a world that generates on the GPU,
and a kernel of another process takes about 0.4 ms (docs/benchmarks/beside.md)."""

DEFAULT_DIRECTION = 4
"""`cudaMemcpyDefault`: the driver sees by the addresses where the bytes lie."""

_SUCCESS = 0
_NOT_READY = 600


class Begun(NamedTuple):
    """Work on a stream: done once `event` is; `keep` may not go before that."""

    event: cupy.cuda.Event
    keep: Any = None

    def done(self) -> bool:
        """Whether it is done; costs a microsecond.

        Raises:
            DeviceError: it failed, and the context with it.
        """
        status = cupy.cuda.runtime.eventQuery(self.event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise DeviceError(f"work on the device failed with cudaError {status}")
        return bool(status == _SUCCESS)


def begun(stream: cupy.cuda.Stream, keep: Any = None) -> Begun:
    """All that the stream was given so far."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return Begun(event, keep)


def begin_copies(
    kernels: RunKernels, stream: cupy.cuda.Stream, copies: Iterable[tuple[int, int, int]]
) -> Begun:
    """Begins to copy (source, target, bytes), in any order; none may touch what another one writes."""
    wanted = [copy for copy in copies if copy[2]]
    small = [copy for copy in wanted if copy[2] < ENGINE_BYTES]
    few = len(small) <= FEW_COPIES
    for source, target, length in wanted:
        if length >= ENGINE_BYTES or few:
            cupy.cuda.runtime.memcpyAsync(target, source, length, DEFAULT_DIRECTION, stream.ptr)
    plan = None
    if not few:
        sources, targets, lengths = zip(*small, strict=True)
        with stream:
            plan = kernels.plan(make_runs(sources, targets, lengths))
            kernels.copy(plan)
    return begun(stream, plan)
