"""Node and keeper killed together, and the worker lives: it hands its world back to the next incarnation."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_kit import Fleet, Node, Twin, assert_world, until
from fleet_node import PATIENCE_S
from fleet_stack import FINGERPRINT
from lives_kit import OPTIONS, REGIONS, arm, goes_on, has_stopped, is_live, killed_with_its_keeper

from worldmove.ipc import SyncChannel, close_all, sealed_memfd
from worldmove.manifest import Manifest, Place, Region, Source
from worldmove.memory.arena import create_arena
from worldmove.page.control import ControlPage, create_page
from worldmove.page.messages import Handback, Memory, NodeMessage, Refused, Rejoin
from worldmove.views import MigrationRequest

PAIR = tuple(Region(f"{name}{rank}", "uint8", (200_001,), rank=rank) for name in "kv" for rank in (0, 1))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        yield fleet


def test_a_world_that_only_its_worker_holds_is_taken_back_and_moves_on(fleet: Fleet) -> None:
    session, actor, twin, node = fleet.unique("only"), fleet.actor("A"), Twin(REGIONS), fleet["A"]
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    target = fleet.actor("B")
    arriving = target.wait_for(REGIONS)
    killed_with_its_keeper(node)
    goes_on(twin, actor)
    node.start()
    is_live(node, session)
    assert node.client.session(session).epoch == 1
    goes_on(twin, actor)
    # The keeper of the new incarnation holds it: it outlives that one, too.
    node.kill()
    node.start()
    is_live(node, session)
    # And once more only the worker does.
    killed_with_its_keeper(node)
    node.start()
    is_live(node, session)
    fleet.moved(session, "B")
    assert arriving.result(PATIENCE_S)["id"] == session
    assert_world([target], twin)
    # Now it is a world that came to a standby.
    there = fleet["B"]
    target.run(work_ms=3.0)
    killed_with_its_keeper(there)
    there.start()
    is_live(there, session)
    assert there.client.session(session).epoch == 2
    goes_on(twin, target)
    back = fleet.actor("A")
    arriving = back.wait_for(REGIONS)
    fleet.moved(session, "A")
    assert arriving.result(PATIENCE_S)["id"] == session
    assert_world([back], twin)


def test_what_was_revised_comes_back_as_it_is(fleet: Fleet) -> None:
    session, actor, node = fleet.unique("revised"), fleet.actor("A"), fleet["A"]
    actor.register(session, REGIONS)
    actor.step(3)
    actor.ask("revise", add=[Region("new", "int32", (5000,))], drop=["odd"], resize={"k": [2 << 20]})
    killed_with_its_keeper(node)
    # This one no node has seen.
    actor.ask("revise", add=[Region("later", "uint8", (77,))], drop=[], resize={"new": [6000]})
    actor.run(work_ms=3.0)
    node.start()
    is_live(node, session)
    actor.ask("halt")
    before, block = actor.dump(), actor.block
    regions = [
        Region("k", "uint8", (2 << 20,)),
        Region("new", "int32", (6000,)),
        Region("later", "uint8", (77,)),
    ]
    target = fleet.actor("B")
    arriving = target.wait_for(regions)
    actor.ask("run")
    fleet.moved(session, "B", live=False)
    assert arriving.result(PATIENCE_S)["id"] == session
    assert {name: len(data) for name, data in target.dump().items()} == {
        name: len(data) for name, data in before.items()
    }
    assert target.block > block


SHM = Path("/dev/shm")


@contextlib.contextmanager
def shared_memory(nbytes: int) -> Iterator[str]:
    """An object of a serving stack's own; its name goes before its memory does."""
    name = f"wm-handback-{uuid.uuid4().hex}"
    (SHM / name).write_bytes(bytes(nbytes))
    try:
        yield name
    finally:
        (SHM / name).unlink(missing_ok=True)


def test_memory_that_the_stack_made_itself_comes_back_too(fleet: Fleet) -> None:
    session, actor, node = fleet.unique("own"), fleet.actor("A"), fleet["A"]
    with shared_memory(300_000) as name:
        regions = (
            REGIONS[0],
            Region("s", "uint8", (99_999,), source=Source("shm", name, 100_001)),
            Region("t", "int32", (7,), source=Source("shm", f"/{name}", 12)),
        )
        actor.register(session, regions)
    actor.run(work_ms=3.0)
    twin = Twin(regions)
    for _ in range(2):
        killed_with_its_keeper(node)
        node.start()
        is_live(node, session)
        goes_on(twin, actor)
    target = fleet.actor("B")
    arriving = target.wait_for([msgspec.structs.replace(region, source=Source()) for region in regions])
    fleet.moved(session, "B")
    assert arriving.result(PATIENCE_S)["id"] == session
    assert_world([target], twin)


