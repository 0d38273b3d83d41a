"""Worlds of PyTorch stacks: a nested state as it is becomes a session, and is restored as it was.

    from worldmove.torch import TorchWorker

    world = TorchWorker("http://127.0.0.1:8001").register("world-7", state, block_ms=750, horizon_ms=250)
    state = world.state
    while True:
        with world.block():
            generate_block(state)
        world.boundary(state)

`docs/torch.md` says what a state may hold, and how it is written down. Only this package imports torch.
"""

from worldmove.torch.pack import synchronise
from worldmove.torch.worker import TorchWorker, state_regions
from worldmove.torch.world import TorchStandby, TorchWorld

__all__ = ["TorchStandby", "TorchWorker", "TorchWorld", "state_regions", "synchronise"]
