"""`worldmove soak`: moves with random faults over several real nodes and worlds, checked after each."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Coroutine
from typing import NamedTuple, TypeVar

import msgspec
import uvloop
from rich.console import Console

from worldmove.demo.screen import Screen
from worldmove.errors import ConnectionLostError, DeadlineError, PeerError, ProcessLostError, WorldMoveError
from worldmove.faults.door import order
from worldmove.soak import report
from worldmove.soak.fleet import send
from worldmove.soak.plan import Step, steps
from worldmove.soak.stage import Stage
from worldmove.soak.usage import Usage
from worldmove.views import MigrationRequest, NodeView

T = TypeVar("T")
ENDED = ("released", "aborted", "rejected")
MOVE_S = 30.0
SETTLE_S = 20.0
LOOK_S = 0.05
SEED_BITS = 32


class Options(NamedTuple):
    """What was asked for."""

    moves: int
    seconds: float | None
    nodes: int
    worlds: int
    state_mb: int
    seed: int


def run(
    *,
    json: bool = False,
    moves: int = 100,
    seconds: float | None = None,
    nodes: int = 3,
    worlds: int = 2,
    state_mb: int = 8,
    seed: int | None = None,
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

    Returns:
        0 only if no block was torn or generated twice, and nothing leaked or got lost. 130 after Ctrl-C.
    """
    errors = Console(stderr=True)
    options = Options(
        moves, seconds, nodes, worlds, state_mb, secrets.randbits(SEED_BITS) if seed is None else seed
    )
    try:
        with Screen(errors, quiet=json) as screen:
            outcome = uvloop.run(_until_told(_Soak(options, screen).run()))
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


