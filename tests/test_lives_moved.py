"""A source node dies past the commit: its worker hears where the world went, whoever is left to say so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet_kit import Actor, Fleet, Node, Twin, assert_world, until
from fleet_node import PATIENCE_S
from lives_kit import OPTIONS, REGIONS, arm, has_stopped, killed_with_its_keeper

from worldmove.errors import SessionExistsError
from worldmove.ipc import SyncChannel, close_all
from worldmove.page.messages import Ended, Moved, NodeMessage, Refused, Rejoin
from worldmove.views import MigrationRequest

ENDPOINT = "rtp://b.example:5004"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        yield fleet


def under_way(fleet: Fleet, session: str, fault: str) -> tuple[Actor, Actor]:
    """A world whose move to B meets a fault at its source; its worker, and the standby's, which waits."""
    actor, target = fleet.actor("A"), fleet.actor("B")
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    target.wait_for(REGIONS, endpoint=ENDPOINT)
    arm(fleet["A"], fault)
    fleet["A"].client.migrate(MigrationRequest(session_id=session, destination="B", live=False))
    return actor, target


def has_gone(fleet: Fleet, session: str, actor: Actor, target: Actor) -> None:
    """The worker at A hears where its world went, and it is there, whole."""
    moved = actor.event("moved")
    assert (moved["destination"], moved["endpoint"]) == ("B", ENDPOINT)
    until(lambda: fleet["B"].client.session(session).state == "live", "the world is live at B")
    assert_world([target], Twin(REGIONS))


@pytest.mark.parametrize("phase", ["committed", "adopted"])
def test_the_next_incarnation_says_where_the_world_went(fleet: Fleet, phase: str) -> None:
    session, here = fleet.unique("next"), fleet["A"]
    actor, target = under_way(fleet, session, f"source.{phase}.stop")
    has_stopped(here)
    here.kill()
    here.start()
    has_gone(fleet, session, actor, target)


def test_also_where_its_keeper_died_with_it(fleet: Fleet) -> None:
    session, here = fleet.unique("alone"), fleet["A"]
    actor, target = under_way(fleet, session, "source.adopted.stop")
    has_stopped(here)
    until(lambda: fleet["B"].client.session(session).state == "live", "the world is live at B")
    killed_with_its_keeper(here)
    here.start()
    has_gone(fleet, session, actor, target)


def test_a_worker_that_is_away_hears_it_from_the_incarnation_after_that(fleet: Fleet) -> None:
    """The first one that comes finds nobody to tell, and goes, too: the answer is not lost with it."""
    session, here = fleet.unique("away"), fleet["A"]
    actor, target = under_way(fleet, session, "source.adopted.stop")
    has_stopped(here)
    actor.freeze()
    here.kill()
    here.start()
    here.kill()
    here.start()
    until(lambda: fleet["B"].client.session(session).state == "live", "the world is live at B")
    target.run(work_ms=3.0)
    # As long as the worker of its former stay may still generate, the world can't come back.
    back = fleet.actor("A")
    arriving = back.wait_for(REGIONS)
    with pytest.raises(SessionExistsError, match="its worker has not come back") as refusal:
        fleet.moved(session, "A", live=False)
    assert refusal.value.details["retry_after_ms"] > 0
    with ThreadPoolExecutor(1) as thread:
        moving = thread.submit(fleet.moved, session, "A", live=False)
        until(lambda: here.view().migrations == 1, "the node waits for that worker")
        actor.thaw()
        moving.result(PATIENCE_S)
    assert actor.event("moved")["destination"] in ("A", "B")
    assert arriving.result(PATIENCE_S)["id"] == session
    assert_world([back], Twin(REGIONS))


def asked(node: Node, session: str | None, epoch: int, *, hear: bool = True) -> NodeMessage | None:
    """What a node says to a rank that comes back and whose slot it has not; or the answer is lost."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(node.run_dir / "node.sock"))
    channel: SyncChannel[NodeMessage] = SyncChannel(sock, NodeMessage)
    try:
        rank = Rejoin(
            "0123456789abcdef",
            0,
            "s" * 43,
            7,
            stopped=True,
            waiting=False,
            session_id=session,
            epoch=epoch,
        )
        channel.send(rank)
        got = channel.receive(timeout=PATIENCE_S) if hear else None
    finally:
        channel.close()
    if got is None:
        return None
    close_all(got[1])
    return got[0]


def test_the_answer_is_the_same_however_often_it_is_asked(fleet: Fleet) -> None:
    session, here, there = fleet.unique("asked"), fleet["A"], fleet["B"]
    actor, target = fleet.actor("A"), fleet.actor("B")
    actor.register(session, REGIONS)
    actor.step()
    assert refused(asked(here, session, 1)) == "not-found"
    actor.run(work_ms=3.0)
    arriving = target.wait_for(REGIONS, endpoint=ENDPOINT)
    fleet.moved(session, "B", live=False)
    arriving.result(PATIENCE_S)
    actor.event("moved")
    gone = Moved("B", ENDPOINT)
    asked(here, session, 1, hear=False)
    assert [asked(here, session, 1) for _ in range(2)] == [gone, gone]
    here.kill()
    here.start()
    asked(here, session, 1, hear=False)
    assert [asked(here, session, 1) for _ in range(2)] == [gone, gone]
    # Nothing is said of what the record does not settle: worlds of its own epoch, or a later one.
    assert refused(asked(here, session, 2)) == "not-found"
    assert refused(asked(here, session, 3)) == "not-found"
    assert refused(asked(here, "never-registered", 1)) == "not-found"
    assert refused(asked(here, None, 0)) == "not-found"
    # A rank of a former stay: the world has gone and come back.
    target.run(work_ms=3.0)
    back = fleet.actor("A")
    arriving = back.wait_for(REGIONS)
    fleet.moved(session, "A", live=False)
    arriving.result(PATIENCE_S)
    here_again = asked(here, session, 1)
    assert isinstance(here_again, Moved)
    assert here_again.destination == "A"
    assert isinstance(asked(there, session, 2), Moved)
    here.client.end_session(session)
    assert isinstance(asked(here, session, 3), Ended)
    assert isinstance(asked(there, session, 2), Ended)


def refused(answer: NodeMessage | None) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


def test_a_rank_that_runs_stops_when_its_session_is_over(fleet: Fleet) -> None:
    """Written off by an operator while node and keeper were dead, and its worker generated on."""
    session, here = fleet.unique("over"), fleet["A"]
    actor = fleet.actor("A")
    actor.register(session, REGIONS)
    actor.run(work_ms=3.0)
    killed_with_its_keeper(here)
    fleet["B"].client.resolve_session(session, "end")
    block = actor.block
    until(lambda: actor.block > block + 2, "the world generates on without a node")
    here.start()
    assert actor.event("ended")["reason"] == "the session has ended"