def test_a_world_with_snapshots_has_one_again(fleet: Fleet) -> None:
    """The copy went with the keeper, so another one is made at the first boundary, and holds."""
    session, actor, node = fleet.unique("copied"), fleet.actor("A"), fleet["A"]
    actor.register(session, REGIONS, snapshot_every=1_000_000)
    actor.run(work_ms=3.0)
    first = until(lambda: node.client.session(session).snapshot_block, "the first snapshot")
    killed_with_its_keeper(node)
    block = actor.block
    node.start()
    is_live(node, session)
    again = until(lambda: node.client.session(session).snapshot_block, "another snapshot")
    assert again > max(first, block)
    actor.ask("halt")
    actor.ask("half")
    actor.kill()
    until(lambda: node.client.session(session).state == "unattended", "its worker is gone")
    other = fleet.actor("A")
    assert other.ask("attach", id=session, fingerprint=FINGERPRINT)["block"] == again
    assert_world([other], Twin(REGIONS))


def test_all_ranks_have_to_be_there(fleet: Fleet) -> None:
    session, node, twin = fleet.unique("pair"), fleet["A"], Twin(PAIR)
    first, second = fleet.actor("A"), fleet.actor("A")
    tickets = first.register(session, PAIR)["tickets"]
    second.ask("join", ticket=tickets[0])
    for actor in (first, second):
        actor.run(work_ms=3.0)
    killed_with_its_keeper(node)
    second.freeze()
    node.start()
    block = first.block
    # It looks twice a second, in some 150 blocks: by now it is refused, and has handed its part back.
    until(lambda: first.block > block + 500, "it generates on")
    assert node.client.session(session).state == "lost"
    second.thaw()
    is_live(node, session)
    goes_on(twin, first, second)
    targets = [fleet.actor("B"), fleet.actor("B")]
    tickets = targets[0].standby(PAIR)["tickets"]
    targets[1].ask("join_standby", ticket=tickets[0])
    arriving = [target.tell("wait") for target in targets]
    fleet.moved(session, "B")
    assert [future.result(PATIENCE_S)["id"] for future in arriving] == [session] * 2
    assert_world(targets, twin)


def test_a_rank_that_stood_hands_back_a_world_that_nobody_adopted(fleet: Fleet) -> None:
    """Committed and not adopted, and the source is gone with its keeper: it takes its world back."""
    session, actor, twin, here = fleet.unique("stood"), fleet.actor("A"), Twin(REGIONS), fleet["A"]
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    there = fleet["B"]
    fleet.actor("B").wait_for(REGIONS)
    arm(there, "destination.committed.stop")
    here.client.migrate(MigrationRequest(session_id=session, destination="B", live=False))
    has_stopped(there)
    killed_with_its_keeper(here)
    here.start()
    is_live(here, session)
    assert here.client.session(session).epoch == 3
    there.thaw()
    goes_on(twin, actor)


def test_a_standby_is_told_to_register_anew(fleet: Fleet) -> None:
    standby = fleet.actor("A")
    waiting = standby.wait_for(REGIONS)
    killed_with_its_keeper(fleet["A"])
    fleet["A"].start()
    error: Any = waiting.exception(PATIENCE_S)
    assert error.code == "not-found"
    assert "anew" in str(error)


# Lies

SPACE = 4096


def manifest_of(*regions: Region) -> Manifest:
    return Manifest(model="fleet", regions=regions, block_ms=10.0, horizon_ms=100.0)


