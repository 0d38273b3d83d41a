"""Helpers of the data plane's tests: memory, connected pairs, leased lanes."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worldmove.manifest import Span
from worldmove.transport.base import Connection, Transport
from worldmove.transport.pool import Lane, LanePool, LaneRegion, mint_token

MOVE = "m-1"
MB = 1 << 20
HZ = os.sysconf("SC_CLK_TCK")


class Arena:
    """A memfd, filled with noise or zeros, as both descriptor and array."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.fd = os.memfd_create("test-arena", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, nbytes)
        self.nbytes = nbytes
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def __del__(self) -> None:
        os.close(self.fd)


async def join(one: Transport, other: Transport) -> tuple[Connection, Connection, Any]:
    """A connection's calling and called end, and the listener."""
    listener = await other.listen()
    mine, theirs = await asyncio.gather(one.connect("127.0.0.1", listener.port, 5.0), listener.accept())
    return mine, theirs, listener


async def lease_pair(
    pool: LanePool,
    source: Arena,
    destination: Arena,
    regions: list[LaneRegion],
    *,
    their_regions: list[LaneRegion] | None = None,
) -> tuple[Lane, Lane]:
    """A connected pair of lanes: source's and destination's."""
    giver = await pool.lease(MOVE, [(source.fd, source.nbytes)], regions, writable=False)
    taker = await pool.lease(
        MOVE, [(destination.fd, destination.nbytes)], their_regions or regions, writable=True
    )
    token = mint_token()
    await giver.serve(token)
    await taker.connect("127.0.0.1", giver.port, token, 5000)
    return giver, taker


@asynccontextmanager
async def lanes(**options: Any) -> AsyncIterator[LanePool]:
    """A pool that is closed again."""
    pool = LanePool(**{"spare": 0, **options})
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def mapped(pid: int, name: str = "test-arena") -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


def whole(arena: Arena) -> list[LaneRegion]:
    return [LaneRegion(0, 0, arena.nbytes)]


def cut(nbytes: int, step: int) -> list[list[Span]]:
    return [[Span(0, start, min(step, nbytes - start))] for start in range(0, nbytes, step)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HZ


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until_gone(pid: int) -> None:
    """Waits for the end of a process by its pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
