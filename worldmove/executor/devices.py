"""All executors of a node: one pool for the host's memory, and one for each GPU's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from worldmove.errors import ManifestError
from worldmove.executor.pool import ExecutorPool


class Pools(Protocol):
    """Who works on which device's memory: `Executors`, or one pool of host memory that stands alone."""

    @property
    def host(self) -> ExecutorPool:
        """The pool of host memory, which also hashes leaf tables."""

    @property
    def pids(self) -> list[int]:
        """The living executors' processes."""

    def of(self, device: str) -> ExecutorPool:
        """The pool of a device; `ManifestError` where this node has no such device."""


class Executors:
    """The pools of a node, by device.

    Args:
        host: of host memory.
        gpus: of each GPU, by UUID.
    """

    def __init__(self, host: ExecutorPool, gpus: Mapping[str, ExecutorPool]) -> None:
        self.host = host
        self.gpus = dict(gpus)

    def __iter__(self) -> Iterator[ExecutorPool]:
        return iter((self.host, *self.gpus.values()))

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that a region may lie on."""
        return ("host", *self.gpus)

    @property
    def pids(self) -> list[int]:
        """The living executors' processes."""
        return [pid for pool in self for pid in pool.pids]

    def of(self, device: str) -> ExecutorPool:
        """The pool of a device.

        Raises:
            ManifestError: this node has no such device; those that it has stand in the message.
        """
        pool = self.host if device == "host" else self.gpus.get(device)
        if pool is None:
            raise ManifestError(
                f"device {device!r} is not on this node; allowed: {list(self.devices)}", field="device"
            )
        return pool

    async def start(self) -> None:
        """Starts all; returns when they take requests.

        Raises:
            ProcessLostError: one can't be started; none is left behind.
        """
        starting = [asyncio.ensure_future(pool.start()) for pool in self]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._give_up(starting)))
            raise

    async def _give_up(self, starting: Sequence[asyncio.Future[None]]) -> None:
        await asyncio.gather(*starting, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        """Finishes the jobs that are there, takes no new ones, and ends all executors."""
        await asyncio.gather(*(pool.close() for pool in self))
