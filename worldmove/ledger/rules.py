"""The only changes of a session's record that are allowed, and who may write them; pure.

`TRANSITIONS` lists every change that nodes make by themselves; `check_resolve` is for what operators decide.
`check_swap` accepts a pair of records only if the transition's builder would have made the new one of the old
one: so no step changes a field that it does not own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec.structs import asdict, replace

from worldmove.errors import ProtocolError
from worldmove.ledger.records import (
    Claim,
    Phase,
    SessionRecord,
    abort,
    adopt,
    begin,
    check_record,
    commit,
    current_move,
    end,
    forestall,
    reclaim,
    release,
    resolve,
    retake,
    update,
    write_off,
)

Writer = Literal["owner", "source", "destination"]


def _begun(old: SessionRecord, new: SessionRecord, _: Claim) -> SessionRecord:
    move = current_move(new)
    if move.move_id == old.last_move_id:
        raise ProtocolError(f"move id {move.move_id} was used before", history=[old.phase, new.phase])
    return begin(old, move)


def _forestalled(old: SessionRecord, new: SessionRecord, _: Claim) -> SessionRecord:
    if new.last_move_id is None:
        raise ProtocolError("no move is named that is given up", history=[old.phase, new.phase])
    return forestall(old, new.last_move_id)


def _committed(old: SessionRecord, new: SessionRecord, _: Claim) -> SessionRecord:
    if new.root is None:
        raise ProtocolError("a commit needs the verified root", history=[old.phase, new.phase])
    return commit(old, block=new.block, revision=new.revision, root=new.root)


class Transition(NamedTuple):
    """One allowed change of a record.

    Attributes:
        name: the builder's name.
        before: phase of the record that is replaced.
        after: phase of the record that replaces it.
        writers: who may write it, as a role in the record or in its move.
        exact: the writer's incarnation must be the very one in the record or move; otherwise a later
            incarnation of the same node may write it as well, once it has claimed the name.
        build: makes the only acceptable new record out of old record, proposed record and writer.
    """

    name: str
    before: Phase
    after: Phase
    writers: frozenset[Writer]
    exact: bool
    build: Callable[[SessionRecord, SessionRecord, Claim], SessionRecord]


def _updated(old: SessionRecord, new: SessionRecord, _: Claim) -> SessionRecord:
    return update(old, block=new.block, revision=new.revision, endpoint=new.endpoint)


def _retaken(old: SessionRecord, _: SessionRecord, by: Claim) -> SessionRecord:
    return retake(old, by)


_OWNER: frozenset[Writer] = frozenset({"owner"})
_SOURCE: frozenset[Writer] = frozenset({"source"})
_DESTINATION: frozenset[Writer] = frozenset({"destination"})
_EITHER = _SOURCE | _DESTINATION

TRANSITIONS: tuple[Transition, ...] = (
    Transition("begin", "owned", "moving", _OWNER, True, _begun),
    Transition("forestall", "owned", "owned", _OWNER, True, _forestalled),
    Transition("abort", "moving", "owned", _EITHER, False, lambda old, _new, by: abort(old, by)),
    Transition("commit", "moving", "committed", _DESTINATION, True, _committed),
    Transition(
        "adopt",
        "committed",
        "adopted",
        _DESTINATION,
        False,
        lambda old, new, by: adopt(old, by, endpoint=new.endpoint),
    ),
    Transition("reclaim", "committed", "owned", _SOURCE, False, lambda old, _new, by: reclaim(old, by)),
    Transition("release", "adopted", "owned", _EITHER, False, lambda old, _new, by: release(old, by)),
    Transition("retake", "owned", "owned", _OWNER, False, _retaken),
    Transition("retake", "adopted", "adopted", _OWNER, False, _retaken),
    Transition("update", "owned", "owned", _OWNER, True, _updated),
    Transition("update", "adopted", "adopted", _OWNER, True, _updated),
    Transition("end", "owned", "ended", _OWNER, True, lambda old, _new, _by: end(old)),
)


def check_swap(old: SessionRecord, new: SessionRecord, by: Claim) -> Transition:
    """The transition that leads from `old` to `new`, if `by` may write it.

    Raises:
        ProtocolError: there is none, another node has to write it, or a field changes that it does not own
            (`details["fields"]`). Nothing may be written then.
        ValidationError: `new` is malformed in itself.
    """
    transition = _find(old, new)
    history = [old.phase, new.phase]
    if not any(_is(old, new, role, by, exact=transition.exact) for role in transition.writers):
        raise ProtocolError(
            f"incarnation {by.incarnation} of {by.name} may not {transition.name} {old.session_id}",
            history=history,
        )
    expected = transition.build(old, new, by)
    if expected != new or new.block < old.block or new.revision < old.revision:
        wrong = sorted(field for field, value in asdict(expected).items() if value != getattr(new, field))
        wrong += [field for field in ("block", "revision") if getattr(new, field) < getattr(old, field)]
        raise ProtocolError(
            f"{transition.name} of {old.session_id} may not set {', '.join(wrong)} so",
            history=history,
            fields=wrong,
        )
    check_record(new)
    return transition


def check_resolve(old: SessionRecord | None, new: SessionRecord, by: Claim) -> None:
    """Checks an operator's decision, the one change that asks for no role: `resolve` or `write_off`.

    It is for records that no ordinary step can settle any more: the ledger was lost or restored from a copy
    that is older than the worlds, or a node is gone for good. `old` is `None` where the ledger knows nothing.

    Raises:
        ProtocolError: it is neither; nothing may be written.
        ValidationError: `new` is malformed in itself.
    """
    check_record(new)
    history = [old.phase if old is not None else "none", new.phase]
    if old is not None and old.phase == "ended":
        raise ProtocolError(f"session {old.session_id} has ended: nothing to resolve", history=history)
    base = old if old is not None else replace(new, epoch=1)
    if new.phase == "owned":
        expected = replace(resolve(base, by, least_epoch=1), epoch=max(new.epoch, base.epoch + 1))
    else:
        expected = write_off(base, least_epoch=new.epoch)
    if new != expected:
        raise ProtocolError(f"this is no way to resolve session {new.session_id}", history=history)


def _find(old: SessionRecord, new: SessionRecord) -> Transition:
    for transition in TRANSITIONS:
        if (transition.before, transition.after) != (old.phase, new.phase):
            continue
        if transition.name == "forestall" and new.last_move_id == old.last_move_id:
            continue  # the only one of its phases that gives up a move
        if transition.name == "retake" and new.incarnation == old.incarnation:
            continue  # same phases as `update`, which is the one that keeps the incarnation
        return transition
    raise ProtocolError(
        f"no step leads session {old.session_id} from {old.phase} to {new.phase}",
        history=[old.phase, new.phase],
    )


def _is(old: SessionRecord, new: SessionRecord, role: Writer, by: Claim, *, exact: bool) -> bool:
    move = old.move or new.move
    if role == "owner":
        holder = old.holder
    elif move is None:
        return False
    elif role == "source":
        holder = Claim(move.source, move.source_incarnation)
    else:
        holder = Claim(move.destination, move.destination_incarnation)
    return by == holder or (not exact and by.name == holder.name and by.incarnation > holder.incarnation)
