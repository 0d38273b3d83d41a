"""What to send: the leaves in which two tables differ, and how to cut them into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from worldmove.manifest import LeafMap, Span

Digests = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Leaves = npt.NDArray[np.int64]


def differing(mine: Digests, theirs: Digests, known: Mask, first: int, count: int) -> Leaves:
    """Leaf indices in `first … first + count - 1` that are unknown here or have another digest there.

    Args:
        mine: uint64[leaves, 2], the digests of what lies in memory here; meaningless where not `known`.
        theirs: uint64[leaves, 2], the digests to arrive at.
        known: bool[leaves].
        first: first leaf index that is compared.
        count: number of leaves that are compared.
    """
    part = slice(first, first + count)
    unequal = (mine[part] != theirs[part]).any(axis=1) | ~known[part]
    return np.flatnonzero(unequal) + first


def batches(spans: Iterable[Span], leaf_map: LeafMap, limit: int) -> Iterator[list[Span]]:
    """Groups spans into batches of about `limit` bytes; long spans are cut at leaf boundaries.

    A batch exceeds `limit` only where a single leaf does.
    """
    batch: list[Span] = []
    room = limit
    for span in spans:
        leaf = int(leaf_map.leaf_bytes[span.region])
        offset, left = span.offset, span.length
        while left:
            take = left if left <= room else room // leaf * leaf
            if take == 0 and batch:
                yield batch
                batch, room = [], limit
                continue
            take = min(left, max(take, leaf))
            batch.append(Span(span.region, offset, take))
            offset, left, room = offset + take, left - take, room - take
    if batch:
        yield batch


def leaf_indices(spans: Iterable[Span], leaf_map: LeafMap) -> Leaves:
    """All leaf indices that the (leaf-aligned) spans cover."""
    ranges = [leaf_map.leaves_of(span) for span in spans]
    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
