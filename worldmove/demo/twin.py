"""The twin: the same world in plain memory, alone in its process, that never moves.

python -m worldmove.demo.twin --fd FD --parent PID --state-mb MB --blocks N
"""

from __future__ import annotations

import argparse
import sys
import time

from worldmove.demo.model import Model
from worldmove.demo.news import Generated, Playing, line
from worldmove.demo.player import action
from worldmove.demo.world import Size, World

SEED = 2026
"""Noise stream of the demo's world, and so of its twin."""


def main(arguments: list[str]) -> None:
    """Generates blocks 1 to N and tells them."""
    parser = argparse.ArgumentParser(prog="worldmove.demo.twin")
    for name in ("--fd", "--parent", "--state-mb", "--blocks"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    with line(options.fd, options.parent) as parent:
        size = Size.of_mb(options.state_mb)
        world = World(Model(), size, size.allocate())
        world.begin(SEED)
        parent.tell(Playing(0, adopted=False))
        for block in range(1, options.blocks + 1):
            began = time.perf_counter()
            pictures = world.step(action(block).keys).tobytes()
            parent.tell(Generated(block, pictures, (time.perf_counter() - began) * 1000))


if __name__ == "__main__":
    main(sys.argv[1:])
