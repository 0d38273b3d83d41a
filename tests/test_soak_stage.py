"""How a soak brings its fleet back to calm: by what it sees, and not by how long that takes."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from worldmove.errors import ConnectionLostError
from worldmove.soak.stage import AHEAD, Stage


class Node:
    """A node that has started again, as its client sees it: it takes its world up when asked for it."""

    alive = True

    def __init__(self, name: str, world: str | None) -> None:
        self.name, self.world = name, world
        self.client = self
        self.held = 0
        self.moves = 0
        self.gone = False

    async def node(self) -> Any:
        if self.gone:
            raise ConnectionLostError("nobody listens")
        standbys = [] if self.world else [SimpleNamespace(model="world1", state="attached")]
        return SimpleNamespace(migrations=self.moves, sessions=self.held, standbys=standbys)

    async def sessions(self, limit: int) -> Any:
        return limit

    async def session(self, session: str) -> Any:
        assert session == self.world
        self.held = 1
        return SimpleNamespace(state="live")

    def thaw(self) -> list[int]:
        return []


class Story:
    """A world that generates faster than anybody looks at it."""

    gap = False

    def __init__(self) -> None:
        self._blocks = itertools.count(step=AHEAD)

    @property
    def block(self) -> int:
        return next(self._blocks)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(2, 1, 1)
    (world,) = made.worlds
    nodes: dict[str, Any] = {"A": Node("A", world.session), "B": Node("B", None)}
    actors: dict[str, Any] = {
        name: SimpleNamespace(alive=True, pid=0, playing=node.world, waiting=node.world is None, node=node)
        for name, node in nodes.items()
    }
    made.nodes, world.actors = nodes, actors
    story: Any = Story()
    world.story = story

    async def record(_session: str) -> Any:
        return SimpleNamespace(phase="owned", owner="A")

    ledger: Any = SimpleNamespace(get=record)
    made.ledger = ledger
    yield made
    shutil.rmtree(made.folder)


async def test_what_nodes_hold_is_counted_once_every_world_was_seen(stage: Stage) -> None:
    """A look at a fleet takes a while on a busy machine; a world that is taken up meanwhile is not lost."""
    views = await stage.calm()
    assert {name: view.sessions for name, view in views.items()} == {"A": 1, "B": 0}


async def test_a_move_or_a_death_behind_the_look_at_the_worlds_is_no_calm(stage: Stage) -> None:
    node: Any = stage.nodes["A"]
    seen, looks = node.session, 0

    async def session(name: str) -> Any:
        node.moves, node.gone = int(looks == 1), looks == 2
        return await seen(name)

    def look() -> None:
        nonlocal looks
        looks += 1
        node.moves, node.gone = 0, False

    node.session = session
    views = await stage.calm(look)
    assert looks == 3
    assert views["A"].migrations == 0