class Lie:
    """A handback made by hand: that of a session with one region in one extent, changed as a test likes."""

    def __init__(self, session: str, **about: Any) -> None:
        about = {"epoch": 1, "page_of": session, "seal": True, "allocate": True, **about}
        self.first = Handback(
            rejoin=Rejoin("0123456789abcdef", 0, "s" * 43, 1, stopped=False, waiting=False),
            session_id=session,
            fingerprint={},
            manifest=manifest_of(K),
            places=(Place(0, 0),),
            sizes=(SPACE,),
            revisions=0,
        )
        self.first = msgspec.structs.replace(self.first, **about.get("first", {}))
        page = create_page(1, self.first.manifest.host_state_bytes, incarnation=1, epoch=about["epoch"])
        control = ControlPage(page)
        control.session_id = about["page_of"]
        control.close()
        if "memory" in about:
            memory = os.open(about["memory"], os.O_RDWR | os.O_CLOEXEC)
        elif not about["seal"]:
            memory = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, SPACE)
        else:
            memory = create_arena(SPACE, "lie") if about["allocate"] else sealed_memfd("lie", 1 << 33)
        self.fds = [about.get("page", page), memory]

    def told(self, node: Node) -> Refused:
        """What the node says to it."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(node.run_dir / "node.sock"))
        channel: SyncChannel[NodeMessage] = SyncChannel(sock, NodeMessage)
        with contextlib.closing(channel):
            channel.send(self.first, self.fds[:1])
            channel.send(Memory(1), self.fds[1:])
            close_all(self.fds)
            got = channel.receive(timeout=PATIENCE_S)
        assert got is not None
        assert isinstance(got[0], Refused), got
        return got[0]


def _first(**fields: Any) -> dict[str, Any]:
    return {"first": fields}


K, SHARED = Region("k", "uint8", (SPACE,)), Region("k", "uint8", (SPACE,), source=Source("shm", "lie"))
OTHER, ON_GPU = msgspec.structs.replace(SHARED, name="other"), msgspec.structs.replace(K, device="GPU-0123")
BIG = Region("k", "uint8", (1 << 33,))
TWO = (Region("k", "uint8", (SPACE,)), Region("l", "uint8", (8,)))
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "of an epoch that is over": ({"epoch": 0}, "not-found"),
    "with another session's page": ({"page_of": "somebody"}, "framing"),
    "not sealed": ({"seal": False}, "manifest"),
    "smaller than said": (_first(sizes=(SPACE + 1,)), "manifest"),
    "not allocated": (_first(sizes=(1 << 33,), manifest=manifest_of(BIG)) | {"allocate": False}, "manifest"),
    "outside its extent": (_first(places=(Place(0, 512),)), "manifest"),
    "between extents": (_first(places=(Place(1, 0),)), "manifest"),
    "before its extent": (_first(places=(Place(0, -512),)), "manifest"),
    "one over another": (_first(places=(Place(0, 0), Place(0, 512)), manifest=manifest_of(*TWO)), "manifest"),
    "without a place": (_first(places=()), "manifest"),
    "shared, and no memory": (_first(manifest=manifest_of(SHARED)) | {"memory": os.devnull}, "manifest"),
    "shared, and smaller": (_first(manifest=manifest_of(SHARED), sizes=(SPACE + 1,)), "manifest"),
    "shared, and elsewhere": (_first(manifest=manifest_of(SHARED), places=(Place(0, 512),)), "manifest"),
    "half of it shared": (
        _first(manifest=manifest_of(K, OTHER), places=(Place(0, 0), Place(0, 0)), sizes=(SPACE,)),
        "manifest",
    ),
    "on a device of another node": (_first(manifest=manifest_of(ON_GPU)), "manifest"),
    "of no rank": (
        _first(rejoin=Rejoin("0123456789abcdef", 7, "s" * 43, 1, stopped=False, waiting=False)),
        "protocol",
    ),
    "without a secret": (
        _first(rejoin=Rejoin("0123456789abcdef", 0, "", 1, stopped=False, waiting=False)),
        "protocol",
    ),
    "of a slot with a path": (
        _first(rejoin=Rejoin("../../etc/passwd", 0, "s" * 43, 1, stopped=False, waiting=False)),
        "protocol",
    ),
    "with a novel for a fingerprint": (_first(fingerprint={"a": "b" * 5000}), "protocol"),
}


def open_in(node: Node) -> int:
    """How many descriptors a node has."""
    return sum(1 for _ in Path(f"/proc/{node.pid}/fd").iterdir())


def test_a_lying_worker_is_refused(fleet: Fleet) -> None:
    session, actor, twin, node = fleet.unique("lied"), fleet.actor("A"), Twin(REGIONS), fleet["A"]
    other, elsewhere = fleet.unique("elsewhere"), fleet.actor("B")
    elsewhere.register(other, REGIONS)
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    assert Lie(session).told(node).code == "conflict"
    killed_with_its_keeper(node)
    actor.freeze()
    node.start()
    before = open_in(node)
    assert Lie("never-registered").told(node).code == "not-found"
    assert Lie(other).told(node).code == "not-found"
    for name, (about, code) in LIES.items():
        refused = Lie(session, **about).told(node)
        assert refused.code == code, (name, refused)
    assert node.client.session(session).state == "lost"
    until(lambda: open_in(node) <= before, "nothing of it is held")
    actor.thaw()
    is_live(node, session)
    goes_on(twin, actor)
