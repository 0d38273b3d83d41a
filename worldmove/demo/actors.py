"""A serving stack in small: generates a world under its player, and waits for worlds. Public SDK only.

    python -m worldmove.demo.actors --role world|standby --url U --session S --state-mb MB --fd N --parent PID

One actor runs beside each node. The one that has the world generates, and tells every block as it is
made; when the world has gone to its new owner it becomes a standby on its own node. So two actors pass
one world there and back, until their parent ends them.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from worldmove import fingerprint
from worldmove.demo import world as reference
from worldmove.demo.clock import generate, handed_over, options_of
from worldmove.demo.model import Model
from worldmove.demo.news import Line, Playing, line
from worldmove.demo.twin import SEED
from worldmove.demo.world import HOST_STATE_BYTES, Size
from worldmove.worker import Worker, World

MODEL = "worldmove-demo/1"
MIN_BLOCK_MS = 250.0
MIN_HORIZON_MS = 2000.0


def block_ms(state_mb: float) -> float:
    """How often the player sees a new block; larger worlds take longer to roll."""
    return max(MIN_BLOCK_MS, 0.6 * state_mb)


class Stage(NamedTuple):
    """What an actor needs for every world it takes: where it registers, the network, and how large."""

    worker: Worker
    network: Model
    state_mb: int
    parent: Line

    @property
    def size(self) -> Size:
        """Size of the world."""
        return Size.of_mb(self.state_mb)

    def description(self) -> dict[str, Any]:
        """What a registration and a standby say alike."""
        layout = {"layout": f"{self.size.rows} rows, {self.size.repeats} a token", "attention": "numpy"}
        return {
            "regions": self.size.regions(),
            "model": MODEL,
            "block_ms": block_ms(self.state_mb),
            "horizon_ms": max(MIN_HORIZON_MS, 8.0 * self.state_mb),
            "host_state_bytes": HOST_STATE_BYTES,
            "fingerprint": fingerprint.collect(layout, model=MODEL, weights_digest=self.network.digest),
        }

    def view(self, world: World) -> reference.World:
        """The reference world on the session's own memory."""
        names = [region.name for region in self.size.regions()]
        return reference.World(self.network, self.size, {name: world.tensor(name) for name in names})


def play(stage: Stage, world: World) -> None:
    """Generates at the frame clock, from where the world stands, until it has moved.

    What refers to its memory ends with this call, so that the old arena is gone before a new one comes.
    """
    view = stage.view(world)
    if world.host_state:
        view.restore(world.host_state)
    else:
        with world.block():
            view.begin(SEED)
    stage.parent.tell(Playing(view.block, adopted=bool(world.host_state)))
    generate(
        view,
        block_ms(stage.state_mb),
        stage.parent,
        writing=world.block,
        boundary=lambda: world.boundary(view.host_state()),
    )


def main(arguments: list[str]) -> None:
    """Plays until the parent ends this process."""
    parser = options_of("worldmove.demo.actors")
    parser.add_argument("--state-mb", type=int, required=True)
    options = parser.parse_args(arguments)
    with line(options.fd, options.parent) as parent, Worker(options.url) as worker:
        stage = Stage(worker, Model(), options.state_mb, parent)
        if options.role == "world":
            play(stage, worker.register(options.session, **stage.description()))
        while True:
            play(stage, handed_over(worker.standby(**stage.description()), parent))


if __name__ == "__main__":
    main(sys.argv[1:])
