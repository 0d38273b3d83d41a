"""`worldmove soak`: moves with random faults over several real nodes and worlds, checked after each."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from itertools import islice

import msgspec
import uvloop
from rich.console import Console

from worldmove.config import check
from worldmove.cuda.probe import usable
from worldmove.demo.screen import Screen
from worldmove.errors import ConfigError, DeadlineError, ProcessLostError
from worldmove.faults.points import WHATS
from worldmove.soak import report
from worldmove.soak.plan import steps
from worldmove.soak.trial import Options, Trial
from worldmove.soak.world import HOST

SEED_BITS = 32


def run(
    *,
    json: bool = False,
    moves: int = 100,
    seconds: float | None = None,
    nodes: int = 3,
    worlds: int = 2,
    state_mb: int = 8,
    seed: int | None = None,
    first: int = 1,
    gpus: str = "none",
    only: str = "",
) -> int:
    """Runs a soak and shows what it found.

    Args:
        json: one document on stdout instead of a table.
        moves: how many.
        seconds: no further move begins after so long.
        nodes: how many.
        worlds: how many move about between them.
        state_mb: size of each in MB.
        seed: of the sequence of moves and faults; a new one unless it is given.
        first: of its moves the one to begin with: an earlier soak's sequence goes on where it stopped.
        gpus: `none` for worlds in host memory; `auto` or UUIDs, separated by commas, for worlds on GPUs, one
            for each node in turn.
        only: what may go wrong, separated by commas; everything, if it is empty.

    Returns:
        0 only if no block was torn or generated twice, and nothing leaked or got lost. 130 after Ctrl-C.

    Raises:
        ConfigError: `only` names no fault, or `gpus` what no node can take, or CuPy is missing; nothing has
            been started.
    """
    errors = Console(stderr=True)
    options = Options(
        moves,
        seconds,
        nodes,
        worlds,
        state_mb,
        secrets.randbits(SEED_BITS) if seed is None else seed,
        uvloop.run(_devices(gpus)),
        _only(only),
        first,
    )
    try:
        with Screen(errors, quiet=False) as screen:
            outcome = uvloop.run(_soak(options, screen))
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("stopped; everything that was started has been ended")
        return 130
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode() + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=120)
        console.print(report.table(outcome))
        console.print(report.verdict(outcome), style="green" if outcome.ok else "red")
    return 0 if outcome.ok else 1


async def _devices(gpus: str) -> tuple[str, ...]:
    if gpus == "none":
        return (HOST,)
    check({"gpus": gpus})
    there = [device.uuid for device in await usable()]
    if gpus == "auto":
        return tuple(there)
    named = tuple(each.strip() for each in gpus.split(","))
    if missing := [each for each in named if each not in there]:
        raise ConfigError(
            f"gpus names {missing[0]}, which is not here; allowed: {', '.join(there)}",
            option="gpus",
            value=gpus,
        )
    return named


def _only(text: str) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    if unknown := sorted(names - set(WHATS)):
        raise ConfigError(
            f"only names {unknown[0]!r}; allowed: {', '.join(WHATS)}", option="only", value=text
        )
    return names


async def _soak(options: Options, screen: Screen) -> report.Outcome:
    """All moves, one after another; ends early where the fleet does not come back to calm."""
    began = time.monotonic()
    screen.say(f"seed {options.seed}")
    trial = Trial(options, screen)
    async with trial:
        try:
            await trial.begin()
            direct = HOST not in options.devices
            every = steps(options.seed, options.nodes, options.worlds, options.only, direct=direct)
            for step in islice(every, options.first - 1, options.first - 1 + options.moves):
                if options.seconds is not None and time.monotonic() - began > options.seconds:
                    break
                await trial.take(step)
        except (DeadlineError, ProcessLostError) as error:
            trial.lose(str(error))
    return trial.outcome(time.monotonic() - began)
