"""One session between two real nodes, moved to and fro for a benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from worldmove.bench.nodes import RunningNode
from worldmove.client import AsyncClient
from worldmove.errors import MoveAbortedError, ProcessLostError
from worldmove.views import MigrationRequest, MigrationView, PathChoice, Receipt

SESSION = "bench"
PROGRAM = ("worldmove.bench.actor",)
READY_TIMEOUT_S = 120.0
PREPARING = frozenset({"requested", "admitted"})


class Moved(NamedTuple):
    """A move that was released: its receipt, and milliseconds until the first byte could be sent."""

    receipt: Receipt
    prepare_ms: float


class Actor:
    """A `worldmove.bench.actor` process at one node."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, node: RunningNode, role: str, nbytes: int, program: Sequence[str] = PROGRAM
    ) -> Actor:
        """Starts one; `role` is `world` or `standby`, `program` a module and arguments of its own.

        It runs under the node's interpreter.
        """
        module, *more = program
        process = await asyncio.create_subprocess_exec(
            *(node.python, "-m", module),
            *(node.url, role, SESSION, str(nbytes), str(os.getpid()), *more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def expect(self, word: str) -> None:
        """Returns when the actor says `word`, its next one.

        Raises:
            ProcessLostError: it says something else, nothing for two minutes, or has ended.
        """
        stdout = self._process.stdout
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await stdout.readline() if stdout is not None else b""
        except TimeoutError as error:
            raise ProcessLostError(f"a worker did not become {word!r} in {READY_TIMEOUT_S:g} s") from error
        if line.decode().strip() != word:
            raise ProcessLostError(f"a worker should be {word!r} and says {line.decode().strip()!r}")

    def proceed(self) -> None:
        """Lets an actor whose world has moved become a standby."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"\n")

    async def end(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


class Shuttle:
    """A session that goes to and fro between two nodes."""

    def __init__(self, nodes: list[RunningNode], actors: list[Actor], clients: list[AsyncClient]) -> None:
        self.nodes = nodes
        self._actors = actors
        self._clients = clients
        self._home = 0
        self._behind: Actor | None = None

    @property
    def home(self) -> int:
        """Which of the two nodes has the session."""
        return self._home

    async def move(
        self, path: PathChoice, *, live: bool = False, on_state: Callable[[str], None] | None = None
    ) -> Moved:
        """Moves the session to the other node, and returns when the move has ended.

        What it leaves behind becomes a standby at the beginning of the next move, or by `turn`. `on_state` is
        told of every news of the move the state that it is in.

        Raises:
            MoveAbortedError: the move did not end well, or the roots differ.
            ProcessLostError: a worker failed.
        """
        await self.turn()
        here, there = self._home, 1 - self._home
        request = MigrationRequest(
            session_id=SESSION,
            destination=self.nodes[there].name,
            live=live,
            path=path,
            deadline_ms=120_000.0,
        )
        view, prepare_ms = await self._follow(self._clients[here], request, on_state)
        receipt = view.receipt
        if view.state != "released" or receipt is None:
            raise MoveAbortedError(f"the move ended as {view.state}: {view.reason}", reason=view.reason)
        if receipt.source_root is None or receipt.source_root != receipt.destination_root:
            raise MoveAbortedError("the roots differ", reason="roots")
        await self._actors[there].expect("adopted")
        await self._actors[here].expect("moved")
        self._home, self._behind = there, self._actors[here]
        return Moved(receipt, prepare_ms)

    async def turn(self) -> None:
        """Has a standby wait at the node that the last move left."""
        if self._behind is not None:
            self._behind.proceed()
            await self._behind.expect("waiting")
            self._behind = None

    async def _follow(
        self, client: AsyncClient, request: MigrationRequest, on_state: Callable[[str], None] | None
    ) -> tuple[MigrationView, float]:
        last = await client.migrate(request)
        prepare_ms: float | None = None
        async for view in client.migration_events(last.id):
            last = view
            if on_state is not None:
                on_state(view.state)
            if prepare_ms is None and view.state not in PREPARING:
                prepare_ms = view.elapsed_ms
        return last, prepare_ms or 0.0


@contextlib.asynccontextmanager
async def shuttle(
    nodes: list[RunningNode], nbytes: int, programs: Sequence[Sequence[str]] = (PROGRAM, PROGRAM)
) -> AsyncIterator[Shuttle]:
    """A session of about `nbytes` bytes at the first of two nodes, and a standby at the second.

    Args:
        nodes: two.
        nbytes: see above.
        programs: the actors' modules, each with arguments of its own.
    """
    async with contextlib.AsyncExitStack() as stack:
        actors, clients = [], []
        roles = (("world", "registered"), ("standby", "waiting"))
        for node, (role, word), program in zip(nodes, roles, programs, strict=True):
            clients.append(await stack.enter_async_context(AsyncClient(node.url)))
            actor = await Actor.start(node, role, nbytes, program)
            stack.push_async_callback(actor.end)
            actors.append(actor)
            await actor.expect(word)
        yield Shuttle(nodes, actors, clients)
