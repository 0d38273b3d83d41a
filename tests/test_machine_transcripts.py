"""Whole moves against tests/data/transcripts, which tools/record_transcripts.py rewrites."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from machine_kit import EVENT_TYPES
from move_kit import Move
from move_scenarios import SCENARIOS, written
from move_side import POLICY

from worldmove import protocol as p
from worldmove.machine import Machine, Role
from worldmove.protocol import State

FOLDER = Path(__file__).parent / "data" / "transcripts"
PATHS = sorted(FOLDER.glob("*.jsonl"))
EVENT = msgspec.json.Decoder(reduce(lambda union, kind: union | kind, EVENT_TYPES.values()))

ENDS = {
    "live_rounds": ("released", "released"),
    "cannot_converge": ("aborted", "aborted"),
    "not_live": ("released", "released"),
    "rejected": ("rejected", "rejected"),
    "cancelled_while_copying": ("aborted", "aborted"),
    "damage_repaired": ("released", "released"),
    "damage_stays": ("aborted", "aborted"),
    "peer_lost_while_copying": ("aborted", "aborted"),
    "commit_reply_lost": ("released", "released"),
    "adoption_reply_lost": ("released", "released"),
    "destination_dies_before_adoption": ("aborted", "committed"),
    "standby_dies_before_adoption": ("aborted", "aborted"),
    "standby_and_source_die_before_adoption": ("committed", "released"),
    "source_aborts_before_commit": ("aborted", "aborted"),
    "ledger_silent_while_settling": ("aborted", "aborted"),
}
"""Where source and destination end; a dead side stays where it was."""


class Written(msgspec.Struct, forbid_unknown_fields=True):
    """A line as it stands in a file."""

    role: Role
    state: State
    event: msgspec.Raw
    actions: list[dict[str, Any]]
    after: State


LINE = msgspec.json.Decoder(Written)


def transcript(path: Path) -> list[Written]:
    return [LINE.decode(line) for line in path.read_text().splitlines()]


def name(path: Path) -> str:
    return path.stem


def play(scenario: str) -> Move:
    return SCENARIOS[scenario]()


def test_every_scenario_has_its_transcript_and_its_end() -> None:
    assert {path.stem for path in PATHS} == set(SCENARIOS) == set(ENDS)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_machines_answer_as_written(path: Path) -> None:
    """Needs no simulation: two machines alone, fed with the events of the file."""
    machines: dict[str, Machine] = {
        "source": Machine("source", POLICY),
        "destination": Machine("destination", POLICY),
    }
    for number, line in enumerate(transcript(path), start=1):
        machine = machines[line.role]
        assert machine.state is line.state, f"line {number}"
        actions = machine.handle(EVENT.decode(line.event))
        assert msgspec.json.decode(msgspec.json.encode(actions)) == line.actions, f"line {number}"
        assert machine.state is line.after, f"line {number}"
    assert (str(machines["source"].state), str(machines["destination"].state)) == ENDS[path.stem]


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_scenario_still_goes_as_written(path: Path) -> None:
    """Fails after a meant change of the protocol until tools/record_transcripts.py has been run."""
    assert written(play(path.stem).lines) == path.read_text()


BY_DRIVERS = ("TablePart", "Pausing")
"""Messages that no action is about: what is done says them."""


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_what_one_side_hears_the_other_has_said(path: Path) -> None:
    """Messages arrive in the order of their sending, none that was not sent (`BY_DRIVERS` apart)."""
    said: dict[str, list[dict[str, Any]]] = {"source": [], "destination": []}
    for line in transcript(path):
        event = msgspec.json.decode(line.event)
        peer = "destination" if line.role == "source" else "source"
        if not issubclass(EVENT_TYPES[event["t"]], p.Event) and event["t"] not in BY_DRIVERS:
            while said[peer] and said[peer][0] != event:
                said[peer].pop(0)
            assert said[peer], f"{line.role} hears {event} that was not said"
            said[peer].pop(0)
        said[line.role] += [action["message"] for action in line.actions if action["t"] == "Send"]


def test_live_rounds_shrink_and_the_last_one_is_paused() -> None:
    rounds = [
        action["message"]
        for line in transcript(FOLDER / "live_rounds.jsonl")
        for action in line.actions
        if action["t"] == "Send" and action["message"]["t"] == "Round"
    ]
    assert [(one["number"], one["final"], one["table"]) for one in rounds] == [
        (1, False, False),
        (2, False, True),
        (3, False, True),
        (4, True, True),
    ]


def test_after_damage_that_stays_the_source_generates_on() -> None:
    move = play("damage_stays")
    assert move.source.running
    assert move.source.machine.facts.code == "damaged"
    assert move.destination.wiped
    assert move.destination.machine.facts.repairs == POLICY.max_repairs


def test_a_world_that_nobody_adopts_is_reclaimed_at_the_next_epoch() -> None:
    for scenario in ("destination_dies_before_adoption", "standby_dies_before_adoption"):
        move = play(scenario)
        assert move.source.running
        assert move.record.outcome == "reclaimed"
        assert move.record.epoch == move.hello.epoch + 2


def test_a_lost_reply_loses_no_world() -> None:
    for scenario in ("commit_reply_lost", "adoption_reply_lost"):
        move = play(scenario)
        assert move.destination.running
        assert not move.source.running
        assert move.record.epoch == move.hello.epoch + 1


def test_of_abort_and_commit_only_the_first_is_written() -> None:
    move = play("source_aborts_before_commit")
    assert move.source.running
    assert move.record.outcome == "aborted"
    assert move.record.epoch == move.hello.epoch
    assert move.destination.wiped
