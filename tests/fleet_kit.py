"""Whole fleets for tests: `worldmove serve` processes, a ledger, and serving stacks beside them. All real.

    with Fleet("A", "B") as fleet, fleet.turn():
        source, target = fleet.actor("A"), fleet.actor("B")
        source.register("w", REGIONS)
        source.run()
        target.standby(REGIONS)
        arriving = target.tell("wait")
        receipt = fleet.move("w", "B").receipt
        arriving.result(PATIENCE_S)
        assert_world([target], Twin(REGIONS))

Everything is synchronous; what must happen meanwhile is told (`tell`) and asked for later. A fleet may be
shared by tests (a fixture of scope `module`); `turn` ends what a test leaves on it and shows the nodes' logs
of a test that fails. A fleet ends everything that it started, and fails if a process or a socket is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from fleet_world import Twin

from worldmove.client.sync import Client
from worldmove.errors import PeerError, WorldMoveError
from worldmove.manifest import Region
from worldmove.views import MigrationRequest, MigrationView, NodeView, Receipt

ACTOR = Path(__file__).with_name("fleet_actor.py")
MARK = "FLEET_MARK"
PATIENCE_S = 60.0
END_S = 20.0
LOOK_S = 0.02
FINGERPRINT = {"stack": "fleet tests"}
BASE = ("--log-level", "info", "--executors", "1")


def until(holds: Any, what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Looks until `holds()` is true and returns its value; for what no event tells."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(LOOK_S)
    return value


class ActorError(Exception):
    """What an actor met; `code` and `details` as in `worldmove.errors`, or code `session-moved`."""

    def __init__(self, code: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.details = details


class Node:
    """One `worldmove serve`; can be signalled, ended, and started again under its name.

    Attributes:
        client: of its REST interface, while it runs. log: file of its stderr.
        killed: by `kill`, and not started since.
    """

    def __init__(self, name: str, folder: Path, options: Sequence[str], mark: str) -> None:
        self.name = name
        self.run_dir = folder / name
        self.log = folder / f"{name}.log"
        self.url = ""
        self.options = tuple(options)
        self.client: Client
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False
        self._ledger = f"sqlite:///{folder / 'ledger.db'}"
        self._environment = os.environ | {MARK: mark}
        self._ready: int | None = None
        self._shown = 0

    @property
    def pid(self) -> int:
        """Of the node's own process."""
        assert self.process is not None
        return self.process.pid

    def launch(self) -> Node:
        """Starts the process; `ready` waits for it."""
        self.killed = False
        self._ready, theirs = os.pipe()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "worldmove", "serve", "--name", self.name),
                    *("--http", "127.0.0.1:0", "--run-dir", str(self.run_dir), "--ledger", self._ledger),
                    *("--ready-fd", str(theirs), *BASE, *self.options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs,),
                env=self._environment,
                start_new_session=True,
            )
        os.close(theirs)
        return self

    def ready(self) -> Node:
        """Returns when the launched node answers."""
        assert self._ready is not None
        with os.fdopen(self._ready, "rb") as pipe:
            self._ready = None
            readable, _, _ = select.select([pipe], [], [], PATIENCE_S)
            self.url = os.read(pipe.fileno(), 4096).decode().strip() if readable else ""
        assert self.url, f"node {self.name} does not answer:\n{self.news()}"
        self.client = Client(self.url, timeout=PATIENCE_S)
        return self

    def start(self) -> Node:
        """Starts the node, or starts it again; returns when it answers. Its URL is a new one."""
        return self.launch().ready()

    def view(self) -> NodeView:
        """`GET /v1/node`: also the pids of executors, lanes (with their moves) and the keeper."""
        return self.client.node()

    def lanes(self, migration_id: str | None = None) -> list[int]:
        """Pids of its lanes; of one move only, if given."""
        lanes = self.view().lanes
        return [lane.pid for lane in lanes if migration_id is None or lane.migration_id == migration_id]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the node's own process."""
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is reaped. Workers and keeper live on."""
        self._end(signal.SIGKILL)
        self.killed = True

    def stop(self) -> None:
        """SIGTERM; returns when it has shut down, which must succeed. Nothing if it does not run."""
        status = self._end(signal.SIGTERM)
        assert status == 0, f"node {self.name} ended with status {status}:\n{self.news()}"

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        process, self.process = self.process, None
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"node {self.name} did not end within {END_S:g} s") from None

    def abandon(self) -> None:
        """Ends a node that never answered."""
        if self._ready is not None:
            os.close(self._ready)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def news(self) -> str:
        """What it has logged since the last call."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        found, self._shown = text[self._shown :], len(text)
        return found


