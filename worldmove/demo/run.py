"""`worldmove demo`: a world moves there and back between two nodes while it generates, beside its twin.

Everything is real: two `worldmove serve` processes with a ledger of their own, an actor beside each node
that uses the public SDK, moves asked for over REST. Afterwards a twin that never moved generates the same
blocks under the same player, and every picture is compared.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient
from worldmove.demo import programs, report
from worldmove.demo.cast import Actor, Cast
from worldmove.demo.film import Film
from worldmove.demo.frames import BLOCK_FRAMES
from worldmove.demo.news import Any as AnyNews
from worldmove.demo.news import Generated
from worldmove.demo.screen import Screen
from worldmove.demo.world import FULL_AFTER
from worldmove.errors import ConfigError, ConnectionLostError, DeadlineError
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
STATE_MB = 256
CPU_BLOCK_MS = 250.0
DEFAULT_OUT = Path("demo-out")
SHEET = "contact-sheet.png"


class Options(NamedTuple):
    """What is to be shown."""

    moves: int
    play: programs.Programs
    path: PathChoice


def run(
    *,
    json: bool = False,
    moves: int = 4,
    state_mb: int | None = None,
    path: PathChoice = "auto",
    out: Path | None = None,
    gpu: bool = False,
    video: str | None = None,
) -> int:
    """Runs the demo and shows what it found.

    Args:
        json: one document on stdout instead of progress and a table.
        moves: how often the world changes its node.
        state_mb: size of its state in MB (10⁶ bytes); 256 unless told otherwise.
        path: how bytes travel.
        out: folder for the contact sheet; `demo-out` unless told otherwise.
        gpu: the video world on two GPUs, or on one, in place of the landscape in host memory.
        video: the video world in this shape, by name; on the CPU unless `gpu` is set.

    Returns:
        0 only if every frame equals the twin's bit for bit, none is missing or twice, every move took
        place and every pair of roots is equal. 130 after Ctrl-C.

    Raises:
        ConfigError: there is no writing in `out`, or a size was given for the video world, whose shape has
        one;
            nothing has been started.
        DeviceError: there is no GPU.
        WorldMoveError: nodes, actors or a move could not do what they must; everything is ended.
    """
    errors = Console(stderr=True)
    play = _programs(state_mb, gpu=gpu, video=video)
    file = _writable(out or DEFAULT_OUT) / SHEET
    try:
        with Film() as film, Screen(errors, quiet=json) as screen:
            done = uvloop.run(_demo(Options(moves, play, path), film, screen))
            found, faults = report.outcome(film, done, moves)
            line = report.verdict(found, faults)
            report.contact_sheet(film, done, line, found.ok).save(file)
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("stopped; everything that was started has been ended")
        return 130
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(report.table(done))
        console.print(line, style="green" if found.ok else "red")
        console.print(f"contact sheet: {file}")
    for fault in faults:
        errors.print(fault, style="red", markup=False)
    return 0 if found.ok else 1


def _programs(state_mb: int | None, *, gpu: bool, video: str | None) -> programs.Programs:
    if not gpu and video is None:
        return programs.landscape(state_mb or STATE_MB)
    if state_mb is not None:
        raise ConfigError(
            f"state_mb is {state_mb}, but the video world's shape says how large it is", option="state_mb"
        )
    devices = asyncio.run(programs.two_gpus()) if gpu else ("cpu", "cpu")
    return programs.video(devices, video or "self-forcing", programs.GPU_BLOCK_MS if gpu else CPU_BLOCK_MS)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"out is {str(folder)!r}, where nothing can be written ({error.strerror}); a folder is allowed",
            option="out",
            value=str(folder),
        ) from error


async def _demo(options: Options, film: Film, screen: Screen) -> list[report.Move]:
    screen.stage("starting two nodes", 0, options.moves)
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(running_nodes(programs.NODES, each=options.play.nodes))
        clients = {node.name: await stack.enter_async_context(AsyncClient(node.url)) for node in nodes}
        tour = _Tour(options, film, clients, screen)
        await stack.enter_async_context(tour.cast)
        await tour.begin(nodes)
        moves = [await tour.move(number) for number in range(1, options.moves + 1)]
        await tour.ready()
    await _compare(film, options, screen)
    return moves


class _Tour:
    """The moves of one world, one after another, each while it generates."""

    def __init__(self, options: Options, film: Film, clients: dict[str, AsyncClient], screen: Screen) -> None:
        self.cast = Cast(film, self._saw)
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
        view = await client.migrate(request, f"{SESSION}-{number}")
        async for latest in client.migration_events(view.id):
            view = latest
            rounds = f", round {view.round}" if view.state == "copying" else ""
            part = STATES.index(view.state) / len(STATES) if view.state in STATES else 0.0
            self._show(f"{title}, {view.state}{rounds}", number - 1 + part)
        if view.state not in ENDED_STATES:
            raise ConnectionLostError(f"the events of move {number} stopped before it ended")
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
        frames = actor.block * BLOCK_FRAMES
        self._screen.stage(f"{self._text}; frame {frames} on {actor.node}", self._done, self._options.moves)


async def _compare(film: Film, options: Options, screen: Screen) -> None:
    """Has a twin that never moves generate the film again, and compares every picture."""
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
