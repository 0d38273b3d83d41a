"""Several nodes, sessions that move among them, and a ledger: what a storm is let loose on.

Standbys always wait on every node. A slot outlives its node, as keeper and workers do; a node that starts
again decides about each by `worldmove.node.verdicts`, as recovery does. `Fleet.check` says what holds at
every instant; the ledger's store has every record checked that is written.
"""

from __future__ import annotations

from typing import Any

import msgspec
from machine_kit import HELLO
from move_ends import root_of
from move_side import LEAVES, Job, Side
from storm_nodes import Node, Slot
from storm_sides import StormDestination, StormSource

from worldmove import protocol as p
from worldmove.errors import WorldMoveError
from worldmove.ledger import records
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import SessionRecord
from worldmove.protocol import State

DRAIN = 20_000


class WatchedStore(MemoryStore):
    """Lets the fleet look at every record before it is written."""

    fleet: Fleet

    def put_session(self, record: SessionRecord) -> None:
        old = self.session(record.session_id)
        if old is not None:
            self.fleet.check_record(old, record)
        super().put_session(record)


class Leg:
    """One move: what `move_kit.Move` is to its sides."""

    def __init__(
        self, fleet: Fleet, session_id: str, source: Node, destination: Node, *, live: bool, apart: bool
    ) -> None:
        self.fleet = fleet
        self.apart = apart
        self.store = fleet.store
        self.lines: list[Any] = []
        slot = source.worlds[session_id]
        assert slot.record is not None
        self.hello = msgspec.structs.replace(
            HELLO,
            session_id=session_id,
            move_id=f"move-{len(fleet.legs) + 1}",
            source=source.name,
            epoch=slot.record.epoch,
            live=live,
        )
        self.source = StormSource(self, source, slot)
        self.destination = StormDestination(self, destination)

    @property
    def record(self) -> SessionRecord:
        return self.fleet.record(self.hello.session_id)

    @property
    def sides(self) -> tuple[StormSource, StormDestination]:
        return self.source, self.destination


