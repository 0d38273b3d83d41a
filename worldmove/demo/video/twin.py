"""The video world's twin: the same world in plain tensors, alone in its process, that never moves.

    python -m worldmove.demo.video.twin --fd FD --parent PID --shape NAME [--sink N] [--cache rolling|ring]
        --device cpu|UUID --blocks N --digests L

After each block whose number stands in the comma-separated list L, it tells a digest of its whole state.
"""

from __future__ import annotations

import argparse
import sys
import time

from worldmove.demo.news import Generated, Playing, line
from worldmove.demo.player import action
from worldmove.demo.twin import SEED
from worldmove.demo.video.actor import torch_device
from worldmove.demo.video.model import Network
from worldmove.demo.video.shape import add_options, chosen
from worldmove.demo.video.world import VideoWorld, deterministic, new_state, state_digest


def main(arguments: list[str]) -> None:
    """Generates blocks 1 to N and tells them."""
    parser = argparse.ArgumentParser(prog="worldmove.demo.video.twin")
    for name in ("--fd", "--parent", "--blocks"):
        parser.add_argument(name, type=int, required=True)
    add_options(parser)
    parser.add_argument("--device", required=True)
    parser.add_argument("--digests", default="")
    options = parser.parse_args(arguments)
    wanted = {int(word) for word in options.digests.split(",") if word}
    with line(options.fd, options.parent) as parent:
        deterministic()
        network = Network(chosen(options), torch_device(options.device))
        world = VideoWorld(network, new_state(network.shape, network.device, SEED))
        parent.tell(Playing(0, adopted=False))
        for block in range(1, options.blocks + 1):
            began = time.perf_counter()
            pictures = world.step(action(block).keys).tobytes()
            took = (time.perf_counter() - began) * 1000
            parent.tell(
                Generated(block, pictures, took, state_digest(world.state) if block in wanted else "")
            )


if __name__ == "__main__":
    main(sys.argv[1:])
