"""What the rules of both sides share: the facts, the shape of a decision, and how a side gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.protocol import Action, State
from worldmove.rounds import RoundPolicy, Taken

MAX_CODE = 256
replace = msgspec.structs.replace


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine remembers.

    Attributes:
        policy: when live rounds and repairs end.
        asked: the move was asked for; it is, once.
        live: it copies before it pauses.
        epoch: the session's, before the move.
        shown: the last state of the contract, for people.
        path: how the bytes come, and over how many `lanes`.
        recorded: the ledger has answered during this move.
        offered: the way to the bytes was told.
        round: number of the latest round.
        rounds: what each round took that has ended.
        blocks: source: the last block when each round's table was begun, or the round where it has none.
        round_open: not everything that the round asked for has been read back.
        table_expected: parts of the round's table may still come.
        closing: nothing more will be asked for in the round.
        expects: no live round follows.
        complete: source: the destination holds the root. Destination: the final round has landed.
        sealed: what the destination must arrive at.
        repairs: how often damaged leaves were asked for again.
        peer_lost: nothing more will be heard from the other side.
        code: why the move was given up; `message` says it to people.
    """

    policy: RoundPolicy
    asked: bool = False
    live: bool = True
    epoch: int = 0
    shown: State = State.REQUESTED
    path: str = ""
    lanes: int = 0
    recorded: bool = False
    offered: bool = False
    round: int = 0
    rounds: tuple[Taken, ...] = ()
    blocks: tuple[int, ...] = ()
    round_open: bool = False
    table_expected: bool = False
    closing: bool = False
    expects: bool = False
    complete: bool = False
    sealed: m.Sealed | None = None
    repairs: int = 0
    peer_lost: bool = False
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


def late(state: State) -> Rule:
    """The answer to a reason to give up, or a last word, that comes when the record decides already."""

    def rule(facts: Facts, event: p.Failed | p.PeerLost | m.Abort | m.Released) -> Step:
        return Step(state, note_loss(facts, event))

    return rule


def note_loss(facts: Facts, event: p.Failed | p.PeerLost | m.Abort | m.Released) -> Facts:
    """Whoever is gone is not waited for later."""
    return replace(facts, peer_lost=True) if isinstance(event, p.PeerLost | m.Released) else facts


def note_reason(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Facts:
    """Keeps the first reason; later ones are consequences."""
    facts = note_loss(facts, event)
    if facts.code is not None:
        return facts
    code = "peer" if isinstance(event, p.PeerLost) else event.code
    return replace(facts, code=code, message=event.message)


SYMPTOMS = {"connection-lost": 0, "peer": 0, "transport": 0, "deadline": 1}
"""How much less these reasons say than others: what ends on one side is seen as a silence on the other."""


def heard_too(*, prefers_peer: bool) -> Rule:
    """The answer to the peer's reason, where this side has given up already: the better one is kept.

    Args:
        prefers_peer: of two that say equally much, the peer's. So both sides keep the same one.
    """

    def rule(facts: Facts, event: m.Abort) -> Step:
        mine, theirs = SYMPTOMS.get(facts.code or "peer", 2), SYMPTOMS.get(event.code, 2)
        if theirs > mine or (theirs == mine and prefers_peer):
            facts = replace(facts, code=event.code, message=event.message)
        return Step(State.SETTLING, facts)

    return rule


def tell(event: p.Failed | p.PeerLost | m.Abort) -> tuple[Action, ...]:
    """The peer learns of a failure on this side, not of its own."""
    if isinstance(event, p.Failed):
        return (p.Send(message=m.Abort(code=event.code[:MAX_CODE], message=event.message[: m.MAX_TEXT])),)
    return ()


def give_up_unrecorded(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Step:
    """Before the record's first change a move may simply end."""
    facts = note_reason(facts, event)
    return Step(State.ABORTED, facts, (*tell(event), p.Finish(code=facts.code, message=facts.message)))


def give_up(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Step:
    """Ends the path, then lets the record decide."""
    return Step(State.SETTLING, note_reason(facts, event), (p.AbortPath(), *tell(event), p.SettleRecord()))
