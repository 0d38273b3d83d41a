"""A move cancelled in every state: before the commit the world goes on as if nothing had been; then, 409."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from signal import SIGCONT, SIGSTOP

import pytest
from fault_kit import SLOW, Pair, Stage, gone
from fleet_kit import Fleet, until

from worldmove.errors import ConflictError, MoveAbortedError, NotFoundError
from worldmove.views import MigrationView


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=SLOW) as fleet:
        yield Stage(fleet)


@pytest.fixture
def meanwhile() -> Iterator[Callable[..., Future[object]]]:
    """Calls a function in a thread of its own."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def cancelled(pair: Pair, view: MigrationView) -> None:
    """The answer says so; asked again it is over; the world goes on, and can move."""
    assert (view.state, view.code) == ("aborted", "cancelled")
    with pytest.raises(ConflictError):
        pair.at.client.cancel(view.id)
    pair.unharmed()
    pair.goes_over()


def test_requested(stage: Stage, meanwhile: Callable[..., Future[MigrationView]]) -> None:
    """The destination has not said anything yet."""
    with stage.pair() as pair:
        pair.to.freeze()
        asked = meanwhile(pair.ask)
        move = until(lambda: pair.at.client.migrations(limit=1).migrations, "the move is known")[0]
        assert move.state == "requested"
        view = pair.at.client.cancel(move.id)
        with pytest.raises(MoveAbortedError, match="cancelled"):
            asked.result()
        pair.to.thaw()
        cancelled(pair, view)


def test_admitted(stage: Stage) -> None:
    """The source's lane has been leased and does not answer."""
    with stage.pair() as pair:
        lanes = pair.at.lanes()
        for lane in lanes:
            os.kill(lane, SIGSTOP)
        move = pair.ask()
        assert pair.at.client.migration(move).state == "admitted"
        view = pair.at.client.cancel(move)
        until(lambda: all(gone(lane) for lane in lanes), "lanes that do not answer are ended")
        cancelled(pair, view)


def test_copying(stage: Stage) -> None:
    with stage.pair() as pair:
        move = pair.begin()
        assert pair.at.client.migration(move).state == "copying"
        cancelled(pair, pair.at.client.cancel(move))


def test_copying_at_the_destination(stage: Stage) -> None:
    """Either node of a move can cancel it."""
    with stage.pair() as pair:
        move = pair.begin()
        pair.to.client.cancel(move)
        cancelled(pair, pair.end(move))


def test_pausing(stage: Stage) -> None:
    """The world has not come to its boundary yet."""
    with stage.pair() as pair:
        pair.halt()
        move = pair.ask()
        pair.see(move, "pausing")
        view = pair.at.client.cancel(move)
        pair.run()
        cancelled(pair, view)


def test_finishing(stage: Stage, meanwhile: Callable[..., Future[MigrationView]]) -> None:
    """The world stands, and its table is being read."""
    with stage.pair() as pair:
        pair.halt()
        move = pair.ask()
        pair.see(move, "pausing")
        (executor,) = pair.at.view().executors
        os.kill(executor, SIGSTOP)
        pair.run()
        pair.see(move, "finishing")
        view = meanwhile(pair.at.client.cancel, move)
        pair.goes_on()
        os.kill(executor, SIGCONT)
        cancelled(pair, view.result())


def test_verifying(stage: Stage) -> None:
    """The world stands, the seal is out, and the destination still receives."""
    with stage.pair() as pair:
        move = pair.begin(live=False)
        pair.see(move, "verifying")
        cancelled(pair, pair.at.client.cancel(move))


def test_released(stage: Stage) -> None:
    """What is committed stays so: there is nothing to cancel any more."""
    with stage.pair() as pair:
        here, there = pair.at, pair.to
        move = pair.goes_over().migration_id
        for node in (here, there):
            until(lambda node=node: node.view().migrations == 0, "the move is over on both sides")
            with pytest.raises(ConflictError, match="released"):
                node.client.cancel(move)
        with pytest.raises(NotFoundError):
            there.client.cancel("move-of-nobody")
        pair.goes_on()
