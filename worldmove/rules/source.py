"""The source's answers: it leads, pauses its world, and obeys the record."""

from __future__ import annotations

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.protocol import Action, State
from worldmove.rounds import Taken
from worldmove.rules.common import Facts, Step, give_up, note_reason, replace, require


def _begin_round(facts: Facts, *, final: bool, table: bool) -> tuple[Facts, tuple[Action, ...]]:
    number = facts.round + 1
    opened: tuple[Action, ...] = (p.Send(message=m.Round(number=number, final=final, table=table)),)
    if table:
        opened += (p.ReadTable(number=number, final=final),)
    else:
        opened += (p.Send(message=m.TableEnd(number=number)),)
    return replace(facts, round=number, round_open=True, table_expected=table), opened


def start(facts: Facts, event: p.Start) -> Step:
    """Says hello."""
    require(not facts.asked, "started twice")
    facts = replace(facts, asked=True, live=event.hello.live, epoch=event.hello.epoch)
    return Step(State.REQUESTED, facts, (p.Send(message=event.hello),))


def admitted(facts: Facts, event: m.Admitted) -> Step:
    """The destination takes the session: the record must say `moving` before anything else."""
    require(facts.asked, "an admission that nobody asked for")
    return Step(State.ADMITTED, replace(facts, path=event.path, lanes=event.lanes), (p.BeginRecord(),))


def recorded(facts: Facts, _event: p.RecordBegun) -> Step:
    """The ledger has answered during this move: open the way to the bytes."""
    require(not facts.recorded, "the record began twice")
    offer = p.OfferPath(path=facts.path, lanes=facts.lanes)
    return Step(State.ADMITTED, replace(facts, recorded=True), (offer,))


def rejected(facts: Facts, event: m.Rejected) -> Step:
    """Nothing has changed on either side."""
    require(facts.asked, "a rejection that nobody asked for")
    facts = replace(facts, code=event.code, message=event.message)
    return Step(State.REJECTED, facts, (p.Finish(code=event.code, message=event.message),))


def offer(facts: Facts, event: p.PathOffered) -> Step:
    """Tells where lanes listen or descriptors wait."""
    require(facts.recorded and not facts.offered, "a path that was not asked for")
    return Step(State.ADMITTED, replace(facts, offered=True), (p.Send(message=event.begin),))


def prepared(facts: Facts, event: m.Prepared) -> Step:
    """The driver notes the time before the first byte moves; without a record there is no way there."""
    require(facts.offered, "prepared before a path was offered")
    path = event.path or facts.path
    # Lanes beside another path were offered in case that fails.
    offered = {facts.path} | ({"staged"} if facts.lanes else set())
    require(path in offered, f"path {path!r} was not offered")
    return Step(State.PREPARED, replace(facts, path=path), (p.NotePrepared(),))


def go(facts: Facts, event: p.PreparedHere) -> Step:
    """A live move copies first; the others pause at once."""
    if not facts.live:
        return Step(State.PAUSING, facts, (p.PauseWorld(),))
    facts, actions = _begin_round(replace(facts, blocks=(event.block,)), final=False, table=False)
    return Step(State.COPYING, facts, actions)


def table_live(facts: Facts, event: p.TableDone) -> Step:
    """A live round's table is complete."""
    return Step(State.COPYING, _table_sent(facts, event), (p.Send(message=m.TableEnd(number=event.number)),))


def landed(facts: Facts, event: m.Landed) -> Step:
    """What comes next depends on how many blocks have gone by."""
    require(event.number == facts.round and facts.round_open, f"round {event.number} is not open")
    require(not facts.table_expected, f"round {event.number} landed before its table was sent")
    blocks = facts.blocks[-1] - facts.blocks[-2] if len(facts.blocks) > 1 else 0
    taken = Taken(
        leaves=event.leaves,
        bytes=event.bytes,
        ms=event.ms,
        copied_bytes=event.copied_bytes,
        wire_ms=event.wire_ms,
        blocks=max(blocks, 0),
    )
    facts = replace(facts, rounds=(*facts.rounds, taken), round_open=False)
    return Step(State.COPYING, facts, (p.NoteLanded(),))


