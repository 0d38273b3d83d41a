"""The destination's answers: it decides what is sent, verifies what it holds, and commits."""

from __future__ import annotations

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.protocol import State
from worldmove.rounds import Taken
from worldmove.rules.common import Facts, Rule, Step, give_up, note_reason, replace, require, tell


def hello(facts: Facts, event: m.Hello) -> Step:
    """Asks whether the session can come."""
    require(not facts.asked, "asked twice")
    facts = replace(facts, asked=True, live=event.live, epoch=event.epoch)
    return Step(State.REQUESTED, facts, (p.Admit(hello=event),))


def admitted(facts: Facts, event: p.AdmitOk) -> Step:
    """A standby is bound."""
    require(facts.asked, "an admission that nobody asked for")
    return Step(State.ADMITTED, facts, (p.Send(message=event.admitted),))


def refused(facts: Facts, event: p.AdmitRefused) -> Step:
    """No, and why."""
    require(facts.asked, "a rejection that nobody asked for")
    rejected = event.rejected
    facts = replace(facts, code=rejected.code, message=rejected.message)
    actions = (p.Send(message=rejected), p.Finish(code=rejected.code, message=rejected.message))
    return Step(State.REJECTED, facts, actions)


def begin(facts: Facts, event: m.Begin) -> Step:
    """The source's record says `moving`: connect."""
    require(not facts.offered, "begun twice")
    return Step(State.ADMITTED, replace(facts, offered=True), (p.OpenPath(begin=event),))


def ready(facts: Facts, event: p.PathReady) -> Step:
    """The path is open."""
    require(facts.offered, "a path that was not offered")
    prepared = m.Prepared(path=event.path, gbps=event.gbps, reason=event.reason)
    return Step(State.PREPARED, facts, (p.Send(message=prepared),))


def open_round(facts: Facts, event: m.Round) -> Step:
    """A round begins; rounds follow one another and a final one always has a table."""
    require(not facts.round_open, f"round {facts.round} is still open")
    require(event.number == facts.round + 1, f"round {event.number} does not follow round {facts.round}")
    require(event.table or not event.final, "a final round without a table")
    require(event.final or not facts.expects, "a live round after the last one")
    facts = replace(facts, round=event.number, round_open=True, table_expected=event.table, closing=False)
    state = State.FINISHING if event.final else State.COPYING
    return Step(state, facts, (p.StartRound(number=event.number, final=event.final),))


def pausing(facts: Facts, _event: m.Pausing) -> Step:
    """What is foreseen of the last round can be made ready."""
    require(not facts.round_open, f"round {facts.round} is still open")
    require(facts.live, "pausing of a move that is not live")
    require(not facts.expects, "pausing twice")
    return Step(State.COPYING, replace(facts, expects=True), (p.Expect(),))


def part(state: State) -> Rule:
    """A part of the source's table: what differs is asked for."""

    def rule(facts: Facts, event: m.TablePart) -> Step:
        require(facts.table_expected and event.number == facts.round, "a table part that was not announced")
        return Step(state, facts, (p.PlanPart(part=event),))

    return rule


def table_end(state: State) -> Rule:
    """Nothing more will be asked for in this round."""

    def rule(facts: Facts, event: m.TableEnd) -> Step:
        require(facts.round_open and event.number == facts.round, f"round {event.number} is not open")
        require(not facts.closing, f"the table of round {event.number} ended twice")
        facts = replace(facts, table_expected=False, closing=True)
        return Step(state, facts, (p.CloseRound(number=event.number),))

    return rule


def landed(facts: Facts, event: p.RoundComplete) -> Step:
    """A live round lies in memory."""
    facts = _closed(facts, event)
    landed = m.Landed(
        number=event.number,
        leaves=event.leaves,
        bytes=event.bytes,
        ms=event.ms,
        copied_bytes=event.copied_bytes,
        wire_ms=event.wire_ms,
    )
    return Step(State.COPYING, facts, (p.Send(message=landed),))


