"""The devices of one node: who works on their memory, and what sessions may still take of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from worldmove.config import Settings
from worldmove.cuda.driver import DeviceInfo
from worldmove.cuda.isolation import broken
from worldmove.cuda.probe import driver_present, probe
from worldmove.errors import ConfigError, ValidationError, WorldMoveError
from worldmove.executor import kinds
from worldmove.executor.crew import EventSink
from worldmove.executor.devices import Executors
from worldmove.executor.faults import executor_faults
from worldmove.executor.pool import ExecutorPool
from worldmove.memory.arena import MemoryBudget
from worldmove.memory.near import near
from worldmove.rings import Rings
from worldmove.transport.packing import SLOT_BYTES
from worldmove.transport.pool import LanePool
from worldmove.views import DeviceView

MOST_DIRECT = 4
"""Direct lanes of one GPU at once: as many moves, and each holds a ring."""


class Devices:
    """Host memory, and the GPUs that the option `gpus` names. Gives out memory (`hosting.memory.Arenas`).

    Attributes:
        executors: of all devices; the GPUs' are there after `start`.
        rings: through which tcp lanes carry the GPUs' memory.
        direct: lanes of each GPU; started when they are first wanted, or with `path` direct at once.
        budget: of host memory. A GPU counts for itself: an allocation that doesn't fit is refused.
    """

    def __init__(self, settings: Settings, on_event: EventSink) -> None:
        self._stall_s = settings.stall_ms / 1000
        host = ExecutorPool(settings.executors, stall_s=self._stall_s, on_event=on_event)
        self.executors = Executors(host, {})
        self.budget = MemoryBudget(settings.memory_limit)
        self.rings = Rings(self.executors, self, keep=2 * settings.lanes, cpus=self._cpus_near)
        self.direct: dict[str, LanePool] = {}
        self._settings = settings
        self._on_event = on_event
        self._found: dict[str, DeviceInfo] = {}
        self._faults = executor_faults(settings.faults)

    async def start(self) -> None:
        """Finds the GPUs and starts all executors; returns when they take requests.

        Raises:
            ConfigError: a GPU that was named is not there, or is not isolated (MPS, compute mode).
            DeviceError: there is a driver, and it can't be used.
            ProcessLostError: an executor can't be started; none is left behind.
        """
        self._found = {device.uuid: device for device in await self._wanted()}
        await self._check_isolation()
        for uuid in self._found:
            self.executors.gpus[uuid] = ExecutorPool(
                1, nice=0, stall_s=self._stall_s, on_event=self._on_event, kind=kinds.gpu(uuid, self._faults)
            )
        await self.executors.start()
        if self._settings.path not in ("local", "staged"):
            self.direct.update((uuid, self._lanes_of(uuid)) for uuid in self._found)
            await asyncio.gather(*(pool.start() for pool in self.direct.values()))

    def _lanes_of(self, uuid: str) -> LanePool:
        settings = self._settings
        return LanePool(
            spare=1 if settings.path == "direct" else 0,
            limit=MOST_DIRECT,
            stall_ms=int(settings.stall_ms),
            device=settings.lane_device,
            gpu=uuid,
            slots=settings.direct_ring // SLOT_BYTES,
            faults=settings.faults,
            on_event=self._on_event,
        )

    async def _check_isolation(self) -> None:
        why = await asyncio.to_thread(broken, tuple(self._found)) if self._found else ""
        if why:
            named = self._settings.gpus
            raise ConfigError(
                f"gpus is {named!r}: {why}, or serve host memory alone: --gpus none",
                option="gpus",
                value=named,
            )

    async def _wanted(self) -> list[DeviceInfo]:
        named = self._settings.gpus
        if named == "none" or (named == "auto" and not driver_present()):
            return []
        there = await probe()
        if named == "auto":
            return there
        wanted = named.split(",")
        found = [device for device in there if device.uuid in wanted]
        if len(found) < len(wanted):
            raise ConfigError(
                f"gpus is {named!r}; allowed: {', '.join(device.uuid for device in there) or 'none'}",
                option="gpus",
                value=named,
            )
        return found

    async def close(self) -> None:
        """Ends direct lanes and executors, and frees the rings, which no lane may have mapped any more."""
        await asyncio.gather(*(pool.close() for pool in self.direct.values()))
        await self.rings.close()
        await self.executors.close()

    def _cpus_near(self, device: str) -> tuple[int, ...]:
        found = self._found.get(device)
        return near(found.bus_id) if found is not None else ()

    def named(self, name: str) -> str:
        """The UUID of a device that somebody names: by it, by its number among the GPUs here, or as `host`.

        Raises:
            ValidationError: this node has no such device.
        """
        gpus = tuple(self._found)
        if name in self.executors.devices:
            return name
        if name.isdecimal() and int(name) < len(gpus):
            return gpus[int(name)]
        raise ValidationError(
            f"devices names {name!r}; node {self._settings.name} has {list(self.executors.devices)}",
            field="devices",
            value=name,
        )

    def missing(self) -> list[str]:
        """What does not take requests now."""
        lacking = [] if len(self.executors.host.pids) >= self._settings.executors else ["executors"]
        return lacking + [
            f"executor of {uuid}" for uuid, pool in self.executors.gpus.items() if not pool.pids
        ]

    async def views(self) -> tuple[DeviceView, ...]:
        """Every device, with what sessions may still take of it; 0 where a GPU's executor can't say."""
        host = DeviceView(
            uuid="host",
            kind="host",
            name="host memory",
            total_bytes=self.budget.total,
            free_bytes=self.budget.free,
        )
        return (host, *[await self._view(device) for device in self._found.values()])

    async def _view(self, device: DeviceInfo) -> DeviceView:
        try:
            free, _ = await self.executors.gpus[device.uuid].measure()
        except WorldMoveError:
            free = 0
        return DeviceView(
            uuid=device.uuid,
            kind="cuda",
            name=device.name,
            total_bytes=device.total_bytes,
            free_bytes=free,
        )

    async def allocate(self, sizes: Sequence[int], name: str, *, cpus: Collection[int] = ()) -> list[int]:
        """See `MemoryBudget.allocate`."""
        return await self.budget.allocate(sizes, name, cpus=cpus)

    async def allocate_on(self, device: str, nbytes: int) -> int:
        """An arena of zero bytes on a GPU; see `ExecutorPool.allocate`.

        Raises:
            ManifestError: this node has no such GPU.
        """
        return await self.executors.of(device).allocate(nbytes)

    async def check_on(self, device: str, fd: int, nbytes: int) -> None:
        """Checks that a GPU can map memory that a worker made.

        Raises:
            ManifestError: this node has no such GPU.
            ValidationError: it can't.
            ProcessLostError: nobody can tell now.
        """
        pool = self.executors.of(device)
        await pool.detach(await pool.attach(fd, nbytes, writable=False, device=True))

    def adopt(self, nbytes: int) -> None:
        """Counts host memory that a worker made itself."""
        self.budget.adopt(nbytes)

    def release(self, nbytes: int) -> None:
        """Takes back what was counted of host memory."""
        self.budget.release(nbytes)
