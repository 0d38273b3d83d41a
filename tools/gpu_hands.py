"""What tools/gpu_devices.py stands on: workers that do what they are told, and moves that are checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from worldmove.bench.nodes import RunningNode
from worldmove.client import AsyncClient
from worldmove.errors import WorldMoveError
from worldmove.views import MigrationRequest, MigrationView, Receipt

ACTOR = Path(__file__).resolve().with_name("gpu_worlds.py")
ANSWER_S = 90.0
HOST_MIB = 8
SLACK = 2 << 20
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms", "sent_bytes")
Regions = list[dict[str, Any]]


class WrongError(Exception):
    """Something is not as it has to be."""


def need(holds: object, what: str, *facts: object) -> None:
    """Raises unless something holds."""
    if not holds:
        raise WrongError(f"{what}: {' '.join(repr(fact) for fact in facts)}")


class Hand:
    """A `tools/gpu_worlds.py` process at one node."""

    def __init__(self, node: RunningNode, process: asyncio.subprocess.Process) -> None:
        self.node = node
        self._process = process

    @classmethod
    async def start(cls, node: RunningNode, **environment: str) -> Hand:
        """Starts one."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ACTOR), node.url, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,
            limit=1 << 22,
        )
        return cls(node, process)

    def begin(self, do: str, **more: Any) -> None:
        """Gives an order."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")

    async def read(self) -> dict[str, Any]:
        """The answer to the oldest order that has none."""
        stdout = self._process.stdout
        async with asyncio.timeout(ANSWER_S):
            line = await stdout.readline() if stdout is not None else b""
        need(line, "a worker has ended", self.node.name)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """An order and its answer, which is no error."""
        answer = await self.refused(do, **more)
        need("error" not in answer, do, answer)
        return answer

    async def refused(self, do: str, **more: Any) -> dict[str, Any]:
        """An order and its answer."""
        self.begin(do, **more)
        return await self.read()

    async def still(self) -> dict[str, Any]:
        """Ends an order that goes on, and returns its answer."""
        self.begin("still")
        answer = await self.read()
        await self.read()
        return answer

    async def end(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


class Trial:
    """Both nodes, and workers at them.

    Attributes:
        gpus: UUIDs of two GPUs.
    """

    def __init__(self, nodes: list[RunningNode], gpus: list[str], mib: int) -> None:
        self.nodes = nodes
        self.gpus = gpus
        self.mib = mib
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One scenario: its workers end with it, and their sessions."""
        async with self._stack:
            yield
        self._stack = contextlib.AsyncExitStack()
        async with AsyncClient(self.nodes[0].url) as client:
            for session in (await client.sessions()).sessions:
                with contextlib.suppress(WorldMoveError):
                    await client.end_session(session.id)

    async def hand(self, node: int, **environment: str) -> Hand:
        """Another worker at a node."""
        hand = await Hand.start(self.nodes[node], **environment)
        self._stack.push_async_callback(hand.end)
        return hand

    def client(self, node: int) -> AsyncClient:
        """A client of a node."""
        return AsyncClient(self.nodes[node].url)

    def regions(self, **devices: str) -> Regions:
        """Regions of `mib` MiB each (8 in host memory), by name and device."""
        return [self.region(name, device) for name, device in devices.items()]

    def region(self, name: str, device: str, mib: int | None = None) -> dict[str, Any]:
        """One region: bf16, [1, tokens, 4, 128]."""
        size = mib or (HOST_MIB if device == "host" else self.mib)
        return {"name": name, "dtype": "bfloat16", "shape": [1, size << 10, 4, 128], "device": device}

    async def free(self, node: int) -> list[int]:
        """Free bytes of the GPUs, as a node says."""
        async with self.client(node) as client:
            view = await client.node()
        return [device.free_bytes for device in view.devices if device.kind == "cuda"]

    async def settles(self, before: list[int]) -> list[int]:
        """Waits until the GPUs have as much free memory as before, give or take a driver's few megabytes."""
        for _ in range(100):
            now = await self.free(0)
            if all(there >= once - SLACK for there, once in zip(now, before, strict=True)):
                return now
            await asyncio.sleep(0.1)
        raise WrongError(f"memory was not given back: {before} before, {now} now")

    async def migrate(self, session: str, source: int, destination: int, **more: Any) -> MigrationView:
        """Asks for a move and follows it to its end."""
        name = self.nodes[destination].name
        request = MigrationRequest(session_id=session, destination=name, deadline_ms=60_000.0, **more)
        async with self.client(source) as client:
            view = await client.migrate(request)
            async for last in client.migration_events(view.id):
                view = last
        return view

    async def handover(
        self, session: str, here: Hand, there: Hand, regions: Regions, **more: Any
    ) -> dict[str, Any]:
        """A move from a worker that generates to a standby in poisoned memory; every byte is right then."""
        await there.ask("standby", regions=regions)
        there.begin("wait")
        here.begin("go")
        source, destination = (self.nodes.index(hand.node) for hand in (here, there))
        view = await self.migrate(session, source, destination, **more)
        receipt = view.receipt
        need(view.state == "released" and receipt, "a move", view.state, view.code, view.reason)
        return await self.arrived(here, there, receipt)

    async def arrived(self, here: Hand, there: Hand, receipt: Receipt | None) -> dict[str, Any]:
        """What has come of a move at both its workers, and what its receipt says."""
        if receipt is None:
            raise WrongError("no receipt")
        moved, adopted = await here.read(), await there.read()
        need(moved.get("moved") == there.node.name, "moved", moved)
        need("adopted" in adopted and adopted["wrong"] == {}, "adopted", adopted)
        need(adopted["adopted"] == receipt.block, "block", adopted, receipt.block)
        need(receipt.source_root and receipt.source_root == receipt.destination_root, "roots")
        return {
            "path": receipt.path,
            "live": receipt.live,
            "devices": [list(pair) for pair in receipt.devices],
            "state_bytes": receipt.state_bytes,
            "rounds": len(receipt.rounds),
            "block": receipt.block,
            **{name: getattr(receipt, name) for name in TIMES},
        }