class Actor:
    """A serving stack beside a node (`fleet_actor.py`); `ask` waits for an answer, `tell` gives a future.

    Attributes:
        events: news of free generation, as they came.
    """

    def __init__(self, node: Node, folder: Path, mark: str) -> None:
        self.node = node
        self.events: list[dict[str, Any]] = []
        self._folder = folder
        self._answers: dict[int, Future[Any]] = {}
        self._count = 0
        self._news = threading.Condition()
        self._gone = False
        self.process = subprocess.Popen(
            [sys.executable, str(ACTOR), node.url, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def tell(self, what: str, **arguments: Any) -> Future[Any]:
        """Sends a command; the future has the answer, or raises ActorError (EOFError if the actor dies)."""
        assert self.process.stdin is not None
        future: Future[Any] = Future()
        with self._news:
            self._count += 1
            number = self._count
            if self._gone:
                raise EOFError("the actor has ended")
            self._answers[number] = future
        line = {"number": number, "do": what, **msgspec.to_builtins(arguments)}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        return future

    def ask(self, what: str, **arguments: Any) -> Any:
        """Sends a command and returns the answer; raises as `tell`'s future."""
        return self.tell(what, **arguments).result(PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._news:
                if "event" in line:
                    self.events.append(line)
                    self._news.notify_all()
                    continue
                future = self._answers.pop(line["number"])
            if "error" in line:
                future.set_exception(ActorError(line["error"], line["message"], line["details"]))
            else:
                future.set_result(line["ok"])
        with self._news:
            self._gone = True
            self._news.notify_all()
            left = list(self._answers.values())
        for future in left:
            future.set_exception(EOFError("the actor has ended"))

    def event(self, kind: str) -> dict[str, Any]:
        """Waits for news of this kind and takes it out of `events`."""

        def first() -> dict[str, Any] | None:
            return next((event for event in self.events if event["event"] == kind), None)

        with self._news:
            self._news.wait_for(lambda: first() is not None or self._gone, PATIENCE_S)
            found = first()
            assert found is not None, f"no news {kind!r} from the actor at {self.node.name}: {self.events}"
            self.events.remove(found)
        return found

    def register(self, session: str | None, regions: Sequence[Region], **spec: Any) -> dict[str, Any]:
        """Registers a session; see `spec_of` for the defaults."""
        named = {} if session is None else {"id": session}
        return self.ask("register", **named, **spec_of(regions, **spec))

    def standby(self, regions: Sequence[Region], **spec: Any) -> dict[str, Any]:
        """Stands by; `tell("wait")` then waits for a world."""
        return self.ask("standby", **spec_of(regions, **spec))

    def step(self, n: int = 1) -> int:
        """Generates n blocks; returns the number of the last one."""
        block: int = self.ask("step", n=n)["block"]
        return block

    def run(self, work_ms: float = 5.0, **use: Any) -> None:
        """Generates freely, a block in `work_ms` at least."""
        self.ask("use", work_ms=work_ms, **use)
        self.ask("run")

    @property
    def block(self) -> int:
        """The last finished block."""
        block: int = self.ask("about")["block"]
        return block

    def dump(self) -> dict[str, bytes]:
        """Every byte of every region of its rank."""
        path = self._folder / f"dump-{self.pid}"
        try:
            parts = self.ask("dump", path=str(path))
            data = path.read_bytes()
        finally:
            path.unlink(missing_ok=True)
        found, at = {}, 0
        for name, length in parts:
            found[name], at = data[at : at + length], at + length
        return found

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is reaped."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


def spec_of(regions: Sequence[Region], **more: Any) -> dict[str, Any]:
    """Arguments of `register` and `standby`: short blocks, a horizon that a loaded machine can keep."""
    base = {"block_ms": 10.0, "horizon_ms": 10_000.0, "host_state_bytes": 4096, "model": "fleet"}
    return {**base, "fingerprint": FINGERPRINT, "regions": msgspec.to_builtins(list(regions)), **more}


class Fleet:
    """Nodes that share a ledger, and the actors beside them.

    Args:
        names: one node each.
        options: more options of `worldmove serve`, for all of them.
        each: more options by node.
    """

    def __init__(
        self, *names: str, options: Sequence[str] = (), each: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="wm-f-", dir="/tmp"))
        own = each or {}
        self.nodes = {
            name: Node(name, self.folder, [*options, *own.get(name, ())], self.mark) for name in names
        }
        self.actors: list[Actor] = []

    def __enter__(self) -> Self:
        try:
            for node in self.nodes.values():
                node.launch()
            for node in self.nodes.values():
                node.ready()
        except BaseException:
            for node in self.nodes.values():
                node.abandon()
            self._sweep()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.show_logs()
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for node in self.nodes.values():
                stack.callback(node.stop)
            self.clear()

    def _end(self) -> None:
        for node in self.nodes.values():
            if node.killed:
                self._bury(node)
        left = self._sweep()
        assert not left, f"left behind: {left}"

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def actor(self, node: str) -> Actor:
        """Starts a serving stack beside a node."""
        actor = Actor(self.nodes[node], self.folder, self.mark)
        self.actors.append(actor)
        return actor

    @contextlib.contextmanager
    def turn(self) -> Iterator[Fleet]:
        """One test's use of a shared fleet: ends its sessions and actors; logs go to pytest's capture."""
        for node in self.nodes.values():
            node.news()
        try:
            yield self
        finally:
            try:
                self.clear()
            finally:
                self.show_logs()

    def show_logs(self) -> None:
        """Prints what nodes have logged since it was last shown."""
        for node in self.nodes.values():
            sys.stdout.write(f"--- log of node {node.name}\n{node.news()}\n")

    def clear(self) -> None:
        """Ends every actor, then every session and standby of the nodes that run."""
        actors, self.actors = self.actors, []
        for actor in actors:
            actor.kill()
        for node in self.nodes.values():
            if node.process is not None:
                self._clear_node(node)

    def _clear_node(self, node: Node) -> None:
        until(lambda: node.view().migrations == 0, f"moves on node {node.name} end")
        for session in node.client.sessions(limit=1000).sessions:
            if session.owner == node.name and session.state != "lost":
                node.client.end_session(session.id)
        for standby in node.view().standbys:
            node.client.drop_standby(standby.id)

    def move(self, session: str, to: str, *, key: str | None = None, **request: Any) -> MigrationView:
        """Moves a session and returns how that ended; `request` has fields of MigrationRequest."""
        client = next(node.client for node in self.nodes.values() if node.process is not None)
        asked = MigrationRequest(session_id=session, destination=to, **request)
        return client.wait(client.migrate(asked, key).id)

    def moved(self, session: str, to: str, **request: Any) -> Receipt:
        """As `move`, and the move must end well; returns its receipt."""
        view = self.move(session, to, **request)
        assert view.state == "released", f"{view.state}: {view.code}: {view.reason}"
        assert view.receipt is not None
        return view.receipt

    def owner(self, session: str) -> str:
        """Name of the node that owns a session."""
        return next(n.client for n in self.nodes.values() if n.process is not None).session(session).owner

    def _bury(self, node: Node) -> None:
        """A killed node's keeper holds its worlds on purpose: nobody will come for them."""
        for pid, command in self.processes().items():
            if str(node.run_dir / "keeper.sock") in command:
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(node.run_dir)

    def processes(self) -> dict[int, str]:
        """Living processes of this fleet: pid to command line."""
        wanted, found = f"{MARK}={self.mark}".encode(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
        return found

    def _sweep(self) -> list[str]:
        """Waits until all processes have gone, ends those that have not, and removes the folder."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), "the fleet's processes end", END_S)
        left = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left += [str(path) for path in self.folder.rglob("*.sock")]
        shutil.rmtree(self.folder)
        return left


def assert_world(actors: Sequence[Actor], twin: Twin, *, host_state: bool = True) -> None:
    """Every byte of every region, in the memory of all ranks' actors, is the twin's at the same block.

    Args:
        actors: by rank; they hold the session and stand between two blocks.
        twin: follows to their block.
        host_state: they have just adopted the session: what came with it is the twin's too.
    """
    about = [actor.ask("about") for actor in actors]
    assert len({each["block"] for each in about}) == 1, about
    twin.to(about[0]["block"])
    found: dict[str, bytes] = {}
    for actor in actors:
        found |= actor.dump()
    wrong = twin.differences(found)
    assert not wrong, wrong[:10]
    if host_state:
        assert tuple(bytes.fromhex(each["host_state"]) for each in about) == twin.host_states


__all__ = [
    "Actor",
    "ActorError",
    "Fleet",
    "Node",
    "PeerError",
    "Twin",
    "WorldMoveError",
    "assert_world",
    "until",
]
