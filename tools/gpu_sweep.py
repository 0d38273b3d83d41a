"""What tools/gpu_direct.py sweeps: messages of direct lanes by size, depth, landing; where their time goes.

Two pools of real lanes carry a session from one GPU to the other, pulled in batches as a node does, without
nodes, workers and digests. The target is poisoned before each time and compared afterwards, every byte.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

import cupy
import numpy as np

from worldmove.bench.gpu_actor import BLOCKS, CODE, POISON, THREADS
from worldmove.cuda.memory import Device
from worldmove.delta import long_batches
from worldmove.directing import BATCH_BYTES, WIDTH
from worldmove.manifest import LeafMap, Region, Span
from worldmove.transport.account import lines
from worldmove.transport.lane_messages import Wish
from worldmove.transport.pool import Lane, LanePool, LaneRegion, mint_token

CHUNKS_MIB = (32, 64, 128, 256)
DEPTHS = (2, 3, 4)
LANDINGS = ("ring", "straight")
SLOTS = 8
SHOWN = 3
CONNECT_MS = 30_000.0
ALIGN = 2 << 20


class Memory:
    """An arena on a GPU, mapped here for writing and comparing."""

    def __init__(self, uuid: str, nbytes: int) -> None:
        self.device = Device(uuid)
        self.nbytes = self.device.room(nbytes)
        self.fd = self.device.create(nbytes)
        self._window = self.device.map(self.fd, nbytes)
        with cupy.cuda.Device(self.device.info.ordinal):
            module = cupy.RawModule(code=CODE)
            self._write = module.get_function("write_words")
            self._compare = module.get_function("compare_words")

    def _view(self) -> Any:
        face = {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._window.address, False),
            "version": 3,
        }
        return cupy.asarray(type("Face", (), {"__cuda_array_interface__": face})())

    def write(self, seed: int) -> None:
        """Gives it contents."""
        with cupy.cuda.Device(self.device.info.ordinal):
            arguments = (self._view(), np.uint64(self.nbytes // 8), np.uint64(seed))
            self._write((BLOCKS,), (THREADS,), arguments)
            cupy.cuda.get_current_stream().synchronize()

    def poison(self) -> None:
        """Fills it with what no session has."""
        with cupy.cuda.Device(self.device.info.ordinal):
            cupy.cuda.runtime.memset(self._window.address, POISON, self.nbytes)
            cupy.cuda.get_current_stream().synchronize()

    def wrong(self, seed: int) -> int:
        """Bytes that are not those of a seed."""
        with cupy.cuda.Device(self.device.info.ordinal):
            total = cupy.zeros(1, dtype=cupy.uint64)
            arguments = (self._view(), np.uint64(self.nbytes // 8), np.uint64(seed), total)
            self._compare((BLOCKS,), (THREADS,), arguments)
            return int(total[0])

    def close(self) -> None:
        """Gives it back."""
        self._window.close()
        os.close(self.fd)


class Sweep:
    """Both GPUs with a session's memory each.

    Args:
        devices: UUIDs.
        regions: how many.
        region_bytes: of each, a multiple of 2 MiB or rounded up to one.
        repeats: of each combination.
    """

    def __init__(self, devices: list[str], regions: int, region_bytes: int, repeats: int) -> None:
        self._devices = devices
        self._repeats = repeats
        size = -(-region_bytes // ALIGN) * ALIGN
        self._leaf_map = LeafMap([Region(f"r{number:02}", "uint8", (size,)) for number in range(regions)])
        self._regions = [LaneRegion(0, number * size, size) for number in range(regions)]
        self.nbytes = regions * size
        self._seed = 0

    async def run(self, until: float) -> dict[str, Any]:
        """All combinations, as far as time goes.

        Args:
            until: seconds of the monotonic clock.
        """
        near, far = (LanePool(gpu=uuid, spare=1, slots=SLOTS) for uuid in self._devices)
        source, target = (Memory(uuid, self.nbytes) for uuid in self._devices)
        rows: list[dict[str, Any]] = []
        left_out = []
        try:
            await asyncio.gather(near.start(), far.start())
            for landing in LANDINGS:
                for chunk in CHUNKS_MIB:
                    for depth in DEPTHS:
                        wish = Wish(chunk << 20, depth, landing)
                        if time.monotonic() > until:
                            left_out.append([landing, chunk, depth])
                            continue
                        rows.append(await self._row(near, far, source, target, wish=wish))
                        print(summary(rows[-1]), flush=True)
        finally:
            await asyncio.gather(near.close(), far.close())
            source.close()
            target.close()
        return {"bytes": self.nbytes, "rows": rows, "left_out": left_out}

    async def _row(
        self, near: LanePool, far: LanePool, source: Memory, target: Memory, *, wish: Wish
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for _ in range(self._repeats):
            self._seed += 1
            source.write(self._seed << 32)
            target.poison()
            giver = await near.lease("sweep", [(source.fd, source.nbytes)], self._regions, writable=False)
            taker = await far.lease("sweep", [(target.fd, target.nbytes)], self._regions, writable=True)
            token = mint_token()
            await giver.serve(token)
            await taker.connect("127.0.0.1", giver.port, token, CONNECT_MS, wish)
            ms = await self._pull(taker)
            rates = taker.opened.rates
            await taker.release()
            await giver.release()
            wrong = target.wrong(self._seed << 32)
            if wrong:
                raise SystemExit(f"{wish}: {wrong} bytes are wrong")
            found.append({"ms": ms, "rates": rates, "source": giver.account, "destination": taker.account})
        best = min(found, key=lambda one: one["ms"])
        median = statistics.median(one["ms"] for one in found)
        return {
            "chunk_mib": wish.chunk_bytes >> 20,
            "depth": wish.depth,
            "landing": wish.landing,
            "median_ms": median,
            "gb_per_s": self.nbytes / median / 1e6,
            "ms": [one["ms"] for one in found],
            "bare_gbps": best["rates"],
            "account": {"source": best["source"], "destination": best["destination"]},
        }

    async def _pull(self, lane: Lane) -> float:
        free = asyncio.Semaphore(WIDTH)
        began = time.perf_counter()

        async def pull(batch: list[Span]) -> None:
            try:
                await lane.pull(batch)
            finally:
                free.release()

        pulls = []
        for batch in long_batches(self._leaf_map.whole(), self._leaf_map, BATCH_BYTES):
            await free.acquire()
            pulls.append(asyncio.ensure_future(pull(batch)))
        await asyncio.gather(*pulls)
        return (time.perf_counter() - began) * 1000


def summary(row: dict[str, Any]) -> str:
    """A row as a line."""
    rates = ", ".join(f"{name} {rate / 8:.0f}" for name, rate in row["bare_gbps"].items())
    return (
        f"{row['landing']:<8} {row['chunk_mib']:>3} MiB x {row['depth']}: {row['median_ms']:7.2f} ms "
        f"({row['gb_per_s']:.0f} GB/s; bare GB/s: {rates})"
    )


def shown(rows: list[dict[str, Any]]) -> str:
    """The best rows with their accounts."""
    text = []
    for row in sorted(rows, key=lambda one: float(one["median_ms"]))[:SHOWN]:
        text.append(summary(row))
        for side, told in row["account"].items():
            text += [side, *("  " + line for line in lines(told))]
    return "\n".join(text)
