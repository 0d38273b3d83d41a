"""How to bring what two tables differ in: spans cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from worldmove.manifest import LeafMap, Span

MOST_SPANS = 1024
"""Of one batch: planning what is done with it takes the event loop about 8 µs for each."""


def batches(spans: Iterable[Span], leaf_map: LeafMap, limit: int | Callable[[], int]) -> Iterator[list[Span]]:
    """Groups spans into batches of about `limit` bytes; long spans are cut at leaf boundaries.

    A batch exceeds `limit` only where a single leaf does, and has `MOST_SPANS` at most. A callable is asked
    before each batch.
    """
    size = limit if callable(limit) else lambda: limit
    batch: list[Span] = []
    room = size()
    for span in spans:
        leaf = int(leaf_map.leaf_bytes[span.region])
        offset, left = span.offset, span.length
        while left:
            take = left if left <= room else room // leaf * leaf
            if (take <= 0 or len(batch) == MOST_SPANS) and batch:
                yield batch
                batch, room = [], size()
                continue
            take = min(left, max(take, leaf))
            batch.append(Span(span.region, offset, take))
            offset, left, room = offset + take, left - take, room - take
    if batch:
        yield batch


def long_batches(
    spans: Iterable[Span], leaf_map: LeafMap, limit: int | Callable[[], int]
) -> Iterator[list[Span]]:
    """As `batches`, for carriers that bring long pieces fast, and short ones hardly faster.

    A span is cut only where it is longer than `limit`, and then into pieces of about the same length: what
    would be left over where batches are filled up costs as much time as the rest of the region.
    """
    size = limit if callable(limit) else lambda: limit
    batch: list[Span] = []
    room = most = size()
    for span in spans:
        leaf = int(leaf_map.leaf_bytes[span.region])
        pieces = max(-(-span.length // max(most // leaf * leaf, leaf)), 1)
        each = -(-span.length // (pieces * leaf)) * leaf
        offset, left = span.offset, span.length
        while left:
            take = min(left, each)
            if (take > room or len(batch) == MOST_SPANS) and batch:
                yield batch
                batch, room = [], (most := size())
            batch.append(Span(span.region, offset, take))
            offset, left, room = offset + take, left - take, room - take
    if batch:
        yield batch
