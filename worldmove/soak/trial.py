"""One soak's fleet: takes a move, lets its fault happen, repairs, and checks what must hold."""

from __future__ import annotations

import asyncio
import signal
import time
from types import TracebackType
from typing import NamedTuple, Self

from worldmove.demo.screen import Screen
from worldmove.errors import ConnectionLostError, DeadlineError, PeerError, WorldMoveError
from worldmove.faults.door import order
from worldmove.soak import report
from worldmove.soak.fleet import send
from worldmove.soak.plan import Step
from worldmove.soak.stage import Stage
from worldmove.soak.usage import DEVICE_SPARE_BYTES, Usage, device_bytes
from worldmove.soak.world import HOST
from worldmove.views import MigrationRequest, NodeView

ENDED = ("released", "aborted", "rejected")
MOVE_S = 30.0
SETTLE_S = 20.0
LOOK_S = 0.05


class Options(NamedTuple):
    """What was asked for."""

    moves: int
    seconds: float | None
    nodes: int
    worlds: int
    state_mb: int
    seed: int
    devices: tuple[str, ...] = (HOST,)
    only: frozenset[str] = frozenset()
    first: int = 1


class _End(NamedTuple):
    """How a move ended, as far as its source could tell."""

    state: str
    code: str | None
    reason: str | None


class Trial:
    """A fleet on which one move after another is taken, each checked; a context manager.

    Attributes:
        done: the moves. torn, double, leaks, lost: what did not hold, in words.
    """

    def __init__(self, options: Options, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._stage = Stage(options.nodes, options.worlds, options.state_mb, options.devices)
        self.done: list[report.Done] = []
        self.leaks: list[str] = []
        self.lost: list[str] = []
        self._blocks = 0
        self._before: dict[tuple[str, int], Usage] = {}
        self._on_devices: dict[str, int] = {}
        self._told: set[str] = set()

    @property
    def torn(self) -> list[str]:
        """Blocks that differ from the twin's."""
        return self._stage.torn

    @property
    def double(self) -> list[str]:
        """What was in two places."""
        return self._stage.double

    async def __aenter__(self) -> Self:
        self._show("starting nodes and worlds")
        await self._stage.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks += sum(world.story.block for world in self._stage.worlds)
        try:
            for line in self._stage.found_in_history():
                self.double.append(line)
                self._trouble(line)
        finally:
            await self._stage.__aexit__(kind, error, trace)

    async def begin(self) -> None:
        """Returns when every world lives; what nodes use now is what they may use later.

        Raises:
            DeadlineError: it did not come to that.
        """
        views = await self._stage.calm()
        for name, view in views.items():
            node = self._stage.nodes[name]
            self._before[name, node.life] = Usage.of(node.pid, view)
            self._on_devices[name] = device_bytes(view, [views[other] for other in self._beside(name)])

    def _beside(self, name: str) -> list[str]:
        """Other nodes that use the same GPU."""
        nodes, device = self._stage.nodes, self._stage.nodes[name].device
        return [other for other in nodes if other != name and nodes[other].device == device != HOST]

    def lose(self, text: str) -> None:
        """The fleet did not come back: says so, with the ends of the nodes' logs."""
        self.lost.append(text)
        self._trouble(text)
        for node in self._stage.nodes.values():
            self._screen.say(f"log of node {node.name} ends with:\n{node.tail()}", trouble=True)

    async def take(self, step: Step) -> report.Done:
        """One move, and what must hold after it.

        Raises:
            DeadlineError, ProcessLostError: the fleet did not come back to calm.
        """
        stage, world = self._stage, self._stage.worlds[step.world]
        begun = time.monotonic()
        before = await stage.record(world)
        names = list(stage.nodes)
        here, there = before.owner, names[(names.index(before.owner) + step.hop) % len(names)]
        self._show(f"{step.fault or 'a good move'}: {world.session} from {here} to {there}")
        for name in filter(None, (step.lead, step.beside, step.fault)):
            await order(stage.nodes[_side(name, here, there)].run_dir, arm=name)
        armed = stage.nodes[_side(step.fault, here, there)]
        life, session = armed.life, world.session
        stories = [(one, one.story) for one in stage.worlds]
        watching = asyncio.create_task(self._watch(step))
        try:
            end = await self._move(step, session, here, there)
        finally:
            watching.cancel()
        views = await stage.calm()
        fired = bool(step.fault) and await self._fired(armed.name, step.fault, life)
        await asyncio.gather(*(order(node.run_dir, disarm=True) for node in stage.nodes.values()))
        after = await stage.ledger.get(session)
        moved = after is not None and after.epoch > before.epoch and after.owner == there
        result: report.Result = "committed" if moved else "rejected" if end.state == "rejected" else "aborted"
        self._blocks += sum(story.block for one, story in stories if one.story is not story)
        ms = (time.monotonic() - begun) * 1000
        done = report.Done(step=step, result=result, code=end.code, reason=end.reason, fired=fired, ms=ms)
        self.done.append(done)
        self._screen.say(f"{report.line(done)}: {here} to {there}")
        if not step.fault and result != "committed":
            self._trouble(f"a good move did not take place: {end.reason}")
        await self._check(views)
        return done

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
            view = await node.client.node()
            now = Usage.of(node.pid, view)
            if key not in self._before:
                self._before[key] = now
            grown = now.grown(self._before[key])
            # Of all lives of the node: its death leaves nothing on a device.
            beside = [await self._stage.nodes[other].client.node() for other in self._beside(name)]
            if (used := device_bytes(view, beside)) > self._on_devices[name] + DEVICE_SPARE_BYTES:
                grown.append(f"device bytes: {used}, before {self._on_devices[name]}")
            if not grown:
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_S)
        self.leaks += [f"node {name}: {line}" for line in grown]
        self._trouble(f"node {name} has leaked: {'; '.join(grown)}")
        self._before[key], self._on_devices[name] = now, used

    def _trouble(self, text: str) -> None:
        number = len(self.done)
        self._screen.say(f"after move {number}: {text}", trouble=True)

    def _show(self, text: str) -> None:
        self._screen.stage(text, len(self.done), self._options.moves)

    def outcome(self, duration_s: float) -> report.Outcome:
        """The document."""
        done = self.done
        results = [move.result for move in done]
        good = [move for move in done if not move.step.fault]
        return report.Outcome(
            moves=len(done),
            committed=results.count("committed"),
            aborted=results.count("aborted"),
            rejected=results.count("rejected"),
            torn=len(self.torn),
            double_owned=len(self.double),
            leaked=len(self.leaks),
            lost=len(self.lost),
            good=len(good),
            good_committed=sum(move.result == "committed" for move in good),
            worlds_replaced=sum(world.replaced for world in self._stage.worlds),
            blocks=self._blocks,
            seed=self._options.seed,
            duration_s=round(duration_s, 1),
            by_fault=report.count(done, slice(2, 3)),
            by_phase=report.count(done, slice(0, 2)),
            by_path=report.count_paths(done),
        )


def _side(fault: str, here: str, there: str) -> str:
    """The node that a fault belongs to."""
    return here if fault.startswith("source") else there
