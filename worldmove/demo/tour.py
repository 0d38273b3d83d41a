"""A tour of one world between two nodes, as the demo shows it: actors, moves, and the twin afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from worldmove.bench.nodes import RunningNode
from worldmove.client import AsyncClient
from worldmove.demo import programs, report
from worldmove.demo.cast import Actor, Cast
from worldmove.demo.film import Film
from worldmove.demo.frames import BLOCK_FRAMES
from worldmove.demo.news import Any as AnyNews
from worldmove.demo.news import Generated
from worldmove.demo.screen import Screen
from worldmove.demo.world import FULL_AFTER
from worldmove.errors import ConnectionLostError, DeadlineError
from worldmove.views import ENDED_STATES, MigrationRequest, PathChoice

SESSION = "demo"
BLOCKS_BETWEEN = 2
"""Blocks that a node shows at least before the next move is asked for: 24 frames."""
STATES = (
    *("requested", "admitted", "prepared", "copying", "pausing"),
    *("finishing", "verifying", "committed", "adopted", "released"),
)
"""A move that goes well, in order: for the progress bar."""
START_S = 120.0
STEP_S = 60.0


class Options(NamedTuple):
    """What is to be shown."""

    moves: int
    play: programs.Programs
    path: PathChoice


class Tour:
    """The moves of one world, one after another, each while it generates.

    Args:
        options: what is to be shown.
        film: takes every block.
        clients: by node.
        screen: shows how far it is.

    Attributes:
        cast: the actors.
        spans: of every move that was asked for, when it was and when it had ended (`time.monotonic`).
        blocks: of every block, when it was told, and how many milliseconds it took to generate.
    """

    def __init__(self, options: Options, film: Film, clients: dict[str, AsyncClient], screen: Screen) -> None:
        self.cast = Cast(film, self._saw)
        self.spans: list[tuple[float, float]] = []
        self.blocks: list[tuple[float, float]] = []
        self._options = options
        self._clients = clients
        self._screen = screen
        self._since = FULL_AFTER  # the first move waits until the cache rolls
        self._text = "starting a world and a standby"
        self._done = 0.0

    async def begin(self, nodes: Sequence[RunningNode]) -> None:
        """Starts the actors; returns when the world is registered."""
        for node, role in zip(nodes, ("world", "standby"), strict=True):
            play = self._options.play
            given = {"role": role, "url": node.url, "session": SESSION, **play.common}
            given |= play.actors.get(node.name, {})
            await self.cast.enter(node.name, play.actor, *programs.words(given))
        await self.cast.until(lambda: self.cast.owner is not None, "the world's registration", START_S)

    async def ready(self) -> tuple[Actor, Actor]:
        """Waits until the world has been shown long enough since its last move and a standby waits.

        Returns:
            The actor that has the world and the one that waits.
        """

        def holds() -> bool:
            owner = self.cast.owner
            return (
                owner is not None
                and owner.block >= self._since + BLOCKS_BETWEEN
                and any(actor.waiting for actor in self.cast.actors.values())
            )

        await self.cast.until(holds, f"block {self._since + BLOCKS_BETWEEN} beside a standby", STEP_S)
        source = self.cast.owner
        destination = next(actor for actor in self.cast.actors.values() if actor.waiting)
        assert source is not None  # noqa: S101 - `holds` said so, and nothing has run since
        return source, destination

    async def move(self, number: int) -> report.Move:
        """Has the world moved once; returns how that went."""
        self._show("generating", number - 1)
        source, destination = await self.ready()
        title = f"move {number}: {source.node} to {destination.node}"
        self._show(title, number - 1)
        client = self._clients[source.node]
        request = MigrationRequest(session_id=SESSION, destination=destination.node, path=self._options.path)
        asked = time.monotonic()
        view = await client.migrate(request, f"{SESSION}-{number}")
        async for latest in client.migration_events(view.id):
            view = latest
            rounds = f", round {view.round}" if view.state == "copying" else ""
            part = STATES.index(view.state) / len(STATES) if view.state in STATES else 0.0
            self._show(f"{title}, {view.state}{rounds}", number - 1 + part)
        if view.state not in ENDED_STATES:
            raise ConnectionLostError(f"the events of move {number} stopped before it ended")
        self.spans.append((asked, time.monotonic()))
        move = report.Move.of(view)
        if move.moved:
            await self.cast.until(lambda: destination.playing, "the hand-over to the standby", STEP_S)
        self._since = (destination if move.moved else source).block
        pause = "" if move.pause_ms is None else f", pause {move.pause_ms:.1f} ms"
        why = f" ({view.reason})" if view.reason else ""
        self._screen.say(f"{title}: {move.state}{pause}{why}", trouble=not move.moved)
        return move

    def _show(self, text: str, done: float) -> None:
        self._text, self._done = text, done
        self._screen.stage(text, done, self._options.moves)

    def _saw(self, actor: Actor) -> None:
        self.blocks.append((time.monotonic(), actor.block_ms[-1]))
        frames = actor.block * BLOCK_FRAMES
        self._screen.stage(f"{self._text}; frame {frames} on {actor.node}", self._done, self._options.moves)


async def compare(film: Film, options: Options, screen: Screen) -> Actor:
    """Has a twin that never moves generate the film again, and compares every picture and state.

    Returns:
        The twin, ended: its `block_ms` are those of a world without any node.

    Raises:
        DeadlineError: it was too slow.
        ProcessLostError: it failed.
    """
    blocks = film.last

    def hear(actor: Actor, news: AnyNews) -> None:
        if isinstance(news, Generated):
            film.compare(news.block, news.pictures)
            if news.state:
                film.twins[news.block] = news.state
            screen.stage("comparing with the twin", actor.block, blocks)

    play = options.play
    given = {**play.common, **play.twins, "blocks": str(blocks)}
    if film.states:
        given["digests"] = ",".join(map(str, film.states))
    twin = await Actor.start("twin", play.twin, *programs.words(given))
    try:
        async with asyncio.timeout(START_S + STEP_S * blocks):
            await twin.listen(hear)
    except TimeoutError as error:
        raise DeadlineError("the twin has not generated the film in time") from error
    finally:
        await asyncio.shield(twin.end())
    return twin
