"""The worker of a GPU benchmark: a world on a GPU that stands still, and its standby; the public SDK only.

    python -m worldmove.bench.gpu_actor URL world|standby SESSION NBYTES PARENT DEVICE COUNT SHAPE

`worldmove.bench.actor` says how two pass a session to and fro; NBYTES is not used: the session has COUNT
regions of bf16 with SHAPE (comma-separated, multiples of 8 bytes). What a region holds in a version is a pure
function of both, so that what has arrived is compared, on the GPU and byte for byte, with a copy that never
travelled. After each arrival everything is written anew: what an earlier move has left would be noticed.
"""

from __future__ import annotations

import sys
import time

import cupy
import numpy as np

from worldmove.cuda.driver import find
from worldmove.executor.serving import end_with_parent
from worldmove.worker import Region, SessionMoved, Standby, Worker, World

POISON = 0xA5
BLOCK_S = 0.005
MODEL = "worldmove-bench-gpu"
HORIZON_MS = 60_000.0
THREADS = 256
BLOCKS = 1024

CODE = r"""
typedef unsigned long long u64;
__device__ u64 word(u64 index, u64 seed) {
    u64 z = (index + seed) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
extern "C" __global__ void write_words(u64* data, u64 count, u64 seed) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x)
        data[i] = word(i, seed);
}
extern "C" __global__ void compare_words(const u64* data, u64 count, u64 seed, u64* wrong) {
    u64 found = 0;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        const u64 differ = data[i] ^ word(i, seed);
        for (int byte = 0; byte < 8; ++byte) found += (differ >> 8 * byte & 0xff) != 0;
    }
    if (found) atomicAdd(wrong, found);
}
"""


class Player:
    """Writes the regions of a world, and compares them.

    Args:
        device: UUID of the GPU.
        count: how many regions.
        shape: of each.
    """

    def __init__(self, device: str, count: int, shape: tuple[int, ...]) -> None:
        names = [f"layer{number // 2:02}.{'kv'[number % 2]}" for number in range(count)]
        self.regions = [Region(name=name, dtype="bfloat16", shape=shape, device=device) for name in names]
        module = cupy.RawModule(code=CODE)
        self._write = module.get_function("write_words")
        self._compare = module.get_function("compare_words")

    def write(self, world: World, version: int) -> None:
        """Gives every region the contents of `version`; returns before they are there."""
        for number, region in enumerate(self.regions):
            data = world.tensor(region.name, like="cupy")
            words = np.uint64(data.nbytes // 8)
            self._write((BLOCKS,), (THREADS,), (data, words, _seed(number, version)))

    def wrong(self, world: World, version: int) -> int:
        """How many bytes are not those of `version`."""
        total = cupy.zeros(1, dtype=cupy.uint64)
        for number, region in enumerate(self.regions):
            data = world.tensor(region.name, like="cupy")
            words = np.uint64(data.nbytes // 8)
            self._compare((BLOCKS,), (THREADS,), (data, words, _seed(number, version), total))
        return int(total[0])

    def poison(self, standby: Standby) -> None:
        """Fills every region with a pattern that no world has; returns when it is there."""
        for region in self.regions:
            data = standby.tensor(region.name, like="cupy")
            cupy.cuda.runtime.memset(data.data.ptr, POISON, data.nbytes)
        cupy.cuda.get_current_stream().synchronize()

    def register(self, worker: Worker, session: str) -> World:
        """Registers the world with its first contents."""
        world = worker.register(
            session, model=MODEL, regions=self.regions, block_ms=BLOCK_S * 1000, horizon_ms=HORIZON_MS
        )
        self.write(world, 1)
        cupy.cuda.get_current_stream().synchronize()
        return world

    def wait(self, worker: Worker) -> tuple[World, int]:
        """Waits as a standby, in poisoned memory, until a world has come that is right; its version then.

        Raises:
            SystemExit: bytes of it are wrong.
        """
        standby = worker.standby(
            model=MODEL, regions=self.regions, block_ms=BLOCK_S * 1000, horizon_ms=HORIZON_MS
        )
        self.poison(standby)
        say("waiting")
        world = None
        while world is None:
            world = standby.wait()
        version = int(world.host_state)
        wrong = self.wrong(world, version)
        if wrong:
            say(f"damaged {wrong}")
            sys.exit(1)
        say("adopted")
        return world, version


def live(player: Player, world: World, version: int) -> None:
    """Writes everything anew, then stands still, block by block, until the world has moved."""
    try:
        with world.block():
            player.write(world, version)
        while True:
            world.boundary(str(version).encode())
            with world.block():
                time.sleep(BLOCK_S)
    except SessionMoved:
        say("moved")


def say(word: str) -> None:
    """Tells the parent."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def _seed(region: int, version: int) -> np.uint64:
    return np.uint64(version << 48 | region << 32)


def main(arguments: list[str]) -> None:
    """Runs until the parent ends it."""
    url, role, session, _, parent, device, count, shape = arguments
    end_with_parent(int(parent))
    worker = Worker(url)
    cupy.cuda.Device(find(device).ordinal).use()
    player = Player(device, int(count), tuple(int(size) for size in shape.split(",")))
    if role == "world":
        world, version = player.register(worker, session), 0
        say("registered")
    else:
        world, version = player.wait(worker)
    while True:
        live(player, world, version + 1)
        del world  # its memory goes before that of the standby comes
        sys.stdin.readline()
        world, version = player.wait(worker)


if __name__ == "__main__":
    main(sys.argv[1:])
