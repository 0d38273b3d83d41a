"""Moves given up, one after the other: both nodes are as they were, and so is what lies beside.

Thirty in the suite; `ABORTED_MOVES=200` asks for more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_kit import SLOW, Arena, Pair, Stage, resident_bytes, settles
from fleet_kit import Fleet, Node, until
from pulse_kit import Pulse

FAST = tuple(option for option in SLOW if option not in ("--gate-rate", "24Mbit"))
MOVES = int(os.environ.get("ABORTED_MOVES", "30"))
GROWTH = 8 << 20
"""Bytes that a process may grow in all these moves of 4.5 MB: less than two of them."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=FAST) as fleet:
        yield Stage(fleet)


def give_up(pair: Pair, path: str, number: int) -> None:
    """One move that has copied everything and waits for a boundary, cancelled by one node or the other."""
    pair.halt()
    move = pair.ask(path=path)
    pair.see(move, "pausing")
    (pair.at if number % 2 else pair.to).client.cancel(move)
    assert pair.end(move).state == "aborted"
    until(lambda: pair.to.view().migrations == 0, "the destination is done")
    pair.run()


def memory(node: Node) -> dict[str, int]:
    """Private memory of a node's lasting processes."""
    view = node.view()
    pids = {"node": node.pid, "keeper": view.keeper, "executor": view.executors[0]}
    return {name: resident_bytes(pid) for name, pid in pids.items()}


def arenas(pids: list[int]) -> int:
    """Mappings of arenas and tables in processes."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    return sum(text.count("/memfd:worldmove") for text in maps)


@pytest.mark.timeout(120 + 4 * MOVES)
def test_many_moves_given_up(stage: Stage) -> None:
    with stage.pair() as pair:
        for path in ("local", "staged"):
            give_up(pair, path, 1)
        pair.unharmed()
        nodes = (pair.at, pair.to)
        before = {node.name: memory(node) for node in nodes}
        executors = [*pair.at.view().executors, *pair.to.view().executors]
        mapped = arenas(executors)
        places = [Arena(node, pair.regions) for node in nodes]
        for place in places:
            place.paint()
        with Pulse(*nodes):
            # A staged move that is given up costs two lanes, and a second to replace them.
            for number in range(MOVES):
                give_up(pair, "staged" if number % 6 == 0 else "local", number)
        pair.unharmed()
        assert all(place.sings() for place in places)
        assert executors == [*pair.at.view().executors, *pair.to.view().executors]
        assert arenas(executors) == mapped
        for node in nodes:
            settles(node, pair.before[node.name])
            grown = {name: now - before[node.name][name] for name, now in memory(node).items()}
            assert max(grown.values()) < GROWTH, grown
        pair.goes_over()
        pair.goes_over(path="local", live=True)
