"""Whole moves by every way in and out: shared memory, REST alone, no worker at all, several at once, and what
anybody can check or hear of them."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fleet_kit import ActorError, Fleet, Twin, assert_world, until
from fleet_world import Flat
from moves_kit import Traveller, check_receipt, receipt_of, spec_for

from worldmove.errors import ConflictError, NoWorkerError
from worldmove.manifest import Region, Source
from worldmove.views import MigrationRequest, MigrationView, SessionEvent

MIB = 1 << 20
PATHS = ["local", "staged"]
STATES = (
    *("requested", "admitted", "prepared", "copying", "pausing"),
    *("finishing", "verifying", "committed", "adopted", "released"),
)
REGIONS = [
    Region("k", "bfloat16", (3, 30_001)),
    Region("v", "float32", (20_000,)),
    Region("i", "int64", (1,)),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B") as fleet:
        yield fleet


class SharedMemory:
    """POSIX shared memory as a stack makes it by itself: `memory` is the creator's view."""

    def __init__(self, nbytes: int) -> None:
        self.name = f"fleet-{uuid.uuid4().hex}"
        self._path = Path("/dev/shm") / self.name
        with self._path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self.memory: Flat = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Takes name and view away."""
        self._path.unlink()


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(2 * MIB)
    yield memory
    memory.close()


def in_shared(shared: SharedMemory) -> list[Region]:
    return [
        Region("k", "uint8", (MIB + 77,), source=Source("shm", shared.name, 4096)),
        Region("v", "int16", (9_999,)),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_shared_memory_by_name_lies_in_arenas_after_the_first_move(
    fleet: Fleet, shared: SharedMemory, path: str
) -> None:
    world = Traveller(fleet, "w", in_shared(shared))
    world.step(3)
    mine = shared.memory[4096 : 4096 + MIB + 77]
    assert mine.tobytes() == world.twin.to(3).memory["k"].tobytes()

    world.twin.regions["k"] = Region("k", "uint8", (MIB + 77,))
    world.go("B", path=path)
    shared.memory[:] = 0xEE
    world.go("A", path=path, live=False)
    world.step(2)
    assert_world(world.actors, world.twin, host_state=False)
    assert set(np.unique(shared.memory)) == {0xEE}


@pytest.mark.parametrize("path", PATHS)
def test_shared_memory_at_both_ends_and_then_no_worker(fleet: Fleet, path: str) -> None:
    with (
        contextlib.closing(SharedMemory(2 * MIB)) as here,
        contextlib.closing(SharedMemory(2 * MIB)) as there,
    ):
        world = Traveller(fleet, "w", in_shared(here))
        target = fleet.actor("B")
        target.standby(in_shared(there))
        arriving = target.tell("wait")
        world.run()
        fleet.moved(world.session, "B", path=path)
        arriving.result(10)
        world.take([target], "B")
        mine = there.memory[4096 : 4096 + MIB + 77]
        assert mine.tobytes() == world.twin.to(target.block).memory["k"].tobytes()

        target.ask("close")
        owner = fleet["B"].client
        until(lambda: owner.session(world.session).state == "unattended", "the session is unattended")
        fleet.moved(world.session, "A", path=path, allow_unattended=True)
        taker = fleet.actor("A")
        taker.ask("attach", id=world.session, fingerprint={"stack": "fleet tests"})
        world.take([taker], "A")


@pytest.mark.parametrize("path", PATHS)
def test_a_worker_that_only_speaks_rest(fleet: Fleet, shared: SharedMemory, path: str) -> None:
    """It holds its memory by a name and the boundary over REST: the test itself is the worker."""
    regions = [Region("k", "uint8", (MIB,), source=Source("shm", shared.name))]
    client = fleet["A"].client
    session = client.register(spec_for(regions, fleet.unique("rest"), endpoint="ws://a")).id
    rest = Twin(regions)
    rest.memory["k"] = shared.memory[:MIB]

    target = fleet.actor("B")
    target.standby([Region("k", "uint8", (MIB,))], endpoint="ws://b")
    arriving = target.tell("wait")
    move: MigrationView | None = None
    while True:
        rest.to(rest.block + 1)
        (state,) = rest.host_states
        answer = client.boundary(session, block=rest.block, host_state=state, wait_ms=200)
        while answer.action == "wait":
            answer = client.boundary(session, block=rest.block, host_state=state, wait_ms=200)
        if answer.action != "continue":
            break
        if rest.block == 4:
            move = client.migrate(MigrationRequest(session_id=session, destination="B", path=path))
    assert (answer.action, answer.destination, answer.endpoint) == ("moved", "B", "ws://b")
    assert move is not None
    check_receipt(receipt_of(client.wait(move.id)), "A", "B", state_bytes=MIB, epoch=2)
    assert arriving.result(10)["block"] == rest.block
    assert_world([target], Twin(regions))
    target.step(2)
    assert_world([target], Twin(regions), host_state=False)
    # Whoever asks again hears it again.
    assert client.boundary(session, block=rest.block, host_state=state).action == "moved"


@pytest.mark.parametrize("path", PATHS)
def test_a_world_without_a_worker_moves_if_that_is_allowed(fleet: Fleet, path: str) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.step(3)
    world.actors[0].ask("close")
    until(lambda: fleet.client.session(world.session).state == "unattended", "the session is unattended")
    with pytest.raises(NoWorkerError):
        fleet.move(world.session, "B", path=path)

    receipt = fleet.moved(world.session, "B", path=path, allow_unattended=True)
    check_receipt(receipt, "A", "B", state_bytes=sum(r.nbytes for r in REGIONS), epoch=2)
    assert receipt.block == 3
    session = fleet["B"].client.session(world.session)
    assert (session.owner, session.state, session.block) == ("B", "unattended", 3)
    taker = fleet.actor("B")
    assert taker.ask("attach", id=world.session, fingerprint={"stack": "fleet tests"})["block"] == 3
    world.take([taker], "B")
    world.go("A", path=path)


def test_both_ranks_of_a_world_without_workers_are_taken_up(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", [Region(f"k{rank}", "float32", (30_000,), rank=rank) for rank in (0, 1)])
    world.step(3)
    for actor in world.actors:
        actor.ask("close")
    until(lambda: fleet.client.session(world.session).state == "unattended", "the session is unattended")
    fleet.moved(world.session, "B", allow_unattended=True)
    takers = [fleet.actor("B"), fleet.actor("B")]
    (ticket,) = takers[0].ask("attach", id=world.session, fingerprint={"stack": "fleet tests"})["tickets"]
    takers[1].ask("join", ticket=ticket)
    world.take(takers, "B")
    world.go("A", path="staged")


@pytest.mark.parametrize("path", PATHS)
def test_as_many_ranks_and_regions_as_there_may_be(fleet: Fleet, path: str) -> None:
    """Nobody maps them, so the memory is zero; what counts is that every part has its place."""
    regions = [Region(f"{n:0128}", "float8_e4m3fnuz", (n % 5,), rank=n % 64) for n in range(4096)]
    there, back = fleet["B"].client, fleet["A"].client
    session = back.register(spec_for(regions, fleet.unique("w"))).id
    before = back.digest(session)
    for epoch, (client, to) in enumerate([(there, "B"), (back, "A")], start=2):
        receipt = fleet.moved(session, to, path=path, allow_unattended=True)
        after = client.digest(session)
        assert receipt.source_root == before.root
        assert (after.epoch, after.seed, after.regions) == (epoch, before.seed, before.regions)
        before = after


def test_an_attachment_that_would_not_generate_the_same_bits_is_refused(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.step()
    world.actors[0].ask("close")
    until(lambda: fleet.client.session(world.session).state == "unattended", "the session is unattended")
    fleet.moved(world.session, "B", allow_unattended=True)
    with pytest.raises(ActorError, match="fingerprint-mismatch") as refused:
        fleet.actor("B").ask("attach", id=world.session, fingerprint={"stack": "another"})
    assert refused.value.details["fields"] == ["stack"]


@pytest.mark.parametrize("path", PATHS)
def test_a_world_that_has_never_generated(fleet: Fleet, path: str) -> None:
    """Its worker registers and leaves: block 0, memory of zeros, no host state."""
    world = Traveller(fleet, "w", REGIONS)
    world.actors[0].ask("close")
    until(lambda: fleet.client.session(world.session).state == "unattended", "the session is unattended")
    standing = world.stand_by("B")
    assert fleet.moved(world.session, "B", path=path, allow_unattended=True).block == 0
    assert standing.arrived()[0]["host_state"] == ""
    assert all(not any(data) for data in standing.actors[0].dump().values())
    world.at, world.epoch, world.actors = "B", 2, standing.actors
    world.go("A", path=path)


def test_a_worker_that_comes_to_no_boundary_keeps_its_world(fleet: Fleet) -> None:
    """A registered stack that stands idle can't be paused: the move gives up at its deadline."""
    world = Traveller(fleet, "w", REGIONS)
    world.step(2)
    standing = world.stand_by("B")
    ended = fleet.move(world.session, "B", deadline_ms=400.0)
    assert (ended.state, ended.code) == ("aborted", "deadline")
    world.step(2)
    assert_world(world.actors, world.twin, host_state=False)

    # The same standby takes the world at the next try.
    asked = fleet.client.migrate(MigrationRequest(session_id=world.session, destination="B"))
    with pytest.raises(ActorError, match="session-moved") as moved:
        world.step(100_000)
    assert moved.value.details == {"destination": "B", "endpoint": None}
    assert fleet.client.wait(asked.id).state == "released"
    standing.arrived()
    world.take(standing.actors, "B")


