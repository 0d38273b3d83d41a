"""Which leaves two tables don't prove equal: the plain reference of table_diff.cu."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worldmove.kernels.addresses import Bytes

DIFF_THREADS = 1024
"""Leaves that one thread block of the kernels looks at."""

Mask = npt.NDArray[np.bool_] | Bytes


def table_diff(
    mine: Bytes, theirs: Bytes, known_mine: Mask, known_theirs: Mask, base: int = 0
) -> npt.NDArray[np.int64]:
    """Leaves that differ, or that one side doesn't know.

    Args:
        mine: uint8[leaves, 16].
        theirs: as many rows.
        known_mine: one byte for each leaf; 0: the row means nothing.
        known_theirs: likewise for `theirs`.
        base: added to every index, where the tables are a part of larger ones.

    Returns:
        int64, ascending.
    """
    equal = np.all(mine == theirs, axis=1) & (known_mine != 0) & (known_theirs != 0)
    return np.flatnonzero(~equal).astype(np.int64, copy=False) + base
