"""A serving stack of the video world, on `worldmove.torch`: what `worldmove.demo.actors` is to the landscape.

    python -m worldmove.demo.video.actor --role world|standby --url U --session S --shape NAME [--sink N]
        [--cache rolling|ring] --device cpu|UUID --block-ms MS --fd N --parent PID

Whenever a world arrives, a digest of its whole state is told before the first block, to be compared with the
twin's after the same block.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from worldmove import fingerprint
from worldmove.cuda.driver import find
from worldmove.demo.clock import generate, handed_over, options_of
from worldmove.demo.news import Line, Playing, line
from worldmove.demo.twin import SEED
from worldmove.demo.video.model import Network
from worldmove.demo.video.shape import Shape, add_options, chosen
from worldmove.demo.video.world import State, VideoWorld, deterministic, new_state, state_digest
from worldmove.torch import TorchWorker, TorchWorld

MODEL = "worldmove-video/1"
HORIZON_MS = 10_000.0
HOST_STATE_BYTES = 1 << 20


def torch_device(name: str) -> torch.device:
    """`cpu`, or the GPU with this UUID.

    Raises:
        DeviceError: there is no such GPU.
    """
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", find(name).ordinal)


class Stage(NamedTuple):
    """What an actor needs for every world that it takes."""

    worker: TorchWorker
    network: Network
    shape: Shape
    device: str
    block_ms: float
    parent: Line

    def fresh(self) -> State:
        """A world before its first block."""
        return new_state(self.shape, self.network.device, SEED)

    def description(self) -> dict[str, Any]:
        """What a registration and a standby say alike."""
        stack = fingerprint.stack_fields(
            attention="scaled_dot_product_attention",
            scheduler=f"flow {len(self.shape.sigmas)} steps",
            batch=1,
            cache_layout=f"{self.shape}",
        )
        devices = [] if self.device == "cpu" else [self.device]
        return {
            "model": MODEL,
            "block_ms": self.block_ms,
            "horizon_ms": HORIZON_MS,
            "host_state_bytes": HOST_STATE_BYTES,
            "stride_bytes": {"layers.*.[kv]": self.shape.stride_bytes} if self.shape.stride_bytes else None,
            "fingerprint": fingerprint.collect(
                stack, model=MODEL, weights_digest=self.network.digest(), devices=devices
            ),
        }


def play(stage: Stage, world: TorchWorld, *, adopted: bool) -> None:
    """Generates at the block clock, from where the world stands, until it has moved."""
    view = VideoWorld(stage.network, world.state)
    stage.parent.tell(Playing(view.block, adopted, state_digest(world.state) if adopted else ""))
    generate(
        view,
        stage.block_ms,
        stage.parent,
        writing=world.block,
        boundary=lambda: world.boundary(view.state),
    )


def main(arguments: list[str]) -> None:
    """Plays until the parent ends this process."""
    parser = options_of("worldmove.demo.video.actor", "--device")
    add_options(parser)
    parser.add_argument("--block-ms", type=float, required=True)
    options = parser.parse_args(arguments)
    with line(options.fd, options.parent) as parent, TorchWorker(options.url) as worker:
        deterministic()
        shape = chosen(options)
        network = Network(shape, torch_device(options.device))
        stage = Stage(worker, network, shape, options.device, options.block_ms, parent)
        description = stage.description()
        if options.role == "world":
            play(stage, worker.register(options.session, stage.fresh(), **description), adopted=False)
        while True:
            play(stage, handed_over(worker.standby(stage.fresh(), **description), parent), adopted=True)


if __name__ == "__main__":
    main(sys.argv[1:])