def decide(facts: Facts, event: p.LandedHere) -> Step:
    """One more live round, or the pause, or the end of a move that would not fit, as the policy says."""
    require(len(facts.rounds) == facts.round and not facts.round_open, "no round has landed")
    since = max(event.block - facts.blocks[-1], 0) if facts.blocks else 0
    if facts.policy.another(facts.rounds, since):
        facts, actions = _begin_round(facts, final=False, table=True)
        return Step(State.COPYING, facts, actions)
    hopeless = facts.policy.hopeless(facts.rounds, since)
    if hopeless is not None:
        return give_up(facts, p.Failed(code="not-converging", message=str(hopeless)))
    return Step(State.PAUSING, facts, (p.PauseWorld(),))


def paused(facts: Facts, _event: p.WorldPaused) -> Step:
    """The world stands still: the last round, with its table."""
    facts, actions = _begin_round(facts, final=True, table=True)
    return Step(State.FINISHING, facts, actions)


def table_final(facts: Facts, event: p.TableDone) -> Step:
    """The paused world's table is complete: its root can be computed."""
    end = p.Send(message=m.TableEnd(number=event.number))
    return Step(State.FINISHING, _table_sent(facts, event), (end, p.SealWorld()))


def _table_sent(facts: Facts, event: p.TableDone) -> Facts:
    require(event.number == facts.round, f"round {event.number} is not the open round {facts.round}")
    require(facts.table_expected, f"round {event.number} has sent its table")
    return replace(facts, table_expected=False, blocks=(*facts.blocks, event.block))


def sealed(facts: Facts, event: p.WorldSealed) -> Step:
    """The destination gets what it must arrive at."""
    require(not facts.table_expected, "sealed before the table ended")
    return Step(State.VERIFYING, replace(facts, sealed=event.sealed), (p.Send(message=event.sealed),))


def verified(facts: Facts, event: m.Verified) -> Step:
    """The destination holds the same root; a claim of another one is a contradiction."""
    sealed = facts.sealed
    require(not facts.complete, "verified twice")
    require(sealed is not None and event.root == sealed.root, "the destination verified another root")
    taken = Taken(leaves=event.leaves, bytes=event.bytes, ms=event.ms, copied_bytes=event.copied_bytes)
    facts = replace(facts, rounds=(*facts.rounds, taken), round_open=False, complete=True)
    return Step(State.VERIFYING, facts)


def committed(facts: Facts, event: m.Committed) -> Step:
    """From here on only the destination, or a reclaim, decides."""
    require(facts.complete, "a commit without a verification")
    _require_next(facts, event.epoch)
    return Step(State.COMMITTED, facts)


def adopted(facts: Facts, event: m.Adopted) -> Step:
    """The peer says that it generates: the record must say so too before anything is given up here."""
    _require_next(facts, event.epoch)
    return Step(State.RECLAIMING, facts, (p.AwaitAdoption(),))


def adopted_late(facts: Facts, event: m.Adopted) -> Step:
    """The record is being asked already."""
    _require_next(facts, event.epoch)
    return Step(State.RECLAIMING, facts)


def _require_next(facts: Facts, epoch: int) -> None:
    require(epoch == facts.epoch + 1, f"epoch {epoch} does not follow epoch {facts.epoch}")


def released(facts: Facts, _event: p.WorldReleased) -> Step:
    """The end of a move that went well."""
    return Step(State.RELEASED, facts, (p.Send(message=m.Released()), p.Finish()))


def doubts(facts: Facts, event: p.Failed | p.PeerLost | m.Abort) -> Step:
    """Committed, but the peer is silent: it gets its time to adopt, then the world is reclaimed."""
    return Step(State.RECLAIMING, note_reason(facts, event), (p.AwaitAdoption(),))


def settled(facts: Facts, event: p.RecordSettled) -> Step:
    """Obeys the record after giving up."""
    if event.outcome == "committed":
        return Step(State.RECLAIMING, facts, (p.AwaitAdoption(),))
    if event.outcome == "adopted":
        return Step(State.ADOPTED, facts, (p.ReleaseWorld(),))
    if facts.code is None:
        facts = replace(facts, code="reclaimed", message="the destination did not adopt in time")
    return Step(State.ABORTED, facts, (p.ResumeWorld(), p.Finish(code=facts.code, message=facts.message)))


def reclaimed(facts: Facts, event: p.RecordSettled) -> Step:
    """Obeys the record after waiting for an adoption."""
    require(event.outcome in ("reclaimed", "adopted"), f"{event.outcome} does not answer a reclaim")
    return settled(facts, event)
