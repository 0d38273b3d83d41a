"""Lanes, executors and workers killed and stopped in the middle of the copy: the world goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import pytest
from fault_kit import SLOW, Pair, Stage, gone
from fleet_kit import ActorError, Fleet, Node, until
from pulse_kit import Pulse

from worldmove.errors import NoWorkerError

SIGNALS = pytest.mark.parametrize("number", [SIGKILL, SIGSTOP], ids=["killed", "stopped"])
SIDES = pytest.mark.parametrize("side", ["source", "destination"])


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=SLOW) as fleet:
        yield Stage(fleet)


def node_of(pair: Pair, side: str) -> Node:
    return pair.at if side == "source" else pair.to


@SIGNALS
@SIDES
def test_a_lane(stage: Stage, side: str, number: Signals) -> None:
    with stage.pair() as pair, Pulse(pair.at, pair.to):
        move = pair.begin()
        (lane,) = node_of(pair, side).lanes(move)
        os.kill(lane, number)
        # A dead one is reported at once; a stopped one by the stall deadline of the other or of its node.
        pair.aborts(move, "process-lost", "connection-lost", "transport", "deadline")
        pair.unharmed()
        until(lambda: gone(lane), "the lane's process is reaped")
        pair.goes_over()


@SIDES
def test_an_executor_killed(stage: Stage, side: str) -> None:
    with stage.pair() as pair, Pulse(pair.at, pair.to):
        node = node_of(pair, side)
        (executor,) = node.view().executors
        move = pair.begin()
        os.kill(executor, SIGKILL)
        view = pair.end(move)
        # An executor that had nothing to do at this moment is replaced before it is missed.
        if view.state == "aborted":
            assert view.code in ("process-lost", "peer"), view
            pair.unharmed()
            pair.goes_over()
        else:
            assert view.state == "released"
            pair.arrived()
        until(lambda: gone(executor) and len(node.view().executors) == 1, "another executor takes its place")


def test_executors_stopped_on_both_sides(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.at, pair.to):
        executors = [*pair.at.view().executors, *pair.to.view().executors]
        move = pair.begin()
        for executor in executors:
            os.kill(executor, SIGSTOP)
        # Found by their silence, long before the move's deadline.
        until(lambda: pair.at.client.migration(move).code is not None, "the move is given up")
        pair.goes_on()
        pair.aborts(move, "process-lost")
        pair.unharmed()
        assert all(gone(executor) for executor in executors)
        pair.goes_over()


def test_the_standby_s_worker_killed(stage: Stage) -> None:
    with stage.pair() as pair:
        move = pair.begin()
        os.kill(pair.target.pid, SIGKILL)
        pair.aborts(move, "worker-lost")
        with pytest.raises(EOFError):
            pair.arriving.result(0)
        pair.goes_on()
        pair.replace_target()
        pair.goes_over()


@pytest.mark.parametrize("live", [True, False], ids=["live", "paused"])
def test_the_standby_s_worker_stopped(stage: Stage, live: bool) -> None:
    """Nothing is committed to a worker that gives no sign of life, and nothing sent until it gives one."""
    with stage.pair() as pair:
        move = pair.begin(live=live)
        pair.target.freeze()
        view = pair.aborts(move, "worker-lost")
        assert "ranks [0]" in str(view.reason)
        pair.goes_on()
        until(lambda: [one.state for one in pair.to.view().standbys] == ["silent"], "nobody may have it")
        with pytest.raises(NoWorkerError, match=r"no sign of life.*\[0\]"):
            pair.ask()
        pair.target.thaw()
        pair.unharmed()
        pair.goes_over()


@pytest.mark.parametrize("unattended", [False, True])
def test_a_standby_that_a_failed_move_gives_back_is_waited_for(stage: Stage, *, unattended: bool) -> None:
    """Whoever hears of the abort asks at once; the memory of the standby is still being wiped."""
    with stage.pair() as pair, ThreadPoolExecutor(1) as caller:
        pair.halt()
        move = pair.ask(live=False)
        pair.see(move, "pausing")
        (executor,) = pair.to.view().executors
        os.kill(executor, SIGSTOP)
        pair.at.client.cancel(move)
        asked = caller.submit(pair.ask, live=False, allow_unattended=unattended)
        until(lambda: pair.to.view().migrations == 2, "the next move is asked for")
        assert not asked.done()
        os.kill(executor, SIGCONT)
        again = asked.result(20)
        pair.run()
        assert pair.end(again).state == "released"
        pair.arrived()
        pair.goes_over()


def test_a_standby_s_worker_that_sleeps_is_refused_before_a_byte_moves(stage: Stage) -> None:
    with stage.pair() as pair:
        pair.target.freeze()
        with pytest.raises(NoWorkerError, match="no sign of life"):
            pair.ask()
        assert pair.to.client.session(pair.session).owner == pair.here
        pair.target.thaw()
        pair.unharmed()
        pair.goes_over()


def test_the_world_s_worker_killed(stage: Stage) -> None:
    """The world stays where it was, and another worker takes it up from its last boundary."""
    with stage.pair() as pair:
        pair.halt()
        move = pair.begin()
        os.kill(pair.source.pid, SIGKILL)
        pair.aborts(move, "worker-lost")
        until(lambda: pair.at.client.session(pair.session).state == "unattended", "nobody has the world")
        pair.dismiss(pair.source)
        pair.source = pair.fleet.actor(pair.here)
        pair.source.ask("attach", id=pair.session, fingerprint={"stack": "fleet tests"})
        pair.run()
        pair.unharmed()
        pair.goes_over()


def test_the_world_s_worker_stopped(stage: Stage) -> None:
    """It comes to no boundary, so the move ends with its deadline.

    By the gate's rate three copies of the state take three seconds, and lanes may have to be started before.
    """
    with stage.pair() as pair:
        move = pair.begin(deadline_ms=15_000)
        pair.source.freeze()
        pair.aborts(move, "deadline")
        pair.source.thaw()
        pair.unharmed()
        pair.goes_over()


def test_a_worker_killed_in_a_block_leaves_a_torn_world_that_nobody_gets(stage: Stage) -> None:
    with stage.pair() as pair:
        pair.halt()
        move = pair.begin(allow_unattended=True)
        pair.source.ask("half")
        os.kill(pair.source.pid, signal.SIGKILL)
        pair.aborts(move, "worker-lost")
        other = pair.fleet.actor(pair.here)
        with pytest.raises(ActorError, match="conflict"):
            other.ask("attach", id=pair.session, fingerprint={"stack": "fleet tests"})
        until(lambda: pair.to.view().migrations == 0, "the destination is done")
        view = pair.end(pair.ask(allow_unattended=True))
        assert (view.state, view.code) == ("aborted", "conflict")
        pair.start_over()