@pytest.mark.parametrize("path", PATHS)
def test_several_moves_at_once_in_both_directions(fleet: Fleet, path: str) -> None:
    worlds = {"B": [], "A": []}  # type: dict[str, list[Traveller]]
    for number in range(2):
        for at, to in (("A", "B"), ("B", "A")):
            regions = [Region("k", "uint8", (MIB + number,)), Region(f"of {at}{number}", "float64", (999,))]
            worlds[to].append(Traveller(fleet, f"{at}{number}", regions, at=at))
    for _ in range(2):
        going = [(to, world, world.stand_by(to)) for to, each in worlds.items() for world in each]
        for _, world, _ in going:
            world.run()
        asked = [
            fleet.client.migrate(MigrationRequest(session_id=world.session, destination=to, path=path))
            for to, world, _ in going
        ]
        for (to, world, standing), view in zip(going, asked, strict=True):
            source = world.at
            receipt = receipt_of(fleet.client.wait(view.id))
            world.arrive(standing, to)
            state_bytes = sum(region.nbytes for region in world.regions)
            check_receipt(receipt, source, to, state_bytes=state_bytes, epoch=world.epoch)
        worlds = {"A": worlds["B"], "B": worlds["A"]}


class Listener:
    """Reads a session's events at one node until `last` comes."""

    def __init__(self, fleet: Fleet, node: str, session: str, last: str) -> None:
        self.events: list[SessionEvent] = []
        self._client, self._session, self._last = fleet[node].client, session, last
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for event in self._client.session_events(self._session, after_seq=0):
            self.events.append(event)
            if event.type == self._last:
                return

    def heard(self) -> list[SessionEvent]:
        """All of them."""
        self._thread.join(30)
        assert not self._thread.is_alive(), self.events
        return self.events


