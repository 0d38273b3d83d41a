"""How to bring what two tables differ in: spans cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from worldmove.manifest import LeafMap, Span


def batches(spans: Iterable[Span], leaf_map: LeafMap, limit: int | Callable[[], int]) -> Iterator[list[Span]]:
    """Groups spans into batches of about `limit` bytes; long spans are cut at leaf boundaries.

    A batch exceeds `limit` only where a single leaf does. A callable is asked before each batch.
    """
    size = limit if callable(limit) else lambda: limit
    batch: list[Span] = []
    room = size()
    for span in spans:
        leaf = int(leaf_map.leaf_bytes[span.region])
        offset, left = span.offset, span.length
        while left:
            take = left if left <= room else room // leaf * leaf
            if take <= 0 and batch:
                yield batch
                batch, room = [], size()
                continue
            take = min(left, max(take, leaf))
            batch.append(Span(span.region, offset, take))
            offset, left, room = offset + take, left - take, room - take
    if batch:
        yield batch
