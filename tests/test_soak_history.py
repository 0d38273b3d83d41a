"""What the soak keeps of records, stacks and moves: a recorded history holds, a doctored one doesn't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from worldmove.soak import history
from worldmove.soak.history import AnyFact, Entered, Held, Made, Recorded

RECORDED = Path(__file__).parent / "data" / "soak_history.jsonl"
Facts = list[AnyFact]
F = TypeVar("F", bound=history.Fact)


def recorded() -> Facts:
    """Eight moves of one world among three nodes: six that took place, two that were aborted."""
    return history.read(RECORDED.read_bytes())


def doctored(kind: type[F], wanted: Callable[[F], bool], change: Callable[[F], F]) -> Facts:
    """The recorded history with its last fact changed that is wanted."""
    facts: Facts = recorded()
    index = max(i for i, fact in enumerate(facts) if isinstance(fact, kind) and wanted(fact))
    facts[index] = change(facts[index])  # type: ignore[arg-type, call-overload]
    return facts


def other(node: str) -> str:
    return "A" if node != "A" else "B"


def of_record(**fields: object) -> Callable[[Recorded], Recorded]:
    return lambda fact: Recorded(replace(fact.record, **fields))


def unlike_before(fact: Recorded) -> bool:
    return fact.record.epoch > 3 and fact.record.phase == "owned"


DOCTORED = {
    "two owners": doctored(
        Recorded, unlike_before, lambda fact: of_record(owner=other(fact.record.owner))(fact)
    ),
    "follows epoch": doctored(Recorded, unlike_before, of_record(epoch=1)),
    "without a verified root": [
        Recorded(replace(fact.record, root=None)) if isinstance(fact, Recorded) else fact
        for fact in recorded()
    ],
    "has it at epoch": doctored(
        Held, lambda fact: fact.epoch > 1, lambda fact: replace(fact, node=other(fact.node))
    ),
    "is from": doctored(Made, lambda fact: True, lambda fact: replace(fact, node=other(fact.node))),
    "destination C is aborted": doctored(
        Entered,
        lambda fact: (fact.role, fact.state) == ("destination", "released"),
        lambda fact: replace(fact, state="aborted"),
    ),
    "source C is aborted": doctored(
        Entered,
        lambda fact: (fact.role, fact.state) == ("source", "released"),
        lambda fact: replace(fact, state="aborted"),
    ),
    "source C is released": doctored(
        Entered,
        lambda fact: (fact.role, fact.state) == ("source", "aborted"),
        lambda fact: replace(fact, state="released"),
    ),
}


def test_a_recorded_history_holds() -> None:
    facts = recorded()
    assert {type(fact) for fact in facts} == {Recorded, Held, Made, Entered}
    assert history.violations(facts) == []


@pytest.mark.parametrize("words", DOCTORED)
def test_a_doctored_history_does_not(words: str) -> None:
    found = history.violations(DOCTORED[words])
    assert any(words in line for line in found)


def test_a_history_is_written_and_read() -> None:
    assert history.written(recorded()) == RECORDED.read_bytes()


def test_states_are_read_out_of_a_log_whatever_else_stands_there() -> None:
    log = [
        b"listening on http://127.0.0.1:1",
        b'"state"',
        b'{"event": "state", "move": "m", "role": "source", "before": "settling", "state": "aborted"}',
        b'{"event": "state", "mo',
        b'{"event": "node started"}',
    ]
    assert history.entered(log, "A") == [Entered("A", "m", "source", "aborted")]