def test_a_gateway_hears_where_the_world_is(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS, endpoint="ws://a")
    listener = Listener(fleet, "A", world.session, "moved")
    standing = world.stand_by("B", endpoint="ws://b")
    world.run()
    view = fleet.move(world.session, "B")
    standing.arrived()
    gone = world.actors[0].event("moved")
    assert (gone["destination"], gone["endpoint"]) == ("B", "ws://b")

    events = listener.heard()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    kinds = [event.type for event in events if event.type != "state"]
    assert kinds == ["registered", "moving", "moved"]
    moving, moved = (next(e.session for e in events if e.type == kind) for kind in ("moving", "moved"))
    assert (moving.owner, moving.endpoint, moving.migration_id) == ("A", "ws://a", view.id)
    assert (moved.owner, moved.endpoint, moved.migration_id) == ("B", "ws://b", None)
    for node in fleet.nodes.values():
        session = node.client.session(world.session)
        assert (session.owner, session.epoch, session.endpoint) == ("B", 2, "ws://b")
    here = Listener(fleet, "B", world.session, "registered").heard()
    assert (here[0].session.owner, here[0].session.epoch) == ("B", 2)
    assert here[0].session.endpoint == "ws://b"


def test_an_id_that_is_used_again_has_news_again(fleet: Fleet) -> None:
    spec = spec_for([Region("k", "uint8", (1,))], fleet.unique("again"))
    client = fleet["A"].client
    assert client.register(spec).epoch == 1
    client.end_session(str(spec.id))
    assert client.register(spec).epoch == 2
    listener = Listener(fleet, "A", str(spec.id), "moving")
    actor = fleet.actor("B")
    actor.standby(spec.regions)
    arriving = actor.tell("wait")
    fleet.moved(str(spec.id), "B", allow_unattended=True)
    assert [event.type for event in listener.heard()] == ["registered", "ended", "registered", "moving"]
    assert arriving.result(10)["epoch"] == 3


