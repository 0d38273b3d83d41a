"""The worker of `worldmove bench delta --gpu`: as `delta_actor`, with its cache on a GPU.

python -m worldmove.bench.delta_gpu_actor URL world|standby SESSION NBYTES PARENT PATTERN BLOCK_MS DEVICE
"""

from __future__ import annotations

import sys
from typing import Any, cast

import cupy

from worldmove.bench.cache import Pattern
from worldmove.bench.delta_actor import Stack, play
from worldmove.bench.gpu_cache import GpuCache
from worldmove.cuda.driver import find
from worldmove.executor.serving import end_with_parent
from worldmove.worker import Standby, Worker, World


class GpuStack(Stack):
    """A serving stack with one world at a time, on one GPU."""

    def _memory(self, world: World | Standby) -> list[Any]:
        tensors = [world.tensor(region.name, like="cupy") for region in self._cache.regions]
        return [tensor.reshape(-1).view(cupy.uint8) for tensor in tensors]


def main(arguments: list[str]) -> None:
    """Runs until the parent ends it."""
    url, role, session, nbytes, parent, pattern, block_ms, device = arguments
    end_with_parent(int(parent))
    cupy.cuda.Device(find(device).ordinal).use()
    cache = GpuCache(cast("Pattern", pattern), int(nbytes), device)
    play(GpuStack(Worker(url), session, cache, float(block_ms)), role)


if __name__ == "__main__":
    main(sys.argv[1:])
