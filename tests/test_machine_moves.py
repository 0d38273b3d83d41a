"""Whole moves by two machines, the ledger's rules, and a network, a ledger and nodes that fail at will."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from machine_kit import REJECTED
from move_kit import Move
from move_side import LEAVES

from worldmove.ledger import records
from worldmove.protocol import State

STEPS = 90
ORDINARY = 8
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])

EITHER_WAY = pytest.mark.parametrize("apart", [False, True], ids=["one-write", "two-writes"])

Decision = tuple[int, int]


def check_end(move: Move) -> None:
    """Once everything has happened that can: the move is over, and the world is in exactly one place."""
    for side in move.sides:
        if side.alive:
            assert side.machine.ended, f"{side.role} waits: {side.machine.history}"
            assert side.finished
            assert not side.jobs
    source, destination = move.sides
    record = move.record
    fate = records.fate(record, source.move_id)
    if source.alive and destination.alive:
        moved = fate in ("adopted", "released")
        assert source.running != moved
        assert record.owner == (destination if moved else source).claim.name
        assert destination.running == moved
        assert (source.machine.state is State.RELEASED) == moved
        assert (destination.machine.state is State.RELEASED) == moved
    if destination.alive and destination.machine.state is State.ABORTED and destination.machine.facts.offered:
        assert destination.wiped
    if source.alive and not destination.alive:
        assert source.running or fate in ("adopted", "released")
    if destination.alive and not source.alive:
        assert destination.running == (fate in ("adopted", "released"))


def disturb(move: Move, kind: int, how: int) -> None:
    """Something goes wrong, or the world goes on."""
    source, destination = move.sides
    if kind == 0 and source.running:
        source.generate(how % LEAVES)
    elif kind == 1 and not (source.closed or destination.closed):
        note("cut")
        move.cut((how % 3, how // 3 % 3))
    elif kind in (2, 3):
        side = move.sides[kind - 2]
        if side.alive:
            note(f"{side.role} gives up in {side.machine.state}")
            side.fail("cancelled")
    elif kind == 4:
        destination.damages += how % 3
    elif kind == 5 and destination.alive:
        note(f"the standby dies in {destination.machine.state}")
        destination.standby = False
        destination.fail("worker-lost")
    elif kind in (6, 7):
        side, other = move.sides[kind - 6], move.sides[7 - kind]
        if side.alive and other.alive and how % 2:
            note(f"{side.role} dies in {side.machine.state}")
            move.crash(side)


def decide(move: Move, kind: int, how: int) -> None:
    """One decision: something goes wrong, or one of the open choices happens, well or badly."""
    if kind < ORDINARY:
        disturb(move, kind, how)
        move.check()
        return
    choices = move.choices()
    if not choices:
        return
    side, job = choices[how % len(choices)]
    answer: object = None
    if job is not None and job.waits == "ledger":
        answer = {9: "before", 10: "after"}.get(kind, "none")
    elif job is not None and job.waits == "time":
        answer = kind == 9
    note(f"{side.role} {side.machine.state}: {job.name if job else 'message'} {answer or ''}")
    move.take(side, job, answer)


def after_steps(move: Move, count: int) -> None:
    """A good move, until so many steps have been done."""
    move.start()
    steps = iter(range(count))
    move.run(until=lambda: next(steps, None) is None)


def decisions(kinds: st.SearchStrategy[int]) -> st.SearchStrategy[list[Decision]]:
    return st.lists(st.tuples(kinds, st.integers(0, 11)), max_size=STEPS)


RARE = st.integers(0, 60).map(lambda kind: kind if kind <= 10 else 11)
"""Mostly ordinary steps (11): so a move comes far before something happens to it."""


@given(live=st.booleans(), apart=st.booleans(), plan=decisions(RARE))
@MANY
def test_whatever_fails_the_world_is_in_one_place(live: bool, apart: bool, plan: list[Decision]) -> None:
    move = Move(live=live, apart=apart)
    move.start()
    for decision in plan:
        decide(move, *decision)
    move.run()
    check_end(move)


@given(live=st.booleans(), apart=st.booleans(), lead=st.integers(0, 120), plan=decisions(st.integers(0, 11)))
@MANY
def test_a_storm_at_any_moment_of_a_good_move(
    live: bool, apart: bool, lead: int, plan: list[Decision]
) -> None:
    move = Move(live=live, apart=apart)
    after_steps(move, lead)
    for decision in plan:
        decide(move, *decision)
    move.run()
    check_end(move)


@EITHER_WAY
@pytest.mark.parametrize("live", [True, False])
def test_a_good_move_releases_both_sides(live: bool, apart: bool) -> None:
    move = Move(live=live, apart=apart)
    move.start()
    move.run()
    check_end(move)
    assert [side.machine.state for side in move.sides] == [State.RELEASED, State.RELEASED]
    assert move.record.epoch == move.hello.epoch + 1
    assert move.record.phase == "owned"
    assert move.record.outcome == "released"


def test_a_refused_move_changes_nothing() -> None:
    move = Move()
    before = move.record
    move.destination.refuses = REJECTED
    move.start()
    move.run()
    check_end(move)
    assert [side.machine.state for side in move.sides] == [State.REJECTED, State.REJECTED]
    assert move.record == before


@EITHER_WAY
@pytest.mark.parametrize("after", range(130))
@pytest.mark.parametrize("kept", [(0, 0), (0, 9), (9, 0), (9, 9)])
def test_the_connection_breaks_after_any_step(after: int, kept: tuple[int, int], apart: bool) -> None:
    move = Move(apart=apart)
    after_steps(move, after)
    if not (move.source.closed or move.destination.closed):
        move.cut(kept)
    move.run()
    check_end(move)


@EITHER_WAY
@pytest.mark.parametrize("after", range(130))
@pytest.mark.parametrize("role", [0, 1])
def test_a_node_dies_after_any_step(after: int, role: int, apart: bool) -> None:
    move = Move(apart=apart)
    after_steps(move, after)
    move.crash(move.sides[role])
    move.run()
    check_end(move)


@EITHER_WAY
@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("call", range(7))
def test_any_call_to_the_ledger_fails(fault: str, call: int, apart: bool) -> None:
    move = Move(apart=apart)
    move.start()
    seen = 0
    for number in range(2000):
        choices = move.choices()
        if not choices:
            break
        able = [(side, job) for side, job in choices if job is None or job.waits != "time"] or choices
        side, job = able[number % len(able)]
        answer: object = None
        if job is not None and job.waits == "ledger":
            answer, seen = fault if seen == call else "none", seen + 1
        elif job is not None and job.waits == "time":
            answer = True
        move.take(side, job, answer)
    check_end(move)
