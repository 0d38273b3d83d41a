"""Which programs play in a demo: the landscape on host memory, or the video world of `--gpu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worldmove.cuda.probe import probe
from worldmove.errors import DeviceError

NODES = ("A", "B")
GPU_BLOCK_MS = 750.0


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


def video(devices: Sequence[str], shape: str, block_ms: float) -> Programs:
    """The video world.

    Args:
        devices: UUIDs of two GPUs, or `cpu` twice; the twin runs on the second.
        shape: a name in `worldmove.demo.video.shape.SHAPES`.
        block_ms: how often a block begins, at least.
    """
    here = dict(zip(NODES, devices, strict=True))
    pace = {"block-ms": str(block_ms)}
    return Programs(
        "worldmove.demo.video.actor",
        "worldmove.demo.video.twin",
        {"shape": shape},
        actors={node: {"device": device, **pace} for node, device in here.items()},
        twins={"device": devices[-1]},
        nodes={node: ("--gpus", "none" if device == "cpu" else device) for node, device in here.items()},
    )


async def two_gpus() -> tuple[str, str]:
    """UUIDs of the first two GPUs; the only one twice.

    Raises:
        DeviceError: there is none.
    """
    found = await probe()
    if not found:
        raise DeviceError("there is no GPU here: worldmove demo without --gpu runs on host memory")
    return found[0].uuid, found[1 % len(found)].uuid