def complete(facts: Facts, event: p.RoundComplete) -> Step:
    """The final round lies in memory; verification also needs the seal."""
    return _both(replace(_closed(facts, event), complete=True))


def _closed(facts: Facts, event: p.RoundComplete) -> Facts:
    require(event.number == facts.round and facts.closing, f"round {event.number} is not closing")
    taken = Taken(leaves=event.leaves, bytes=event.bytes, ms=event.ms, copied_bytes=event.copied_bytes)
    return replace(facts, rounds=(*facts.rounds, taken), round_open=False, closing=False)


def sealed(facts: Facts, event: m.Sealed) -> Step:
    """What the destination must arrive at; verification also needs the round."""
    require(facts.sealed is None, "sealed twice")
    require(not facts.table_expected, "sealed before the table ended")
    return _both(replace(facts, sealed=event))


def _both(facts: Facts) -> Step:
    if facts.sealed is None or not facts.complete:
        return Step(State.FINISHING, facts)
    return Step(State.VERIFYING, facts, (p.Verify(sealed=facts.sealed),))


def damage(facts: Facts, event: p.DamageFound) -> Step:
    """Asks for the damaged leaves again, a bounded number of times."""
    if facts.repairs >= facts.policy.max_repairs:
        message = f"{event.leaves} leaves still differ after {facts.repairs} repairs"
        return give_up(facts, p.Failed(code="damaged", message=message))
    return Step(State.VERIFYING, replace(facts, repairs=facts.repairs + 1), (p.Repair(),))


def repaired(facts: Facts, _event: p.Repaired) -> Step:
    """Looks again."""
    return Step(State.VERIFYING, facts, (p.Verify(sealed=_sealed(facts)),))


def verified(facts: Facts, event: p.MemoryVerified) -> Step:
    """Memory equals the source's: commit. The world stands for the write, and not for the word of it."""
    require(event.verified.root == _sealed(facts).root, "another root than the source's")
    commit = p.CommitRecord(block=_sealed(facts).block, root=event.verified.root)
    return Step(State.VERIFYING, facts, (commit, p.Send(message=event.verified)))


def committed(facts: Facts, event: p.RecordCommitted) -> Step:
    """The record names this node: adopt."""
    adopt = p.AdoptRecord(block=_sealed(facts).block)
    return Step(State.COMMITTED, facts, (adopt, p.Send(message=event.committed)))


def adopted(facts: Facts, event: p.RecordAdopted) -> Step:
    """The standby generates; a source that is lost is not waited for."""
    if facts.peer_lost:
        return over(facts, event)
    return Step(State.ADOPTED, facts, (p.Send(message=event.adopted),))


def cannot_adopt(facts: Facts, event: p.Failed) -> Step:
    """Committed, but there is nobody to hand the world to: the source may have it back."""
    return Step(State.RECLAIMING, note_reason(facts, event), (*tell(event), p.AwaitReclaim()))


def settled(facts: Facts, event: p.RecordSettled) -> Step:
    """Obeys the record after giving up, or after a swap that lost or whose reply was lost.

    Where it says `adopted`, nobody here has been told yet: adopting once more does that. Nothing is wiped
    while a path is open.
    """
    if event.outcome in ("committed", "adopted"):
        return Step(State.COMMITTED, facts, (p.AdoptRecord(block=_sealed(facts).block),))
    facts = (
        facts if facts.code else replace(facts, code="aborted", message=f"the record says {event.outcome}")
    )
    finish = p.Finish(code=facts.code, message=facts.message)
    return Step(State.ABORTED, facts, (p.AbortPath(), p.WipeMemory(), finish))


def over(facts: Facts, _event: object) -> Step:
    """The source is done, or gone: either way the session lives here."""
    return Step(State.RELEASED, facts, (p.CloseRecord(), p.Finish()))


def _sealed(facts: Facts) -> m.Sealed:
    require(facts.sealed is not None, "nothing has been sealed")
    assert facts.sealed is not None  # noqa: S101 - for the type checker
    return facts.sealed
