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
import itertools
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleet_node import END_S, MARK, Node, until
from fleet_stack import Actor, ActorError
from fleet_world import Twin, shown

from worldmove.client import Client
from worldmove.views import MigrationRequest, MigrationView, Receipt


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
        self._resting: list[Actor] = []
        self._names = itertools.count(1)

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
            stack.callback(self._dismiss)
            for node in self.nodes.values():
                stack.callback(node.stop)
            self.clear()

    def _dismiss(self) -> None:
        for actor in [*self.actors, *self._resting]:
            actor.kill()

    def _end(self) -> None:
        for node in self.nodes.values():
            if node.killed:
                self._bury(node)
        left = self._sweep()
        assert not left, f"left behind: {left}"

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def client(self) -> Client:
        """Of the first node that runs."""
        return next(node.client for node in self.nodes.values() if node.process is not None)

    def unique(self, name: str) -> str:
        """A session's id that no other test on this fleet uses: an id's epochs and events outlive its end."""
        return f"{name}-{next(self._names)}"

    def actor(self, node: str) -> Actor:
        """A serving stack beside a node; one that a test before has left, or a new process."""
        fitting = [actor for actor in self._resting if actor.url == self.nodes[node].url]
        if fitting:
            actor = fitting[0]
            self._resting.remove(actor)
        else:
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
        """Takes every actor away from its world, then ends the sessions and standbys of nodes that run."""
        actors, self.actors = self.actors, []
        for actor in actors:
            if actor.rest():
                self._resting.append(actor)
            else:
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
        client = self.client
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
        return self.client.session(session).owner

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
        assert [each["host_state"] for each in about] == [shown(state) for state in twin.host_states]


__all__ = ["Actor", "ActorError", "Fleet", "Node", "Twin", "assert_world", "until"]
