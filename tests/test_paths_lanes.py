"""The *staged* path over lanes alone: what is certain once it is quiet."""

from __future__ import annotations

import asyncio

import numpy as np
from fault_kit import gone
from transport_kit import MB, Arena, lanes, lease_pair, whole

from worldmove.gate import Gate
from worldmove.manifest import Span
from worldmove.paths import StagedPath


async def test_quiet_means_that_no_lane_of_the_path_is_left() -> None:
    """Only the end of its process makes it certain that a lane writes no more; the gate has room again."""
    source, target = Arena(64 * MB, 1), Arena(64 * MB)
    gate = Gate(None, 64 * MB)
    async with lanes(stall_ms=5000) as pool:
        pairs = [await lease_pair(pool, source, target, whole(source)) for _ in range(2)]
        pids = [taker.pid for _, taker in pairs]
        path = StagedPath([taker for _, taker in pairs], gate.join("m", "S"))
        pulls = [
            asyncio.ensure_future(path.pull([Span(0, part * 4 * MB, 4 * MB)], urgent=True))
            for part in range(16)
        ]
        await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        path.abort()
        await path.quiet()
        assert all(gone(pid) for pid in pids)
        stands = target.bytes.copy()
        source.bytes[:] = 0
        await asyncio.gather(*pulls, return_exceptions=True)
        assert np.array_equal(target.bytes, stands)
        view = gate.view()
        assert (view.outstanding_bytes, view.waiting) == (0, 0)
