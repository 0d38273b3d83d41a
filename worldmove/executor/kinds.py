"""What kinds of executors there are: for the host's memory, and for each GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worldmove.executor.parts import MAX_PART_BYTES, MIN_PART_BYTES

HOST_READY_S = 10.0
GPU_READY_S = 120.0
"""A GPU's executor may have to compile its kernels when it is started for the first time."""


class Kind(NamedTuple):
    """Which program runs, and how work is cut for it.

    Attributes:
        device: whose memory: `host`, or a GPU's UUID.
        module: the program; arguments: its own.
        ready_s: how long it may take to get ready, beside the time of a stall.
        window: requests that an executor has at once: one in work, others that follow without a gap.
        smallest_part: bytes of a part, where there is enough to do. largest_part: likewise.
        alone: parts of a job that a single executor does: a device begins with one beside the next request.
    """

    device: str = "host"
    module: str = "worldmove.executor.host"
    arguments: tuple[str, ...] = ()
    ready_s: float = HOST_READY_S
    window: int = 2
    smallest_part: int = MIN_PART_BYTES
    largest_part: int = MAX_PART_BYTES
    alone: int = 1


HOST = Kind()


def gpu(uuid: str, faults: Sequence[str] = ()) -> Kind:
    """The executor of a GPU: parts as large as the device does in half a millisecond, several under way.

    Args:
        uuid: of the GPU.
        faults: of `worldmove.executor.faults`.
    """
    return Kind(
        device=uuid,
        module="worldmove.executor.cuda",
        arguments=("--device", uuid, "--faults", ",".join(faults)),
        ready_s=GPU_READY_S,
        window=32,
        smallest_part=256 << 20,
        largest_part=1 << 30,
        alone=2,
    )
