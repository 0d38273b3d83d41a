"""Which programs play in a demo: the landscape on host memory, or the video world of `--gpu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worldmove.cuda.probe import usable
from worldmove.demo.video import ready
from worldmove.errors import ConfigError

NODES = ("A", "B")
GPU_BLOCK_MS = 750.0
BLOCK_MS = (1.0, 5000.0)
"""What a video world's block may take: a tour waits a minute for nine of them."""


class Programs(NamedTuple):
    """Modules and their options, for `python -m`.

    Attributes:
        actor: what runs beside each node.
        twin: what generates the same blocks without ever moving.
        common: options of all of them.
        actors: more options by node.
        twins: more options of the twin.
        nodes: more options of each node's `worldmove serve`.
    """

    actor: str
    twin: str
    common: Mapping[str, str]
    actors: Mapping[str, Mapping[str, str]] = {}
    twins: Mapping[str, str] = {}
    nodes: Mapping[str, Sequence[str]] = {}


def words(options: Mapping[str, str]) -> list[str]:
    """`{"a": "b"}` as `--a b`."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def landscape(state_mb: int) -> Programs:
    """The reference world of `worldmove.demo.world`, about `state_mb` MB in host memory."""
    return Programs("worldmove.demo.actors", "worldmove.demo.twin", {"state-mb": str(state_mb)})


def video(devices: Sequence[str], shape: Mapping[str, str], block_ms: float) -> Programs:
    """The video world.

    Args:
        devices: UUIDs of two GPUs, or `cpu` twice; the twin runs on the second.
        shape: as `worldmove.demo.video.shape.options_for` says it.
        block_ms: how often a block begins, at least.

    Raises:
        ConfigError: no world of a tour has such blocks.
    """
    least, most = BLOCK_MS
    if not least <= block_ms <= most:
        raise ConfigError(f"block_ms is {block_ms:g}; allowed: {least:g} to {most:g}", option="block_ms")
    here = dict(zip(NODES, devices, strict=True))
    pace = {"block-ms": str(block_ms)}
    return Programs(
        "worldmove.demo.video.actor",
        "worldmove.demo.video.twin",
        shape,
        actors={node: {"device": device, **pace} for node, device in here.items()},
        twins={"device": devices[-1]},
        nodes={node: ("--gpus", "none" if device == "cpu" else device) for node, device in here.items()},
    )


async def stages(*, gpu: bool) -> tuple[str, str]:
    """Where a video world plays: UUIDs of the first two GPUs, the only one twice, or `cpu` twice.

    Raises:
        ConfigError: a GPU, CuPy or PyTorch is missing; nothing has been started.
    """
    found = [device.uuid for device in await usable()] if gpu else ["cpu"]
    await ready.check(gpu=gpu)
    return found[0], found[1 % len(found)]
