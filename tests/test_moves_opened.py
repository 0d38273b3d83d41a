"""A move is opened once, by whoever leads it: nobody opens it a second time, or as the node itself."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from fault_kit import Pair, Stage
from fleet_kit import Fleet, Node
from machine_kit import HELLO
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from worldmove import messages as m


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    options = ("--memory-limit", "64MB", "--gate-rate", "1Gbit")
    with Fleet("A", "B", options=options) as fleet, Stage(fleet).pair() as pair:
        yield pair


def refused(node: Node, move: str, source: str) -> bool:
    """Whether a node closes on a peer that opens a move, without a word about what it might have admitted."""
    hello = msgspec.structs.replace(HELLO, move_id=move, source=source)
    with connect(f"{node.url.replace('http', 'ws')}/v1/peer/moves/{move}", proxy=None) as socket:
        socket.send(m.encode(hello))
        try:
            m.decode(socket.recv(20))  # type: ignore[arg-type]
        except ConnectionClosed as closed:
            return closed.rcvd is not None and closed.rcvd.reason.startswith("unauthorized")
    return False


def test_a_move_is_opened_once_while_it_runs_and_when_it_has_ended(pair: Pair) -> None:
    pair.halt()
    source, destination = pair.at, pair.to
    move = pair.ask(live=False)
    pair.see(move, "pausing")
    assert refused(destination, move, source.name)
    pair.run()
    assert pair.end(move).state == "released"
    pair.arrived()
    assert refused(destination, move, source.name)
    assert refused(source, move, destination.name)


def test_a_move_within_a_node_is_opened_by_that_node(pair: Pair) -> None:
    """Another's move, or one that nobody asked for, is no move within this node, whoever says so."""
    pair.halt()
    move = pair.ask(live=False)
    pair.see(move, "pausing")
    assert refused(pair.to, move, pair.to.name)
    assert refused(pair.to, "move-that-nobody-asked-for", pair.to.name)
    pair.run()
    assert pair.end(move).state == "released"
    pair.arrived()
