"""Many workers in one process, for `worldmove bench scale`: each a world with a connection of its own.

    python -m worldmove.bench.crowd URL PREFIX COUNT PARENT

Says `ready` on stdout when all worlds generate, and ends when stdin closes, or with its parent. Uses the
public SDK only; a thread for each world.
"""

from __future__ import annotations

import sys
import threading

from worldmove.executor.serving import end_with_parent
from worldmove.worker import Region, Worker, World

BLOCK_S = 0.1
MODEL = "worldmove-scale"
NBYTES = 4096
HOST_STATE_BYTES = 4096


def spec() -> dict[str, object]:
    """What all worlds of the benchmark have in common, as REST takes it."""
    region = {"name": "k", "dtype": "uint8", "shape": [NBYTES]}
    return {
        "model": MODEL,
        "regions": [region],
        "block_ms": BLOCK_S * 1000,
        "horizon_ms": 60_000.0,
        "host_state_bytes": HOST_STATE_BYTES,
        "fingerprint": {"bench": "scale"},
    }


def _generate(world: World, over: threading.Event) -> None:
    while not over.wait(BLOCK_S):
        with world.block():
            world.tensor("k")[:] += 1
        world.boundary(b"state")


def main(url: str, prefix: str, count: int, parent: int) -> None:
    """Registers `count` worlds and generates until stdin closes."""
    end_with_parent(parent)
    over = threading.Event()
    threads = []
    worker = Worker(url)
    for number in range(count):
        world = worker.register(
            f"{prefix}-{number}",
            model=MODEL,
            regions=[Region("k", "uint8", (NBYTES,))],
            block_ms=BLOCK_S * 1000,
            horizon_ms=60_000.0,
            host_state_bytes=HOST_STATE_BYTES,
            fingerprint={"bench": "scale"},
        )
        threads.append(threading.Thread(target=_generate, args=(world, over)))
        threads[-1].start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
