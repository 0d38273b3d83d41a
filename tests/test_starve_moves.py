"""Moves whose processes really run short: of descriptors, address space, file size. Nothing is faked.

After each: the refusal says what was needed and what there was, there is one owner, everything that the move
took is given back, and the next move goes well.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fault_kit import Pair, Stage
from fleet_kit import Fleet, Node, until
from starve_kit import PAGE, address_space, limited, next_descriptor

from worldmove.errors import NoMemoryError

OPTIONS = ("--memory-limit", "64MB", "--peer-timeout-ms", "4000", "--stall-ms", "4000")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Fleet("A", "B", options=OPTIONS) as fleet:
        yield Stage(fleet)


@pytest.fixture
def pair(stage: Stage) -> Iterator[Pair]:
    with stage.pair() as pair:
        yield pair


class Short(NamedTuple):
    """What a process runs short of."""

    kind: int
    limit: Callable[[int], int]
    says: str


DESCRIPTORS = Short(resource.RLIMIT_NOFILE, next_descriptor, "descriptors")
SPACE = Short(resource.RLIMIT_AS, lambda pid: address_space(pid, PAGE), "available")


def node_of(pair: Pair, side: str) -> Node:
    return pair.at if side == "source" else pair.to


def executor(node: Node) -> int:
    return node.view().executors[0]


@pytest.mark.parametrize("path", ["staged", "local"])
@pytest.mark.parametrize("short", [DESCRIPTORS, SPACE], ids=["descriptors", "space"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_executor_that_can_map_nothing_more(pair: Pair, side: str, short: Short, path: str) -> None:
    """Prepare: tables and arenas are mapped before a byte is copied."""
    pid = executor(node_of(pair, side))
    with limited(pid, short.kind, short.limit(pid)):
        move = pair.ask(live=False, path=path)
        view = pair.end(move)
    if view.state == "released":
        # It could not even take in what it was sent, has ended, and its successor has done the work.
        assert short is DESCRIPTORS
        pair.arrived()
        return
    assert view.state == "aborted"
    assert (view.code, short.says in (view.reason or "")) == ("no-memory", True), view
    pair.unharmed()
    pair.goes_over(path=path)


@pytest.mark.parametrize("short", [DESCRIPTORS, SPACE], ids=["descriptors", "space"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_lane_that_can_map_nothing_more(pair: Pair, side: str, short: Short) -> None:
    """Prepare: a lane maps the world's memory when it is leased."""
    lanes = node_of(pair, side).lanes()
    assert lanes
    with contextlib.ExitStack() as stack:
        for pid in lanes:
            stack.enter_context(limited(pid, short.kind, short.limit(pid)))
        view = pair.end(pair.ask(live=False))
    assert view.state == "aborted", view
    assert view.code == "no-memory" or (view.code == "framing" and short is DESCRIPTORS), view
    assert short.says in (view.reason or "")
    pair.unharmed()
    pair.goes_over()


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_node_with_few_descriptors_takes_on_no_move(pair: Pair, side: str) -> None:
    """Requested, admitted: refused before anything is taken, with what would be needed."""
    node = node_of(pair, side)
    with limited(node.pid, resource.RLIMIT_NOFILE, next_descriptor(node.pid) + 40):
        with pytest.raises(NoMemoryError, match="LimitNOFILE") as refused:
            pair.ask(live=False)
        assert refused.value.details["required"] > refused.value.details["available"]
        assert node.client.session(pair.session).owner == pair.here
    pair.unharmed()
    pair.goes_over()


@pytest.mark.parametrize("path", ["staged", "local"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_node_that_loses_its_descriptors_in_the_copy(pair: Pair, side: str, path: str) -> None:
    """Copy and after: whatever else can't be opened, the move ends, and ends in one place."""
    node = node_of(pair, side)
    pair.source.ask("halt")
    move = pair.ask(path=path)
    pair.see(move, "pausing")
    with limited(node.pid, resource.RLIMIT_NOFILE, next_descriptor(node.pid)):
        pair.run()
        until(lambda: len(pair.source.events) or pair.source.block, "the world comes to its boundary")
        state = _ended(pair, move)
    if state == "released":
        pair.arrived()
    else:
        pair.unharmed()
    pair.goes_over()


def _ended(pair: Pair, move: str) -> str:
    """How a move ended, asked over a connection that is open already."""
    return until(lambda: _over(pair, move), "the move ends")


def _over(pair: Pair, move: str) -> str:
    state = pair.at.client.migration(move).state
    return state if state in ("released", "aborted") else ""


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_node_whose_files_can_not_grow(pair: Pair, side: str) -> None:
    """The ledger can't be written: nothing is installed; who stands waits until it takes words again."""
    node = node_of(pair, side)
    with limited(node.pid, resource.RLIMIT_FSIZE, PAGE):
        move = pair.ask(live=False)
        if side == "destination":
            pair.aborts(move, "ledger")
        else:
            until(lambda: pair.at.client.migration(move).state != "requested", "the move has begun")
    if side == "source":
        pair.aborts(move, "ledger")
    pair.unharmed()
    pair.goes_over()
