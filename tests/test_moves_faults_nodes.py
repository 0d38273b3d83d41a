"""Nodes killed, stopped and shut down in the middle of a move; no world is theirs to lose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_kit import SLOW, Arena, Pair, Stage
from fleet_kit import Fleet, until
from pulse_kit import Pulse

from worldmove.errors import PeerError
from worldmove.views import MigrationRequest


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=SLOW) as fleet:
        yield Stage(fleet)


def comes_back(pair: Pair) -> None:
    """The world's node, started again, has the world from the keeper, and the worker has come back."""
    until(lambda: pair.at.client.session(pair.session).state == "live", "the world is live on its node")
    pair.epoch = pair.at.client.session(pair.session).epoch


def test_the_destination_killed(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.at):
        move = pair.begin()
        pair.to.kill()
        pair.aborts(move, "peer", "transport", "connection-lost")
        pair.goes_on()
        with pytest.raises(PeerError, match="cannot be reached"):
            pair.ask()
        pair.to.start()
        # The standby waits on: its next node wipes what had come, and lets it wait again.
        pair.unharmed()
        pair.goes_over()


def test_the_destination_stopped(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.at):
        move = pair.begin()
        pair.to.freeze()
        # It is the peer's silence that ends the move, not the deadline of the whole.
        pair.aborts(move, "peer")
        pair.goes_on()
        pair.to.thaw()
        pair.unharmed()
        pair.goes_over()


def test_the_source_stopped(stage: Stage) -> None:
    """The destination gives up by itself; the world runs beside its stopped node all the time."""
    with stage.pair() as pair, Pulse(pair.to):
        move = pair.begin()
        pair.at.freeze()
        pair.goes_on()
        until(lambda: pair.to.view().migrations == 0, "the destination has given up")
        assert pair.to.client.migration(move).code == "peer"
        assert Arena(pair.to, pair.regions).wiped()
        assert not pair.arriving.done()
        pair.at.thaw()
        pair.aborts(move, "peer", "transport", "connection-lost", "deadline", "process-lost")
        pair.unharmed()
        pair.goes_over()


def test_a_key_of_a_move_whose_source_was_killed_is_settled(stage: Stage) -> None:
    """No receipt was written: the session's record says what became of the move, at both nodes."""
    with stage.pair() as pair:
        wanted = MigrationRequest(session_id=pair.session, destination=pair.there, path=pair.path)
        move = pair.at.client.migrate(wanted, "killed").id
        until(lambda: pair.at.client.migration(move).sent_bytes > 0, "bytes have landed")
        pair.at.kill()
        until(lambda: pair.to.view().migrations == 0, "the destination has given up")
        pair.at.start()
        comes_back(pair)
        again = pair.at.client.migrate(wanted, "killed")
        assert (again.id, again.state, again.code) == (move, "aborted", "node-lost")
        assert pair.at.client.migration(move).receipt == again.receipt
        assert pair.to.client.migrate(wanted, "killed").state == "aborted"
        pair.unharmed()
        pair.goes_over()


def test_a_move_does_not_fail_for_a_worker_that_is_about_to_find_its_node_again(stage: Stage) -> None:
    """It looks about twice a second, and the move would pause the world at once."""
    with stage.pair() as pair:
        pair.at.kill()
        pair.at.start()
        until(
            lambda: pair.at.client.session(pair.session).state in ("unattended", "live"),
            "the world's node has it again",
        )
        pair.epoch = pair.at.client.session(pair.session).epoch
        pair.goes_over()


def test_the_source_killed(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.to):
        move = pair.begin()
        pair.at.kill()
        pair.goes_on()
        until(lambda: pair.to.view().migrations == 0, "the destination has given up")
        assert (pair.to.client.migration(move).state, pair.arriving.done()) == ("aborted", False)
        assert Arena(pair.to, pair.regions).wiped()
        pair.at.start()
        comes_back(pair)
        pair.unharmed()
        pair.goes_over()


def test_the_source_shut_down_in_the_copy(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.to):
        move = pair.begin()
        pair.at.stop()
        until(lambda: pair.to.view().migrations == 0, "the destination has rolled back")
        view = pair.to.client.migration(move)
        assert (view.state, view.code) == ("aborted", "shutting-down")
        pair.goes_on()
        pair.at.start()
        comes_back(pair)
        receipt = pair.at.client.migration(move).receipt
        assert receipt is not None
        assert receipt.state == "aborted"
        pair.unharmed()
        pair.goes_over()


def test_the_destination_shut_down_in_the_copy(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.at):
        move = pair.begin()
        pair.to.stop()
        pair.aborts(move, "shutting-down")
        pair.goes_on()
        pair.to.start()
        pair.unharmed()
        pair.goes_over()


def test_the_source_shut_down_in_the_pause(stage: Stage) -> None:
    """The world stands already: the quickest way to let it go on is to finish."""
    with stage.pair() as pair, Pulse(pair.to):
        move = pair.begin(live=False)
        pair.see(move, "verifying")
        pair.at.stop()
        assert pair.to.client.migration(move).state == "released"
        pair.at.start()
        pair.arrived()
        pair.goes_over()


def test_the_destination_shut_down_in_the_pause(stage: Stage) -> None:
    with stage.pair() as pair, Pulse(pair.at):
        move = pair.begin(live=False)
        pair.see(move, "verifying")
        pair.to.stop()
        assert pair.end(move).state == "released"
        # The world generates beside a node that is not there, and is its own when it comes back.
        pair.arriving.result()
        pair.to.start()
        pair.arrived()
        comes_back(pair)
        pair.goes_over()
