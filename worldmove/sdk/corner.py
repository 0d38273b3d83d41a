"""What a resized region keeps, as rows of bytes: the common corner of two shapes; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from worldmove.cuda.memory import Rows

MAX_PITCH = (1 << 31) - 1
"""CUDA's drivers take no larger pitch (CU_DEVICE_ATTRIBUTE_MAX_PITCH)."""


def corner(
    old: Sequence[int], new: Sequence[int], item: int, addresses: tuple[int, int] = (0, 0)
) -> Iterator[Rows]:
    """The bytes that two C-contiguous arrays have in common, in few copies.

    Args:
        old: a shape.
        new: another; with another number of dimensions, the common prefix of the elements is what is kept.
        item: bytes of an element.
        addresses: where the old array and the new one begin.
    """
    if len(old) != len(new):
        old, new = (math.prod(old),), (math.prod(new),)
    common = [min(pair) for pair in zip(old, new, strict=True)]
    if not all(common):
        return
    strides = [[item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))] for shape in (old, new)]
    same = [a == b for a, b in zip(old, new, strict=True)]
    # The last axis that differs: everything behind it is of one piece with it.
    row = max((axis for axis, equal in enumerate(same) if not equal), default=0)
    width = common[row] * strides[0][row] if common else item
    first, height = row, 1
    while first > 0 and (first == row or same[first]):
        first -= 1
        height *= common[first]
    pitches = [each[row - 1] if row else width for each in strides]
    if max(pitches) > MAX_PITCH or width > MAX_PITCH:
        first, height, pitches = row, 1, [width, width]
    for index in itertools.product(*(range(size) for size in common[:first])):
        at = [
            base + sum(step * stride for step, stride in zip(index, each, strict=False))
            for base, each in zip(addresses, strides, strict=True)
        ]
        yield Rows(at[0], at[1], width, height, pitches[0], pitches[1])
