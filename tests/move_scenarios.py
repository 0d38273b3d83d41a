"""The moves whose transcripts are kept in tests/data/transcripts: what happens in each, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from machine_kit import REJECTED
from move_kit import Move
from move_side import DAMAGE, Line, Side

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.protocol import State

Scenario = Callable[[], Move]


def heard(move: Move, role: str, kind: type) -> bool:
    """Whether a machine has answered an event of this type."""
    return any(line.role == role and isinstance(line.event, kind) for line in move.lines)


def until(move: Move, role: str, kind: type) -> None:
    """Goes on until then; a scenario that never gets there is wrong."""
    if not move.run(until=lambda: heard(move, role, kind)):
        raise AssertionError(f"the {role} never meets {kind.__name__}")


def in_state(move: Move, role: str, state: State) -> None:
    """Goes on until that side is in `state`."""
    side = move.source if role == "source" else move.destination
    if not move.run(until=lambda: side.machine.state is state):
        raise AssertionError(f"the {role} is never {state}")


def waiting(move: Move, role: str, job: str, wait: str) -> Any:
    """Goes on until that side's job waits so; returns it."""
    side = move.source if role == "source" else move.destination

    def found() -> list[Any]:
        return [one for one in side.jobs if one.name == job and one.waits == wait]

    if not move.run(until=lambda: bool(found())):
        raise AssertionError(f"{job} never waits for {wait}")
    return found()[0]


def finish(move: Move, side: Side, job: str) -> None:
    """Nothing else happens until that job is done, however long it takes."""
    found = next(one for one in side.jobs if one.name == job)
    while found in side.jobs:
        move.take(side, found, True if found.waits == "time" else None)


def started(*, live: bool = True) -> Move:
    move = Move(live=live)
    move.start()
    return move


def live_rounds() -> Move:
    move = started()
    until(move, "destination", p.RoundComplete)
    move.source.generate(1)
    until(move, "source", p.TableDone)
    move.source.generate(2)
    move.run()
    return move


def cannot_converge() -> Move:
    """Every block rewrites everything, and that takes longer than the horizon: the world is never paused."""
    move = started()
    until(move, "destination", p.RoundComplete)
    move.source.generate(0, 1, 2, 3)
    until(move, "source", p.TableDone)
    move.source.generate(0, 1, 2, 3)
    move.run()
    return move


def not_live() -> Move:
    move = started(live=False)
    move.run()
    return move


def rejected() -> Move:
    move = started()
    move.destination.refuses = REJECTED
    move.run()
    return move


def cancelled_while_copying() -> Move:
    move = started()
    in_state(move, "source", State.COPYING)
    move.source.fail("cancelled")
    move.run()
    return move


def damage_repaired() -> Move:
    move = started()
    waiting(move, "destination", "Verify", "step")
    move.destination.memory[2] = DAMAGE
    until(move, "destination", p.Repaired)
    move.run()
    return move


def damage_stays() -> Move:
    move = started(live=False)
    in_state(move, "destination", State.FINISHING)
    move.destination.damages = 1000
    move.run()
    return move


def peer_lost_while_copying() -> Move:
    move = started()
    in_state(move, "destination", State.COPYING)
    move.cut()
    move.run()
    return move


def commit_reply_lost() -> Move:
    move = started(live=False)
    job = waiting(move, "destination", "CommitRecord", "ledger")
    move.cut()
    move.take(move.destination, job, "after")
    move.run()
    return move


def destination_dies_before_adoption() -> Move:
    move = started(live=False)
    until(move, "source", m.Committed)
    move.crash(move.destination)
    move.run()
    return move


def standby_dies_before_adoption() -> Move:
    move = started(live=False)
    waiting(move, "destination", "CommitRecord", "step")
    move.destination.standby = False
    in_state(move, "source", State.RECLAIMING)
    finish(move, move.source, "AwaitAdoption")
    move.run()
    return move


def standby_and_source_die_before_adoption() -> Move:
    """Nobody reclaims: the world lives on at the destination, where a worker may attach."""
    move = started(live=False)
    waiting(move, "destination", "CommitRecord", "step")
    move.destination.standby = False
    in_state(move, "destination", State.RECLAIMING)
    move.crash(move.source)
    move.run()
    return move


def adoption_reply_lost() -> Move:
    move = started(live=False)
    job = waiting(move, "destination", "AdoptRecord", "ledger")
    move.take(move.destination, job, "after")
    move.run()
    return move


def source_aborts_before_commit() -> Move:
    """The source's `aborted` is written first; the destination's commit loses the race."""
    move = started(live=False)
    commit = waiting(move, "destination", "CommitRecord", "ledger")
    move.source.fail("deadline")
    finish(move, move.source, "SettleRecord")
    move.take(move.destination, commit)
    move.run()
    return move


def ledger_silent_while_settling() -> Move:
    move = started()
    in_state(move, "source", State.COPYING)
    move.source.fail("cancelled")
    for _ in range(3):
        move.take(move.source, waiting(move, "source", "SettleRecord", "ledger"), "before")
    move.run()
    return move


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        live_rounds,
        cannot_converge,
        not_live,
        rejected,
        cancelled_while_copying,
        damage_repaired,
        damage_stays,
        peer_lost_while_copying,
        commit_reply_lost,
        adoption_reply_lost,
        destination_dies_before_adoption,
        standby_dies_before_adoption,
        standby_and_source_die_before_adoption,
        source_aborts_before_commit,
        ledger_silent_while_settling,
    )
}


def written(lines: list[Line]) -> str:
    """A transcript: one line of JSON for each event that a machine answered, in the order of their happening.

    Fields: `role`, `state` before, `event` and `actions` (field `t` is the type, bytes in base64), `after`.
    """
    return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)
