"""Measuring a path at its first use: growing pieces of the state are pulled until one takes long enough."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from worldmove import delta
from worldmove.manifest import LeafMap, Span
from worldmove.paths import Path

FIRST_BYTES = 256 << 10
GROWTH = 4
LONG_S = 0.05
"""A pull that takes this long, the faster of two, tells the rate beside a host's hiccups."""
SHORTEST_S = 1e-9
LEAST_BYTES = 4 << 20
"""Less than this, in less time than that, says nothing about a path: it is over before it has begun."""


class Probe(NamedTuple):
    """What a probe found; `rate` in bytes per second is `None` where the state was too small to tell."""

    nbytes: int
    seconds: float
    rate: float | None
    delay_s: float


async def probe(path: Path, leaf_map: LeafMap) -> Probe:
    """Pulls pieces of a state into the memory that it comes to anyway, unverified; raises as `Path.pull`.

    The rate is that of the last piece beyond what the one before took: the round trip is not part of it.
    """
    spans = leaf_map.whole()
    if not spans:
        return Probe(0, 0.0, None, 0.0)
    size, before = FIRST_BYTES, (0, 0.0)
    while True:
        nbytes, seconds = min([await _pull(path, leaf_map, spans, size) for _ in range(2)])
        more, longer = nbytes - before[0], seconds - before[1]
        if nbytes < size or seconds >= LONG_S:
            break
        before, size = (nbytes, seconds), size * GROWTH
    if not nbytes:
        return Probe(0, seconds, None, seconds)
    whole = nbytes / seconds
    rate = more / longer if more > 0 and longer > 0 else whole
    delay_s = max(seconds - nbytes / max(rate, whole), 0.0)
    tells = nbytes >= LEAST_BYTES or (nbytes >= FIRST_BYTES and seconds >= LONG_S)
    return Probe(nbytes, seconds, max(rate, whole) if tells else None, delay_s)


async def _pull(path: Path, leaf_map: LeafMap, spans: list[Span], most: int) -> tuple[int, float]:
    pulls, nbytes = [], 0
    for batch in delta.batches(spans, leaf_map, min(path.batch_bytes, most)):
        pulls.append(batch)
        nbytes += sum(span.length for span in batch)
        if nbytes >= most:
            break
    free = asyncio.Semaphore(path.width)

    async def pull(batch: list[Span]) -> None:
        async with free:
            await path.pull(batch, urgent=False)

    start = time.monotonic()
    await asyncio.gather(*(pull(batch) for batch in pulls))
    return nbytes, max(time.monotonic() - start, SHORTEST_S)
