"""From a state to a document, and its bytes into the regions of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from worldmove.errors import DeviceError, ValidationError
from worldmove.torch import format as fmt
from worldmove.torch.arena import Arena, Home
from worldmove.torch.walk import Block, Leaf, Walked, blocks, dtype_of, walk


class Packed(NamedTuple):
    """A state in a world's regions: the document, and the generators' own objects by node."""

    document: fmt.Document
    generators: dict[int, Any]


Grow = Callable[[dict[Any, int]], Arena]
"""Makes the spills of devices so large, and returns the regions as they are then."""


def pack(state: Any, arena: Arena, grow: Grow | None) -> Packed | None:
    """Brings everything that lies outside of the regions into them, and describes the state.

    The GPUs that own its tensors are waited for first; the copies on them are not.

    Args:
        state: nested.
        arena: the regions.
        grow: called where the spill has not room enough.

    Returns:
        `None` where there is no room and `grow` is `None`; nothing was copied then.

    Raises:
        ValidationError: the state holds something that can't be moved.
        ManifestError, NoMemoryError: from `grow`.
        DeviceError: work on a GPU has failed.
    """
    walked = walk(state)
    found = blocks(walked.leaves)
    placement = arena.place(found)
    if placement.wanted:
        if grow is None:
            return None
        arena = grow(placement.wanted)
        placement = arena.place(found)
    homes = [home for home in placement.homes if home is not None]
    try:
        synchronise(walked.devices)
        for block, home in zip(found, homes, strict=True):
            if home.copy:
                arena.copy(block, home)
    except RuntimeError as error:
        raise DeviceError(f"the state could not be copied into its regions: {error}") from error
    return Packed(_document(walked, found, homes), walked.generators)


def synchronise(devices: Iterable[Any]) -> None:
    """Returns when the CUDA devices among these have done everything that this process gave them.

    Side streams too: the whole context is waited for.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _document(walked: Walked, found: Sequence[Block], homes: Sequence[Home]) -> fmt.Document:
    memory: dict[fmt.Memory, int] = {}
    nodes = list(walked.nodes)
    for block, home in zip(found, homes, strict=True):
        where = walked.devices.index(block.device)
        number = memory.setdefault(fmt.Memory(home.region, where, home.offset, block.nbytes), len(memory))
        for leaf in block.leaves:
            nodes[leaf.node] = _view(leaf, number, block.start)
    for leaf in walked.leaves:
        if leaf.start == leaf.end:
            lies = fmt.Memory(None, walked.devices.index(leaf.device), 0, 0)
            nodes[leaf.node] = _view(leaf, memory.setdefault(lies, len(memory)), None)
    devices = [str(device.type) for device in walked.devices]
    whole = [node for node in nodes if node is not None]
    return fmt.Document(fmt.MAGIC, fmt.VERSION, devices, list(memory), whole)


def _view(leaf: Leaf, memory: int, start: int | None) -> fmt.Node:
    """A leaf as a view of its block, which begins at `start`; `None` where there is none."""
    value = leaf.value
    shape = [int(size) for size in value.shape]
    dtype = dtype_of(value)
    if isinstance(value, np.ndarray):
        offset = 0 if start is None else value.ctypes.data - start
        return fmt.Array(dtype, shape, list(value.strides), memory, offset, bool(value.flags.writeable))
    # An empty view has no address of its own: torch says 0.
    address = leaf.start + value.storage_offset() * value.element_size()
    offset = 0 if start is None else address - start
    if offset % value.element_size():
        raise ValidationError(f"state[{leaf.path!r}] shares memory at an odd address", field="state")
    return fmt.Tensor(dtype, shape, list(value.stride()), memory, offset)
