"""`worldmove demo`: a world moves there and back between two nodes while it generates, beside its twin.

Everything is real: two `worldmove serve` processes with a ledger of their own, an actor beside each node
that uses the public SDK, moves asked for over REST. Afterwards a twin that never moved generates the same
blocks under the same player, and every picture is compared.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from worldmove.bench.nodes import running_nodes
from worldmove.client import AsyncClient
from worldmove.demo import programs, report
from worldmove.demo.film import Film
from worldmove.demo.screen import Screen
from worldmove.demo.tour import Options, Tour, compare
from worldmove.demo.video.shape import options_for
from worldmove.errors import ConfigError
from worldmove.views import PathChoice

DEFAULT_OUT = Path("demo-out")
SHEET = "contact-sheet.png"
STATE_MB = 256
CPU_BLOCK_MS = 250.0


def run(
    *,
    json: bool = False,
    moves: int = 4,
    state_mb: int | None = None,
    path: PathChoice = "auto",
    out: Path | None = None,
    gpu: bool = False,
    video: str | None = None,
    sink: int | None = None,
    ring: bool = False,
    block_ms: float | None = None,
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
        sink: latent frames that stay at the beginning of the video world's cache; none unless told otherwise.
        ring: its newest block overwrites the oldest, instead of everything moving left.
        block_ms: how often one of its blocks begins, at least.

    Returns:
        0 only if every frame equals the twin's bit for bit, none is missing or twice, every move took
        place and every pair of roots is equal. 130 after Ctrl-C.

    Raises:
        ConfigError: there is no writing in `out`, an option is of the other world or does not fit its shape,
            or PyTorch, CuPy or a GPU is missing; nothing has been started.
        WorldMoveError: nodes, actors or a move could not do what they must; everything is ended.
    """
    errors = Console(stderr=True)
    own = {"sink": sink, "ring": ring or None, "block_ms": block_ms}
    play = _video(own, state_mb, video, gpu=gpu) if gpu or video else _landscape(own, state_mb)
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


def _landscape(videos: Mapping[str, Any], state_mb: int | None) -> programs.Programs:
    for name, value in videos.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value}, but it is the video world's: --video or --gpu", option=name
            )
    return programs.landscape(state_mb or STATE_MB)


def _video(
    own: Mapping[str, Any], state_mb: int | None, shape: str | None, *, gpu: bool
) -> programs.Programs:
    if state_mb is not None:
        raise ConfigError(
            f"state_mb is {state_mb}, but the video world's shape says how large it is", option="state_mb"
        )
    cache = options_for(shape or "self-forcing", sink=own["sink"] or 0, ring=bool(own["ring"]))
    devices = asyncio.run(programs.stages(gpu=gpu))
    return programs.video(devices, cache, own["block_ms"] or (programs.GPU_BLOCK_MS if gpu else CPU_BLOCK_MS))


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
        tour = Tour(options, film, clients, screen)
        await stack.enter_async_context(tour.cast)
        await tour.begin(nodes)
        moves = [await tour.move(number) for number in range(1, options.moves + 1)]
        await tour.ready()
    await compare(film, options, screen)
    return moves
