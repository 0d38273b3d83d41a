"""A host with real workers: fixtures and helpers of the tests of sessions on a node."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from hosting_worker import host_state, pattern

from worldmove.errors import ConnectionLostError
from worldmove.hosting.host import Host
from worldmove.hosting.pausing import Change, Pause
from worldmove.hosting.slots import Slot
from worldmove.ipc import Channel, close_all, map_shared
from worldmove.manifest import Manifest, Region
from worldmove.memory.arena import MemoryBudget
from worldmove.page.messages import Hello, Message, NodeMessage, Ready
from worldmove.sdk.tickets import Ticket, write_ticket
from worldmove.views import SessionSpec
from worldmove.views import Ticket as TicketView

WORKER = Path(__file__).with_name("hosting_worker.py")
NOWHERE = "http://127.0.0.1:9"
PATIENCE_S = 20.0


def manifest(*regions: Region, **more: Any) -> Manifest:
    regions = regions or (Region("k", "float32", (33, 7)), Region("index", "int64", (1,)))
    return Manifest(**{"model": "m", "regions": regions, "block_ms": 20.0, "horizon_ms": 50.0, **more})


def spec(*regions: Region, fingerprint: dict[str, str] | None = None, **more: Any) -> SessionSpec:
    return SessionSpec(manifest=manifest(*regions, **more), fingerprint=fingerprint or {"cpu": "x"})


def line(slot_id: str, host: Host, ticket: TicketView) -> str:
    """A ticket as the SDK passes it between processes."""
    return write_ticket(Ticket(slot_id, str(host.socket_path), ticket.rank, ticket.token))


class Changes:
    """What a host reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Change]] = []
        self._news = asyncio.Event()

    def __call__(self, slot: Slot, change: Change) -> None:
        self.seen.append((slot.id, change))
        self._news.set()

    async def wait(self, slot: Slot, change: Change, count: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.seen.count((slot.id, change)) < count:
                self._news.clear()
                await self._news.wait()


class HostKit:
    """A host and the processes around it."""

    def __init__(self, host: Host, budget: MemoryBudget, changes: Changes, stack: contextlib.AsyncExitStack):
        self.host = host
        self.budget = budget
        self.changes = changes
        self._stack = stack

    async def worker(self, url: str = NOWHERE, **options: Any) -> WorkerProcess:
        worker = await WorkerProcess.start(url, **options)
        self._stack.push_async_callback(worker.kill)
        return worker

    async def session(
        self, *regions: Region, session_id: str = "w", **more: Any
    ) -> tuple[Slot, list[WorkerProcess]]:
        """A session with a worker for each rank."""
        slot, tickets = await self.host.open_session(spec(*regions, **more), session_id, 1)
        return slot, await self.join(slot, tickets)

    async def join(self, slot: Slot, tickets: Sequence[TicketView]) -> list[WorkerProcess]:
        workers = [await self.worker() for _ in tickets]
        for worker, ticket in zip(workers, tickets, strict=True):
            await worker("join", ticket=line(slot.id, self.host, ticket))
        return workers

    async def standby(self, *regions: Region, **more: Any) -> tuple[Slot, list[WorkerProcess]]:
        slot, tickets = await self.host.open_standby(spec(*regions, **more))
        workers = [await self.worker() for _ in tickets]
        for worker, ticket in zip(workers, tickets, strict=True):
            await worker("standby", ticket=line(slot.id, self.host, ticket))
        await self.changes.wait(slot, "attached")
        return slot, workers


@contextlib.asynccontextmanager
async def host_kit(run_dir: Path, *, keeper: Any = None, incarnation: int = 1) -> AsyncIterator[HostKit]:
    """A host at `run_dir`; workers are killed and the host is closed at the end."""
    changes = Changes()
    budget = MemoryBudget()
    host = Host(
        socket_path=run_dir / "node.sock",
        incarnation=incarnation,
        arenas=budget,
        keeper=keeper,
        on_change=changes,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.close)
        await host.recover()
        host.start()
        yield HostKit(host, budget, changes, stack)


class WorkerProcess:
    """A serving stack; calling it sends a command and returns the answer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._pending: asyncio.Task[dict[str, Any]] | None = None

    @classmethod
    async def start(cls, url: str, **options: Any) -> WorkerProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(WORKER),
            url,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=16 * 1024 * 1024,
            **options,
        )
        return cls(process)

    def tell(self, what: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            text = await self.process.stdout.readline()
        if not text:
            raise EOFError("the worker has ended")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def __call__(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command; an error that the stack met is an answer with `error`."""
        self.tell(what, **arguments)
        return await self.hear()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        # What it started (a keeper) may hold its pipes: they are closed from here.
        self.process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)


def region_bytes(slot: Slot, name: str) -> bytes:
    """What lies in the node's memory under a region's name now."""
    index = [region.name for region in slot.manifest.regions].index(name)
    place, region = slot.places[index], slot.manifest.regions[index]
    with contextlib.closing(map_shared(slot.fds[place.extent], slot.extents[place.extent].nbytes)) as memory:
        return memory[place.offset : place.offset + region.nbytes]


def assert_world(slot: Slot, block: int) -> None:
    """Every byte of every region is that of `block`."""
    for region in slot.manifest.regions:
        wanted = pattern(region.name, block, region.nbytes) if block else bytes(region.nbytes)
        assert region_bytes(slot, region.name) == wanted, (region.name, block)


def assert_pause(slot: Slot, pause: Pause) -> None:
    """The ranks stand at one block, and regions and host states are those of it."""
    assert pause.held
    assert_world(slot, pause.block)
    if pause.block:
        assert pause.host_states == tuple(host_state(r, pause.block) for r in range(len(pause.host_states)))


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what the kernel or a thread does in its own time, and reports to nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


def descriptors() -> int:
    """Open descriptors of this process, but for what earlier tests left to the collector."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


class Caller:
    """A bare connection to the door."""

    def __init__(self, kit: HostKit) -> None:
        self.kit = kit
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(kit.host.socket_path))
        self.channel: Channel[NodeMessage] = Channel(self.sock, NodeMessage)

    async def enter(self, slot: Slot, ticket: TicketView) -> None:
        """Comes in as the only rank's worker."""
        await self.say(Hello(ticket.token))
        await self.hear()
        await self.channel.send(Ready())
        await self.kit.changes.wait(slot, "attached")

    async def say(self, message: Message) -> NodeMessage:
        await self.channel.send(message)
        return await self.hear()

    async def hear(self) -> NodeMessage:
        async with asyncio.timeout(10):
            message, fds = await self.channel.receive()
        close_all(fds)
        return message

    async def gone(self) -> None:
        """Returns when the node has closed the connection, whatever it said before."""
        with contextlib.suppress(ConnectionLostError):
            while await self.hear():
                pass
        self.channel.close()
