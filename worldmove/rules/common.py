"""What the rules of both sides share: the facts, the shape of a decision, and how a side gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.protocol import Action, State
from worldmove.rounds import RoundPolicy, Taken

replace = msgspec.structs.replace


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine remembers. `shown` is the last state of the contract, for people."""

    policy: RoundPolicy
    live: bool = True
    shown: State = State.REQUESTED
    path: str = ""
    lanes: int = 0
    round: int = 0
    rounds: tuple[Taken, ...] = ()
    round_open: bool = False
    table_expected: bool = False
    complete: bool = False
    sealed: m.Sealed | None = None
    repairs: int = 0
    code: str | None = None
    message: str | None = None


class Step(NamedTuple):
    """What a rule decides: the next state, the new facts, and the actions in order."""

    state: State
    facts: Facts
    actions: tuple[Action, ...] = ()


Rule = Callable[[Facts, Any], Step]
Table = dict[tuple[State, type], Rule]
"""Which rule answers which event in which state."""


class Contradiction(Exception):  # noqa: N818 - never leaves this module
    """An event of a legal type whose content contradicts the move so far."""


def require(condition: bool, message: str) -> None:
    """Ends a rule without a step: the event contradicts what was said before."""
    if not condition:
        raise Contradiction(message)


def stay(state: State) -> Rule:
    """The answer to what is expected and needs nothing."""
    return lambda facts, _event: Step(state, facts)


def note_reason(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Facts:
    """Keeps the first reason; later ones are consequences."""
    if facts.code is not None:
        return facts
    code = "peer" if isinstance(event, p.PeerLost) else event.code
    return replace(facts, code=code, message=event.message)


def tell(event: p.Failed | p.PeerLost | m.Abort) -> tuple[Action, ...]:
    """The peer learns of a failure on this side, not of its own."""
    if isinstance(event, p.Failed):
        return (p.Send(message=m.Abort(code=event.code, message=event.message)),)
    return ()


def give_up_unrecorded(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Step:
    """Before the record's first change a move may simply end."""
    facts = note_reason(facts, event)
    return Step(State.ABORTED, facts, (*tell(event), p.Finish(code=facts.code, message=facts.message)))


def give_up(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Step:
    """Ends the path, then lets the record decide."""
    return Step(State.SETTLING, note_reason(facts, event), (p.AbortPath(), *tell(event), p.SettleRecord()))
