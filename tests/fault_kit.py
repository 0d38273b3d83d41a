"""What the tests of failing moves share: one world that goes to and fro, and what it is owed.

A `Pair` has a world that generates on node `here`, a standby on node `there`, and the world's twin. A test
lets a move begin, makes something go wrong, and then asks for what every failed move owes: the world has gone
on where it was (`unharmed`), and the next move brings it over bit for bit (`goes_over`, after which the roles
are changed).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from fleet_kit import Actor, Fleet, Node, Twin, assert_world, until
from fleet_node import PATIENCE_S

from worldmove.manifest import Region, layout
from worldmove.views import MigrationRequest, MigrationView, Receipt

SLOW = ("--gate-rate", "24Mbit", "--memory-limit", "64MB", "--peer-timeout-ms", "1500", "--stall-ms", "1500")
"""Options of nodes on which a copy takes about a second, and whose silence is noticed soon."""
REGIONS = (
    Region("layer0.k", "uint8", (3 << 19,)),
    Region("odd", "uint8", (1001,)),
    Region("layer0.v", "bfloat16", (3 << 18,)),
    Region("one", "uint8", (1,)),
)
SHARE = 64
WORK_MS = 15.0
CANARY = 0xC5
SETTLE_S = 20.0
POOL_THREADS = (os.cpu_count() or 1) + 4
"""Threads that an event loop keeps for blocking calls, at most."""


class Arena:
    """The memory of the only session or standby on a node, as whoever holds its descriptor sees it."""

    def __init__(self, node: Node, regions: Sequence[Region]) -> None:
        self._path = until(lambda: _only_arena(node), f"node {node.name} holds one arena")
        (self._extent,), self._places = layout(tuple(regions))
        self._regions = regions

    def read(self) -> bytes:
        """All bytes of the arena."""
        return Path(self._path).read_bytes()[: self._extent.nbytes]

    def gaps(self) -> list[tuple[int, int]]:
        """(begin, end) of what lies beside the regions."""
        ends = [
            place.offset + region.nbytes for place, region in zip(self._places, self._regions, strict=True)
        ]
        begins = [place.offset for place in self._places[1:]] + [self._extent.nbytes]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    def paint(self) -> None:
        """Puts canaries beside the regions."""
        fd = os.open(self._path, os.O_RDWR)
        try:
            for begin, end in self.gaps():
                os.pwrite(fd, bytes([CANARY]) * (end - begin), begin)
        finally:
            os.close(fd)

    def sings(self) -> bool:
        """Whether every canary is as it was."""
        data = self.read()
        gaps = self.gaps()
        return bool(gaps) and all(data[begin:end] == bytes([CANARY]) * (end - begin) for begin, end in gaps)

    def wiped(self) -> bool:
        """Whether nothing is left in any region."""
        data = self.read()
        spans = ((p.offset, p.offset + r.nbytes) for p, r in zip(self._places, self._regions, strict=True))
        return not any(any(data[begin:end]) for begin, end in spans)


def _only_arena(node: Node) -> str | None:
    found: dict[int, str] = {}
    for entry in Path(f"/proc/{node.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/memfd:worldmove-arena"):
                found[entry.stat().st_ino] = str(entry)
    return next(iter(found.values())) if len(found) == 1 else None


class Usage(NamedTuple):
    """What a node uses while no move is under way."""

    descriptors: int
    threads: int
    children: int
    lanes: int
    executors: int
    free_bytes: int
    outstanding_bytes: int
    waiting: int

    @classmethod
    def of(cls, node: Node) -> Usage:
        """As it is now."""
        view = node.view()
        proc = Path(f"/proc/{node.pid}")
        return cls(
            descriptors=_descriptors(node),
            threads=len(list((proc / "task").iterdir())),
            children=len((proc / "task" / str(node.pid) / "children").read_text().split()),
            lanes=len(view.lanes),
            executors=len(view.executors),
            free_bytes=view.devices[0].free_bytes,
            outstanding_bytes=view.gate.outstanding_bytes,
            waiting=view.gate.waiting,
        )

    def within(self, before: Usage) -> bool:
        """Whether nothing has been added to `before`, and nothing is missing that was there.

        How many idle lanes are kept ready (up to twice the spare ones) depends on what went on before, and
        threads for blocking calls come as they are needed, up to a bound.
        """
        lanes = self.lanes - before.lanes
        return (
            1 <= self.lanes <= 2
            and self.descriptors <= before.descriptors + max(2 * lanes, 0)
            and self.threads <= before.threads + POOL_THREADS
            and self.children <= before.children + lanes
            and self[4:] == before[4:]
        )


def _descriptors(node: Node) -> int:
    """Open descriptors of a node, without the connections to its own port: those are its clients' affair."""
    port = f":{int(node.url.rpartition(':')[2]):04X}"
    links = []
    for entry in Path(f"/proc/{node.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    served = {f"socket:[{fields[9]}]" for fields in map(str.split, table) if fields[1].endswith(port)}
    return len([link for link in links if link not in served])


def resident_bytes(pid: int) -> int:
    """Private memory of a process (RssAnon)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def settles(node: Node, before: Usage) -> None:
    """Returns when a node uses what it used `before`."""
    seen: list[Usage] = []

    def settled() -> bool:
        seen[:] = [Usage.of(node)]
        return seen[0].within(before)

    try:
        until(settled, "the node uses what it used before", SETTLE_S)
    except AssertionError:
        raise AssertionError(f"node {node.name} uses {seen[0]}; before it used {before}") from None


def gone(pid: int) -> bool:
    """Whether a process has ended and is reaped."""
    return not Path(f"/proc/{pid}").exists()


class Pair:
    """One world on `here`, and a standby for it on `there`.

    Attributes:
        source: the world's worker; it generates freely. target: the standby's.
        epoch: of the world.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        names: Sequence[str] = (),
        regions: Sequence[Region] = REGIONS,
        path: str = "staged",
    ) -> None:
        self.fleet = fleet
        self.here, self.there = names or list(fleet.nodes)[:2]
        self.path = path
        self.regions = regions
        self._worlds = 0
        self._create(None)

    def _create(self, target: Actor | None) -> None:
        self._worlds += 1
        self.session = f"world-{self._worlds}"
        self.twin = Twin(self.regions, share=SHARE)
        self.source = self.fleet.actor(self.here)
        self.epoch = self.source.register(self.session, self.regions)["epoch"]
        self.source.ask("use", share=SHARE)
        self.source.step()
        self.run()
        if target is None:
            self.stand_by()
        else:
            self.paint()

    def paint(self) -> None:
        """Canaries beside every region, at both ends: they outlive whatever goes wrong."""
        for node in (self.at, self.to):
            Arena(node, self.regions).paint()

    def start_over(self) -> None:
        """The world is lost with its worker: another one begins in its place."""
        self.at.client.end_session(self.session)
        self.dismiss(self.source)
        self._create(self.target)

    @property
    def at(self) -> Node:
        """The node that owns the world."""
        return self.fleet[self.here]

    @property
    def to(self) -> Node:
        """The node that the world is to go to."""
        return self.fleet[self.there]

    def run(self) -> None:
        """The world generates freely."""
        self.source.run(work_ms=WORK_MS, share=SHARE)

    def halt(self) -> None:
        """The world stands between two blocks, and comes to no boundary until it runs or steps."""
        self.source.ask("halt")

    def stand_by(self, actor: Actor | None = None, *, wait: bool = True) -> None:
        """A worker waits at the node where the world is not; `actor`, if it still knows the node's address.

        While it waits (`arriving` says how that ended) it takes no other command.
        """
        if actor is not None and actor.url != self.to.url:
            self.dismiss(actor)
            actor = None
        self.target = actor or self.fleet.actor(self.there)
        self.target.ask("use", share=SHARE)
        self.target.standby(self.regions)
        self.arriving: Future[Any] = self.target.tell("wait") if wait else Future()
        self.paint()
        self.before = {node.name: Usage.of(node) for node in (self.at, self.to)}

    def dismiss(self, actor: Actor) -> None:
        """Ends an actor."""
        actor.kill()
        self.fleet.actors.remove(actor)

    def ask(self, **request: Any) -> str:
        """Asks the world's node for a move; returns its id."""
        wanted = {"session_id": self.session, "destination": self.there, "path": self.path, **request}
        return self.at.client.migrate(MigrationRequest(**wanted)).id

    def see(self, move: str, state: str) -> None:
        """Returns when a move is in a state."""
        until(lambda: self.at.client.migration(move).state == state, f"move {move} is {state}")

    def begin(self, **request: Any) -> str:
        """Asks for a move and returns its id in the middle of the copy."""
        move = self.ask(**request)
        until(lambda: self.at.client.migration(move).sent_bytes > 0, "bytes have landed")
        view = self.at.client.migration(move)
        assert view.state not in ("released", "aborted"), "the copy was over before anything could go wrong"
        return move

    def end(self, move: str) -> MigrationView:
        """The move once it has ended, as the world's node tells."""
        return self.at.client.wait(move)

    def aborts(self, move: str, *codes: str) -> MigrationView:
        """As `end`; the move must have been aborted, for one of these reasons."""
        view = self.end(move)
        assert view.state == "aborted", view
        assert view.code in codes, f"{view.code}: {view.reason}"
        assert view.receipt is not None
        assert view.receipt.state == "aborted"
        return view

    def unharmed(self) -> None:
        """After a move that failed: the world is whole and goes on, and nothing of the move is left."""
        for node in (self.at, self.to):
            until(lambda node=node: node.view().migrations == 0, f"node {node.name} has no move left")
            view = node.client.session(self.session)
            assert (view.owner, view.epoch) == (self.here, self.epoch)
        assert not self.source.events, self.source.events
        assert not self.arriving.done(), self.arriving
        self.goes_on()
        assert Arena(self.to, self.regions).wiped()
        for node in (self.at, self.to):
            assert Arena(node, self.regions).sings(), f"node {node.name} wrote beside a region"
        until(
            lambda: [one.state for one in self.to.view().standbys] == ["attached"], "the standby waits again"
        )
        for node in (self.at, self.to):
            settles(node, self.before[node.name])

    def goes_on(self) -> None:
        """The world generates, and each byte of it is right."""
        block = self.source.block
        until(lambda: self.source.block > block + 1, "the world generates on")
        self.halt()
        assert_world([self.source], self.twin, host_state=False)
        self.run()

    def goes_over(self, **request: Any) -> Receipt:
        """The world moves, bit for bit and without a gap, and generates there; then roles are changed."""
        receipt = self.fleet.moved(self.session, self.there, **{"live": False, "path": self.path, **request})
        assert receipt.source_root == receipt.destination_root is not None
        self.arrived()
        return receipt

    def arrived(self) -> None:
        """The world has come to the other node: exactly there it generates on; then roles are changed."""
        about = self.arriving.result(PATIENCE_S)
        left = self.source.event("moved")
        assert (about["block"], left["destination"]) == (left["block"], self.there)
        assert_world([self.target], self.twin)
        assert about["epoch"] > self.epoch
        self.epoch = about["epoch"]
        self.source, self.target = self.target, self.source
        self.here, self.there = self.there, self.here
        self.run()
        self.stand_by(self.target)

    def replace_target(self, *, wait: bool = True) -> None:
        """The standby's worker goes, if it has not died: another one comes in its place."""
        self.dismiss(self.target)
        for standby in self.to.view().standbys:
            self.to.client.drop_standby(standby.id)
        until(lambda: not self.to.view().standbys, "the former worker's standby is gone")
        self.stand_by(wait=wait)


class Stage:
    """A fleet with one pair that tests use in turn; what a failed test leaves is cleared away."""

    def __init__(self, fleet: Fleet, **pair: Any) -> None:
        self.fleet = fleet
        self._given = pair
        self._pair: Pair | None = None

    @contextlib.contextmanager
    def pair(self) -> Iterator[Pair]:
        """The pair, to be given back with its world generating and its standby waiting."""
        for node in self.fleet.nodes.values():
            node.news()
        try:
            pair = self._pair or Pair(self.fleet, **self._given)
            self._pair = None
            yield pair
        except BaseException:
            self._clear()
            raise
        self._pair = pair

    def _clear(self) -> None:
        self.fleet.show_logs()
        for pid in self.fleet.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for node in self.fleet.nodes.values():
            if node.process is None:
                node.start()
        self.fleet.clear()
