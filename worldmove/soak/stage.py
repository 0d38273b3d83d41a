"""The soak's nodes, worlds and serving stacks, and how they are brought back to calm after every move."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from worldmove.errors import DeadlineError, LedgerError, NotFoundError, WorldMoveError
from worldmove.ledger import open_ledger
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import SessionRecord
from worldmove.soak import history
from worldmove.soak.cast import Actor, Role
from worldmove.soak.fleet import SoakNode, marked, send, stopped
from worldmove.soak.news import AnyNews, Generated, Playing
from worldmove.soak.story import Story
from worldmove.soak.world import HOST
from worldmove.views import NodeView

CALM_S = 90.0
LOOK_S = 0.05
AHEAD = 2
"""Blocks that a world must generate to show that it lives."""


class SoakWorldState:
    """One world of the soak: its session, and a serving stack beside every node.

    Attributes:
        name: which standbys fit it. session: its present id. actors: by node.
        story: what was generated of the session.
        replaced: how often it began anew, since a worker's death in mid-block had torn it.
    """

    def __init__(self, name: str, state_mb: int) -> None:
        self.name = name
        self.state_mb = state_mb
        self.replaced = 0
        self.actors: dict[str, Actor] = {}
        self.story = Story(state_mb)

    @property
    def session(self) -> str:
        """Its present id."""
        return f"{self.name}-{self.replaced}"

    def begin_anew(self) -> None:
        """Its next session has another id, and begins from block 0."""
        self.replaced += 1
        self.story = Story(self.state_mb)


class Stage:
    """A fleet with worlds; a context manager that ends everything it started.

    Args:
        nodes, worlds: how many.
        state_mb: size of each world.
        devices: one for each node, in turn, on which its worlds lie.

    Attributes:
        nodes: by name. worlds: all of them. ledger: to look at records, beside the nodes.
        double: what was generated twice, or in two places, in words.
    """

    ledger: Ledger

    def __init__(self, nodes: int, worlds: int, state_mb: int, devices: Sequence[str] = (HOST,)) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="wm-soak-"))
        names = [chr(ord("A") + number) for number in range(nodes)]
        self.nodes = {
            name: SoakNode(name, self.folder, self.mark, devices[number % len(devices)])
            for number, name in enumerate(names)
        }
        self.worlds = [SoakWorldState(f"world{number + 1}", state_mb) for number in range(worlds)]
        self.torn: list[str] = []
        self.double: list[str] = []
        self.history: list[history.AnyFact] = []
        self._ended = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(node.start() for node in self.nodes.values()))
            self.ledger = await open_ledger(f"sqlite:///{self.folder / 'ledger.db'}")
            self._watching = asyncio.create_task(self._watch_records())
            names = list(self.nodes)
            for number, world in enumerate(self.worlds):
                for place, name in enumerate(names):
                    role: Role = "register" if place == number % len(names) else "standby"
                    await self._enter(world, name, role)
        except BaseException:
            await asyncio.shield(self._end(at_once=True))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self._end(at_once=kind is not None))

    async def _end(self, *, at_once: bool) -> None:
        actors = [actor for world in self.worlds for actor in world.actors.values()]
        await asyncio.gather(*(actor.end() for actor in actors))
        await asyncio.gather(*(node.end(at_once=at_once) for node in self.nodes.values()))
        self._ended = True
        if hasattr(self, "ledger"):
            await self.ledger.close()
        if self._watching is not None:
            await asyncio.wait({self._watching})
        # Keepers outlive their nodes on purpose, with the worlds that they hold.
        for pid in marked(self.mark):
            send(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _enter(self, world: SoakWorldState, node: str, role: Role) -> None:
        old = world.actors.pop(node, None)
        if old is not None:
            await old.end()

        def hear(actor: Actor, news: AnyNews) -> None:
            self._hear(world, actor, news)

        world.actors[node] = await Actor.start(
            role,
            self.nodes[node],
            world=world.name,
            session=world.session,
            state_mb=world.state_mb,
            mark=self.mark,
            hear=hear,
        )

    async def _watch_records(self) -> None:
        """Notes every record until the ledger is closed; goes on where it failed."""
        seen = 0
        while not self._ended:
            try:
                async for change in self.ledger.watch(seen):
                    seen = change.seq
                    if change.session is not None:
                        self.history.append(history.Recorded(change.session))
            except LedgerError:
                await asyncio.sleep(LOOK_S)

    def found_in_history(self) -> list[str]:
        """What must never have been, of all that was seen until now."""
        told: list[history.AnyFact] = []
        for name, node in self.nodes.items():
            told += history.entered(node.lines(), name)
        return history.violations([*self.history, *told])

    def _hear(self, world: SoakWorldState, actor: Actor, news: AnyNews) -> None:
        node = actor.node.name
        if isinstance(news, Playing):
            self.history.append(history.Held(node, news.session, news.epoch, news.block))
        elif isinstance(news, Generated):
            self.history.append(history.Made(node, news.session, news.block))
        if not isinstance(news, Generated) or news.session != world.session:
            return
        torn, twice = len(world.story.torn), len(world.story.twice)
        world.story.add(news.block, news.digest)
        if len(world.story.torn) > torn:
            self.torn.append(f"{news.session}: block {world.story.torn[-1]} differs from the twin's")
        if len(world.story.twice) > twice:
            self.double.append(f"{news.session}: block {news.block} came again, from node {actor.node.name}")

    async def thaw(self) -> list[int]:
        """Processes of the fleet that are stopped now."""
        found = [pid for node in self.nodes.values() for pid in node.thaw()]
        actors = [actor for world in self.worlds for actor in world.actors.values()]
        return found + [actor.pid for actor in actors if actor.alive and stopped(actor.pid)]

    async def record(self, world: SoakWorldState) -> SessionRecord:
        """What stands in the ledger about a world's session."""
        record = await self.ledger.get(world.session)
        if record is None:
            raise NotFoundError(f"session {world.session} is not in the ledger")
        return record

    async def calm(self, on_look: Callable[[], None] = lambda: None) -> dict[str, NodeView]:
        """Repairs what has died, until every world lives in one place and standbys wait in all others.

        Raises:
            DeadlineError: it did not come to that; the message says what is missing.
        """
        missing = "nothing was looked at"
        marks = [world.story for world in self.worlds]
        blocks = [story.block for story in marks]
        try:
            async with asyncio.timeout(CALM_S):
                while True:
                    on_look()
                    for pid in await self.thaw():
                        send(pid, signal.SIGCONT)
                    views, missing = await self._look()
                    stories = [world.story for world in self.worlds]
                    if missing or stories != marks:
                        marks, blocks = stories, [story.block for story in stories]
                    elif all(
                        story.block >= begun + AHEAD and not story.gap
                        for story, begun in zip(stories, blocks, strict=True)
                    ):
                        return views
                    else:
                        missing = ""
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            what = missing or f"worlds stand at blocks {[world.story.block for world in self.worlds]}"
            raise DeadlineError(f"no calm within {CALM_S:g} s: {what}") from None

    async def _look(self) -> tuple[dict[str, NodeView], str]:
        """One look at everything, with one repair where one is due; says what is missing.

        The views are of after every world was seen where it belongs: a node may have taken one up meanwhile.
        """
        for node in self.nodes.values():
            if not node.alive:
                await node.start()
        views, missing = await self._views()
        if missing:
            return views, missing
        for world in self.worlds:
            try:
                missing = await self._look_at(world, views)
            except WorldMoveError as error:
                missing = f"{error.code}: {error}"
            if missing:
                return views, f"{world.session}: {missing}"
        return await self._views()

    async def _views(self) -> tuple[dict[str, NodeView], str]:
        """What every node shows of itself; says what is missing."""
        views: dict[str, NodeView] = {}
        for node in self.nodes.values():
            try:
                views[node.name] = await node.client.node()
                await node.client.sessions(limit=1)  # the ledger answers it again
            except WorldMoveError as error:
                return views, f"node {node.name}: {error}"
        busy = [name for name, view in views.items() if view.migrations]
        return views, f"moves on nodes {busy}" if busy else ""

    async def _look_at(self, world: SoakWorldState, views: dict[str, NodeView]) -> str:
        record = await self.ledger.get(world.session)
        if record is None:
            actors = list(world.actors.values())
            if all(actor.waiting or not actor.alive for actor in actors):
                return await self._repair(world, next(iter(self.nodes)), "register")
            return "it is not registered yet"
        if record.phase not in ("owned", "adopted"):
            return f"its record says {record.phase}"
        for name, actor in world.actors.items():
            if name == record.owner:
                missing = await self._owner(world, actor)
            else:
                missing = await self._standby(world, actor, views[name])
            if missing:
                return f"node {name}: {missing}"
        return ""

    async def _owner(self, world: SoakWorldState, actor: Actor) -> str:
        node = actor.node
        view = await node.client.session(world.session)
        if actor.alive:
            if actor.playing == world.session and view.state == "live":
                return ""
            return f"the session is {view.state}, its worker has {actor.playing}"
        if view.state != "unattended":
            return f"its worker is dead, the session is {view.state}"
        if actor.failure is not None and actor.failure.code == "conflict":
            # It died in the middle of a block: nobody may have that world, so another one begins.
            await node.client.end_session(world.session)
            world.begin_anew()
            return await self._repair(world, node.name, "register")
        return await self._repair(world, node.name, "attach")

    async def _standby(self, world: SoakWorldState, actor: Actor, view: NodeView) -> str:
        mine = [standby for standby in view.standbys if standby.model == world.name]
        if not actor.alive:
            for standby in mine:
                if standby.state == "bound":
                    return "a standby is bound and its worker dead"
                with contextlib.suppress(NotFoundError):
                    await actor.node.client.drop_standby(standby.id)
            return await self._repair(world, actor.node.name, "standby")
        states = [standby.state for standby in mine]
        return "" if actor.waiting and states == ["attached"] else f"standbys are {states}"

    async def _repair(self, world: SoakWorldState, node: str, role: Role) -> str:
        await self._enter(world, node, role)
        return f"a new worker: {role}"