async def _until_told(work: Coroutine[None, None, T]) -> T:
    """Lets SIGTERM end the soak as Ctrl-C does: by cancelling it, so that it cleans up."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class _End(NamedTuple):
    """How a move ended, as far as its source could tell."""

    state: str
    code: str | None
    reason: str | None


class _Soak:
    def __init__(self, options: Options, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._stage = Stage(options.nodes, options.worlds, options.state_mb)
        self._done: list[report.Done] = []
        self._leaks: list[str] = []
        self._lost: list[str] = []
        self._blocks = 0
        self._before: dict[tuple[str, int], Usage] = {}

    async def run(self) -> report.Outcome:
        """All moves, one after another."""
        began = time.monotonic()
        limit = self._options.seconds
        self._screen.say(f"seed {self._options.seed}")
        self._show("starting nodes and worlds")
        async with self._stage:
            try:
                self._note(await self._stage.calm())
                for step in steps(self._options.seed, self._options.nodes, self._options.worlds):
                    late = limit is not None and time.monotonic() - began > limit
                    if step.number > self._options.moves or late:
                        break
                    await self._take(step)
            except (DeadlineError, ProcessLostError) as error:
                self._lost.append(str(error))
                self._trouble(str(error))
                self._tell_logs()
            self._blocks += sum(world.story.block for world in self._stage.worlds)
        return self._outcome(time.monotonic() - began)

    async def _take(self, step: Step) -> None:
        """One move, and what must hold after it."""
        stage = self._stage
        world = stage.worlds[step.world]
        begun = time.monotonic()
        names = list(stage.nodes)
        before = await stage.record(world)
        here = before.owner
        there = names[(names.index(here) + step.hop) % len(names)]
        self._show(f"{step.fault or 'a good move'}: {world.session} from {here} to {there}")
        side = here if step.fault.startswith("source") else there
        armed = stage.nodes[side]
        for name in filter(None, (step.lead, step.fault)):
            node = stage.nodes[here if name.startswith("source") else there]
            await order(node.run_dir, arm=name)
        life, session, replaced = armed.life, world.session, [one.replaced for one in stage.worlds]
        stories = [one.story for one in stage.worlds]
        seen = asyncio.create_task(self._watch(step))
        try:
            end = await self._move(step, world.session, here, there)
        finally:
            seen.cancel()
        views = await stage.calm()
        fired = bool(step.fault) and await self._fired(armed.name, step.fault, life)
        await asyncio.gather(*(order(node.run_dir, disarm=True) for node in stage.nodes.values()))
        after = await stage.ledger.get(session)
        moved = after is not None and after.epoch > before.epoch and after.owner == there
        result: report.Result = "committed" if moved else "rejected" if end.state == "rejected" else "aborted"
        self._blocks += sum(
            story.block for story, one in zip(stories, stage.worlds, strict=True) if story is not one.story
        )
        ms = (time.monotonic() - begun) * 1000
        self._done.append(report.Done(step=step, result=result, code=end.code, fired=fired, ms=ms))
        torn = [one.name for one, was in zip(stage.worlds, replaced, strict=True) if one.replaced != was]
        note = f" ({', '.join(torn)} torn by the death of its worker, begun anew)" if torn else ""
        what = f"{step.fault} after {step.lead}" if step.lead else step.fault or "good"
        why = f", {end.code}" if end.code else ""
        idle = "" if fired or not step.fault else ", did not happen"
        self._screen.say(f"{step.number}: {what}{idle}: {here} to {there} {result}{why}, {ms:.0f} ms{note}")
        if not step.fault and result != "committed":
            self._screen.say(f"{step.number}: a good move did not take place: {end.reason}", trouble=True)
        await self._check(views)

    async def _watch(self, step: Step) -> None:
        """Lets what was stopped go on after its time."""
        while True:
            await asyncio.sleep(LOOK_S)
            standing = await self._stage.thaw()
            if standing:
                await asyncio.sleep(step.hold_s)
                for pid in standing:
                    send(pid, signal.SIGCONT)

    async def _move(self, step: Step, session: str, here: str, there: str) -> _End:
        """Asks for a move and waits for its end, as far as its source can tell."""
        client = self._stage.nodes[here].client
        request = MigrationRequest(session_id=session, destination=there, live=step.live, path=step.path)
        deadline = time.monotonic() + MOVE_S
        try:
            view = await client.migrate(request, f"soak-{self._options.seed}-{step.number}")
        except (PeerError, DeadlineError, ConnectionLostError) as error:
            return _End("unknown", error.code, str(error))
        except WorldMoveError as error:
            return _End("rejected", error.code, str(error))
        try:
            while view.state not in ENDED and time.monotonic() < deadline:
                await asyncio.sleep(LOOK_S)
                view = await client.migration(view.id)
        except WorldMoveError as error:
            return _End("unknown", error.code, str(error))
        return _End(view.state, view.code, view.reason)

    async def _fired(self, node: str, fault: str, life: int) -> bool:
        armed = self._stage.nodes[node]
        if armed.life != life:
            return True
        return fault in (await order(armed.run_dir)).fired

    async def _check(self, views: dict[str, NodeView]) -> None:
        """Exactly one owner of each world, and nothing that was not there before."""
        stage = self._stage
        held = sum(view.sessions for view in views.values())
        if held != len(stage.worlds):
            stage.double.append(f"nodes hold {held} sessions of {len(stage.worlds)} worlds")
        for found in (stage.torn, stage.double):
            for line in found:
                if line not in self._told:
                    self._told.add(line)
                    self._trouble(line)
        for name in stage.nodes:
            await self._check_usage(name)

    async def _check_usage(self, name: str) -> None:
        """A node's usage; it is given its time to come back to what it was."""
        node = self._stage.nodes[name]
        key = (name, node.life)
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = Usage.of(node.pid, await node.client.node())
            if key not in self._before:
                self._before[key] = now
            grown = now.grown(self._before[key])
            if not grown:
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_S)
        self._leaks += [f"node {name}: {line}" for line in grown]
        self._trouble(f"node {name} has leaked: {'; '.join(grown)}")
        self._before[key] = now

    def _note(self, views: dict[str, NodeView]) -> None:
        self._told: set[str] = set()
        for name, view in views.items():
            node = self._stage.nodes[name]
            self._before[name, node.life] = Usage.of(node.pid, view)

    def _trouble(self, text: str) -> None:
        number = len(self._done)
        self._screen.say(f"after move {number}: {text}", trouble=True)

    def _tell_logs(self) -> None:
        for node in self._stage.nodes.values():
            self._screen.say(f"log of node {node.name} ends with:\n{node.tail()}", trouble=True)

    def _show(self, text: str) -> None:
        self._screen.stage(text, len(self._done), self._options.moves)

    def _outcome(self, duration_s: float) -> report.Outcome:
        done = self._done
        results = [move.result for move in done]
        good = [move for move in done if not move.step.fault]
        return report.Outcome(
            moves=len(done),
            committed=results.count("committed"),
            aborted=results.count("aborted"),
            rejected=results.count("rejected"),
            torn=len(self._stage.torn),
            double_owned=len(self._stage.double),
            leaked=len(self._leaks),
            lost=len(self._lost),
            good=len(good),
            good_committed=sum(move.result == "committed" for move in good),
            worlds_replaced=sum(world.replaced for world in self._stage.worlds),
            blocks=self._blocks,
            seed=self._options.seed,
            duration_s=round(duration_s, 1),
            by_fault=report.count(done, slice(2, 3)),
            by_phase=report.count(done, slice(0, 2)),
        )