class Fleet:
    """All of it.

    Attributes:
        truth: of each session, what its world last generated, wherever that was.
        zombies: ledger calls of dead nodes that may yet be carried out.
    """

    def __init__(self, nodes: int = 3, sessions: int = 2) -> None:
        self.store = WatchedStore()
        self.store.fleet = self
        self.sessions = [f"world-{number}" for number in range(sessions)]
        self.nodes = [Node("abc"[number], self.store, self.sessions) for number in range(nodes)]
        self.legs: list[Leg] = []
        self.zombies: list[Job] = []
        self.truth: dict[str, tuple[int, list[int]]] = {}
        for number, session_id in enumerate(self.sessions):
            self._register(session_id, self.nodes[number % nodes])

    def _register(self, session_id: str, node: Node) -> None:
        record = SessionRecord(
            session_id=session_id,
            epoch=HELLO.epoch,
            owner=node.name,
            incarnation=node.claim.incarnation,
            model="toy",
            block=7,
        )
        self.store.put_session(record)
        memory = [10 * (leaf + 1) for leaf in range(LEAVES)]
        self.truth[session_id] = (7, list(memory))
        slot = Slot(memory=memory, block=7, running=True, epoch=record.epoch, record=record)
        node.worlds[session_id] = slot

    def record(self, session_id: str) -> SessionRecord:
        record = self.store.session(session_id)
        assert record is not None
        return record

    def generate(self, session_id: str, leaf: int) -> None:
        """The world goes on where it runs: from what was last generated, and nothing else."""
        for slot in (node.worlds.get(session_id) for node in self.nodes):
            if slot is not None and slot.running:
                assert (slot.block, slot.memory) == self.truth[session_id], (
                    "a world goes on from another state"
                )
                slot.block += 1
                slot.memory[leaf] += 1
                self.truth[session_id] = (slot.block, list(slot.memory))

    def start(self, session_id: str, hop: int, *, live: bool, apart: bool = True) -> Leg | None:
        """A move begins, if a node has the session and is not moving it."""
        for number, node in enumerate(self.nodes):
            slot = node.worlds.get(session_id)
            other = self.nodes[(number + hop) % len(self.nodes)]
            if node.alive and other.alive and slot is not None and not slot.fenced and slot.move is None:
                leg = Leg(self, session_id, node, other, live=live, apart=apart)
                self.legs.append(leg)
                leg.source.post(p.Start(hello=leg.hello))
                return leg
        return None

    def open_sides(self) -> list[StormSource | StormDestination]:
        """Sides of moves that are not over, and have a node."""
        sides = (side for leg in self.legs for side in leg.sides)
        return [side for side in sides if side.alive and (side.jobs or not side.finished)]

    def choices(self) -> list[tuple[Side | Node, Job | None]]:
        """All that could happen next; `None`: the side's next message arrives."""
        found: list[tuple[Side | Node, Job | None]] = []
        for side in self.open_sides():
            found += [(side, job) for job in side.ready()]
            found += [(side, None)] if side.inbox else []
        for node in self.nodes:
            found += [(node, job) for job in node.jobs]
        return found

    def take(self, who: Side | Node, job: Job | None, answer: Any = None) -> None:
        """One of them happens."""
        if job is None:
            assert isinstance(who, Side)
            who.deliver()
        else:
            who.step(job, "none" if answer is None and job.waits == "ledger" else answer)

    def step(self, number: int, answer: Any = None) -> bool:
        """Something happens, and time passes only where nothing else can. False: nothing can."""
        able = [one for one in self.choices() if one[1] is None or one[1].waits != "time"]
        late = able or self.choices()
        if not late:
            return False
        who, job = late[number % len(late)]
        self.take(
            who, job, answer if able and job is not None and job.waits == "ledger" else None if able else True
        )
        return True

    def crash(self, node: Node) -> None:
        """A node dies with its drivers; what it had asked of the ledger may yet be written."""
        for side in self.open_sides():
            if side.node is node:
                self.zombies += [job for job in side.jobs if job.waits == "ledger"]
                side.crash()
                side.closed = True
                side.inbox.clear()
                side.peer.inbox.append(None)
        self.zombies += [job for job in node.jobs if job.waits == "ledger"]
        node.crash()

    def land(self, number: int) -> None:
        """A call of a dead node reaches the ledger; nobody hears the reply."""
        job = self.zombies.pop(number % len(self.zombies))
        try:
            job.steps.send("none")
        except (StopIteration, WorldMoveError):
            return
        job.steps.close()

    def check_record(self, old: SessionRecord, new: SessionRecord) -> None:
        """A record is written: it may name another owner only if that one holds what was sealed, verified."""
        assert new.epoch >= old.epoch
        if new.owner == old.owner:
            return
        assert new.epoch == old.epoch + 1
        assert not self._running(new.session_id), "a world changes its owner and runs"
        if new.phase in ("committed", "adopted"):
            move = records.current_move(new)
            block, memory = self.truth[new.session_id]
            assert new.root == root_of(memory, block, f"after {block}".encode()), "committed to another state"
            slot = next(slot for slot in self._node(new.owner).standbys if slot.bound == move.move_id)
            assert slot.memory == memory, "an owner that was not verified"
        else:
            assert new.outcome == "reclaimed"
            assert (old.phase, new.owner) == ("committed", records.current_move(old).source)

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def _running(self, session_id: str) -> list[Node]:
        slots = ((node, node.worlds.get(session_id)) for node in self.nodes)
        return [node for node, slot in slots if slot is not None and slot.running]

    def check(self) -> None:
        """What holds at every instant."""
        for session_id in self.sessions:
            running = self._running(session_id)
            assert len(running) <= 1, f"{session_id} runs at {[node.name for node in running]}"
            if running:
                slot = running[0].worlds[session_id]
                assert self.record(session_id).owner == running[0].name, "a world runs where it is not owned"
                assert (slot.block, slot.memory) == self.truth[session_id], "another world runs than was made"
        for node in self.nodes:
            assert not any(slot.running for slot in node.standbys)

    def drain(self) -> None:
        """Messages flow again, nodes are started, and deadlines pass: everything comes to its end."""
        for node in self.nodes:
            if not node.alive:
                node.restart()
        for number in range(DRAIN):
            self.check()
            if not self.step(number) and not self._expire():
                break
        else:
            raise AssertionError("it never ends")
        for leg in self.legs:
            self._check_leg(leg)
        for session_id in self.sessions:
            assert self.record(session_id).phase in ("owned", "adopted")
            assert len(self._running(session_id)) == 1
            holders = [node for node in self.nodes if session_id in node.worlds]
            assert [node.name for node in holders] == [self.record(session_id).owner]
        for node in self.nodes:
            for slot in node.standbys:
                assert slot.bound is None
                assert slot.memory == [0] * LEAVES, "a standby keeps what is not its own"

    def _expire(self) -> bool:
        """Nothing can happen: deadlines pass where drivers have one."""
        sides = [side for side in self.open_sides() if side.expire()]
        return bool(sides)

    def _check_leg(self, leg: Leg) -> None:
        for side in leg.sides:
            if side.alive:
                assert side.machine.ended, f"{side.role} waits: {side.machine.history}"
                assert side.finished
                assert not side.jobs
        if leg.source.alive and leg.destination.alive:
            ends = {side.machine.state for side in leg.sides}
            assert len(ends) == 1 or ends == {State.ABORTED, State.REJECTED}, [
                s.machine.history for s in leg.sides
            ]
