"""How to bring what two tables differ in: spans cut into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from worldmove.manifest import LeafMap, Span


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
            if take <= 0 and batch:
                yield batch
                batch, room = [], limit
                continue
            take = min(left, max(take, leaf))
            batch.append(Span(span.region, offset, take))
            offset, left, room = offset + take, left - take, room - take
    if batch:
        yield batch
