"""The laboratory's cast: a node and its serving stacks on every host, and who is ready to be moved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldmove.bench.lab.hosts import DATA, LabHost
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient
from worldmove.errors import ProcessLostError

RECEIVER = "R"
PORT = 8001
READY_S = 120.0
OPTIONS = (
    "--path",
    "staged",
    "--lane-device",
    DATA,
    "--register-rate",
    "0",
    "--move-rate",
    "0",
    "--lanes",
    "1",
)


class Crowd:
    """The worlds or standbys of one host, as their process tells of them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.ready: dict[str, None] = {}
        self.changed = asyncio.Event()
        self._process = process
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        if self._process.stdout is None:
            return
        async for line in self._process.stdout:
            word = line.decode().strip()
            if word[:1] == "+":
                self.ready[word[1:]] = None
            else:
                self.ready.pop(word[1:], None)
            self.changed.set()

    def take(self) -> str | None:
        """A world that is ready and that nobody has taken."""
        for name in self.ready:
            del self.ready[name]
            return name
        return None

    def put_back(self, name: str) -> None:
        """The world was not moved after all."""
        self.ready[name] = None
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        """Until that many are ready.

        Raises:
            ProcessLostError: they are not in time, or their process ended.
        """
        try:
            async with asyncio.timeout(READY_S):
                while len(self.ready) < count:
                    self.changed.clear()
                    change = asyncio.create_task(self.changed.wait())
                    await asyncio.wait((change, self._reading), return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
                    if self._reading.done():
                        raise ProcessLostError("the serving stacks of a host of the laboratory ended")
        except TimeoutError as error:
            raise ProcessLostError(
                f"{len(self.ready)} of {count} worlds are ready after {READY_S:.0f} s"
            ) from error

    async def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Stage:
    """What a run works with: nodes by name, their clients, the senders' worlds, the receiver's standbys."""

    def __init__(
        self, nodes: Sequence[RunningNode], clients: Mapping[str, AsyncClient], crowds: Mapping[str, Crowd]
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.clients = clients
        self.crowds = crowds
        self.senders = [node.name for node in nodes if node.name != RECEIVER]


@contextlib.asynccontextmanager
async def staged(
    hosts: Sequence[LabHost],
    nbytes: int,
    worlds: int,
    standbys: int,
    receiver_options: Sequence[str] = (),
) -> AsyncIterator[Stage]:
    """Nodes on all hosts, worlds on all but the first, standbys on the first; ended with the block.

    Args:
        hosts: host 0 receives.
        nbytes: of every world.
        worlds: on every sender.
        standbys: on the receiver.
        receiver_options: more options of the receiver's node.

    Raises:
        ProcessLostError: a node or a serving stack did not start.
    """
    names = [RECEIVER, *(f"S{host.number:02}" for host in hosts[1:])]
    tokens = {role: secrets.token_urlsafe(32) for role in ("operator", "worker", "peer")}
    async with contextlib.AsyncExitStack() as stack:
        file = _token_file(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-lab-"))), tokens)
        each = {
            name: ["--http", f"{host.address}:{PORT}", "--token-file", str(file)]
            for name, host in zip(names, hosts, strict=True)
        }
        each[RECEIVER] += receiver_options
        within = {name: host.prefix for name, host in zip(names, hosts, strict=True)}
        nodes = await stack.enter_async_context(running_nodes(names, OPTIONS, each, within=within))
        clients = {
            node.name: await stack.enter_async_context(AsyncClient(node.url, tokens["operator"], timeout=60))
            for node in nodes
        }
        crowds: dict[str, Crowd] = {}
        for node in nodes:
            role, count = ("standby", standbys) if node.name == RECEIVER else ("world", worlds)
            crowd = await _crowd(
                node, within[node.name], role=role, count=count, nbytes=nbytes, token=tokens["worker"]
            )
            stack.push_async_callback(crowd.close)
            crowds[node.name] = crowd
        for name, crowd in crowds.items():
            await crowd.wait_for(standbys if name == RECEIVER else worlds)
        yield Stage(nodes, clients, crowds)


def _token_file(folder: Path, tokens: Mapping[str, str]) -> Path:
    file = folder / "tokens.toml"
    file.touch(mode=0o600)
    file.write_text("".join(f'{role} = ["{token}"]\n' for role, token in tokens.items()))
    return file


async def _crowd(
    node: RunningNode, prefix: Sequence[str], *, role: str, count: int, nbytes: int, token: str
) -> Crowd:
    arguments: list[Any] = [node.url, role, node.name, count, nbytes, os.getpid()]
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *(sys.executable, "-m", "worldmove.bench.lab.actor", *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is not None:
        process.stdin.write(f"{token}\n".encode())
        await process.stdin.drain()
    return Crowd(process)