@pytest.mark.parametrize("live", [True, False])
def test_a_move_tells_how_it_goes(fleet: Fleet, live: bool) -> None:
    world = Traveller(fleet, "w", [Region("k", "uint8", (8 * MIB,))])
    standing = world.stand_by("B")
    world.run()
    asked = fleet.client.migrate(MigrationRequest(session_id=world.session, destination="B", live=live))
    views = list(fleet.client.migration_events(asked.id))
    world.arrive(standing, "B")
    places = [STATES.index(view.state) for view in views]
    assert places == sorted(places)
    assert (views[-1].state, views[-1].receipt is not None) == ("released", True)
    for earlier, later in pairwise(views):
        assert (earlier.round, earlier.sent_bytes) <= (later.round, later.sent_bytes)
        assert earlier.elapsed_ms <= later.elapsed_ms
    assert views[-1].round == len(receipt_of(views[-1]).rounds)
    assert views[-1].sent_bytes >= 8 * MIB


def test_every_node_keeps_the_receipt(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    receipts = [world.go(to, path="staged") for to in "BA"]
    for node in fleet.nodes.values():
        for receipt in receipts:
            view = node.client.migration(receipt.migration_id)
            assert (view.state, view.receipt) == ("released", receipt)
            assert (view.sent_bytes, view.state_bytes) == (receipt.sent_bytes, receipt.state_bytes)
        newest = node.client.migrations(limit=2).migrations
        assert [view.id for view in newest] == [receipt.migration_id for receipt in reversed(receipts)]


def test_sessions_are_listed_in_the_largest_pages(fleet: Fleet) -> None:
    a, b, c = (fleet.unique(name) for name in "abc")
    for name in (a, b, c):
        fleet["A"].client.register(spec_for([Region("k", "uint8", (1,))], name))
    for node in fleet.nodes.values():
        whole = node.client.sessions(limit=1000)
        assert ([session.id for session in whole.sessions], whole.next) == ([a, b, c], None)
        first = node.client.sessions(limit=2)
        assert ([session.id for session in first.sessions], first.next) == ([a, b], b)
        rest = node.client.sessions(b, limit=1)
        assert ([session.id for session in rest.sessions], rest.next) == ([c], None)


def test_a_digest_is_refused_while_the_world_moves_and_right_afterwards(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", REGIONS)
    world.stand_by("B")
    asked = fleet.client.migrate(MigrationRequest(session_id=world.session, destination="B"))
    with pytest.raises(ConflictError):
        fleet.client.digest(world.session)
    fleet.client.cancel(asked.id)
    assert fleet.client.wait(asked.id).state == "aborted"
    world.run()
    assert fleet.client.digest(world.session).epoch == 1
