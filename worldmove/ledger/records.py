"""What the ledger holds, and how each step of a session's life makes its next record; pure.

A session is one record, and whoever changes anything about its ownership replaces the whole record by
compare-and-swap. The builders here (`begin`, `commit`, ...) make the new record out of the old one; who may
write which is in `rules`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from worldmove.errors import ProtocolError, ValidationError

Phase = Literal["owned", "moving", "committed", "adopted", "ended"]
Outcome = Literal["aborted", "reclaimed", "released"]
Fate = Literal["moving", "committed", "adopted", "aborted", "reclaimed", "released", "superseded"]

MAX_TEXT = 512
MAX_ENDPOINT = 4096
_IN_MOVE: frozenset[Phase] = frozenset({"moving", "committed", "adopted"})


class Claim(NamedTuple):
    """A node's name and the incarnation under which it writes."""

    name: str
    incarnation: int


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node as the ledger knows it.

    `incarnation` counts the starts of a node of this name and never falls. `beat` counts the renewals of its
    lease; observers compare it with what they saw before on their own monotonic clock (`lease.Liveness`).
    """

    name: str
    url: str
    boot_id: str
    incarnation: int = 0
    beat: int = 0
    resigned: bool = False

    @property
    def claim(self) -> Claim:
        """Under what this node writes."""
        return Claim(self.name, self.incarnation)


class MoveRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The move a session is in: between which incarnations of which nodes. `move_id` is never used twice."""

    move_id: str
    source: str
    source_incarnation: int
    destination: str
    destination_incarnation: int


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The one record of a session.

    Attributes:
        session_id: the session's name.
        epoch: fencing number; grows at every commit, reclaim and re-registration, never falls.
        owner: node that owns the session; the destination from `committed` on.
        incarnation: incarnation of the owner under which it holds the session.
        phase: where the session stands; see `rules.TRANSITIONS`.
        model: the model's name.
        block: last block that the ledger was told of; -1 before the first one.
        revision: revision of the manifest.
        endpoint: where the session's viewers are served.
        root: root of the last state that was committed, hex.
        move: the move in progress; set exactly in `moving`, `committed` and `adopted`.
        outcome: how the last finished move ended.
        last_move_id: which move that was; kept while the next one runs.
        bytes: of all regions; this and what follows is as the session was registered, for whoever asks
            another node than the owner. 0 where the record was made by a version that did not say.
        ranks: how many.
        block_ms: how long a block takes.
        horizon_ms: how long viewers can go without one.
    """

    session_id: str
    epoch: int
    owner: str
    incarnation: int
    model: str
    phase: Phase = "owned"
    block: int = -1
    revision: int = 1
    endpoint: str | None = None
    root: str | None = None
    move: MoveRef | None = None
    outcome: Outcome | None = None
    last_move_id: str | None = None
    bytes: int = 0
    ranks: int = 0
    block_ms: float = 0.0
    horizon_ms: float = 0.0

    @property
    def holder(self) -> Claim:
        """Owner and incarnation under which it holds the session."""
        return Claim(self.owner, self.incarnation)


def begin(record: SessionRecord, move: MoveRef) -> SessionRecord:
    """The source opens a move: `owned` to `moving`."""
    return replace(record, phase="moving", move=move)


def abort(record: SessionRecord, by: Claim) -> SessionRecord:
    """Source or destination gives the move up: `moving` to `owned` by the source, at the same epoch."""
    return _finished(_held(record, by), "aborted")


def forestall(record: SessionRecord, move_id: str) -> SessionRecord:
    """The owner gives up a move that the record has not heard of: should it begin late, it can't any more."""
    return replace(record, outcome="aborted", last_move_id=move_id)


def commit(record: SessionRecord, *, block: int, revision: int, root: str) -> SessionRecord:
    """The destination takes the verified state of `block` over: `moving` to `committed`, next epoch."""
    move = current_move(record)
    return replace(
        record,
        phase="committed",
        owner=move.destination,
        incarnation=move.destination_incarnation,
        epoch=record.epoch + 1,
        block=block,
        revision=revision,
        root=root,
    )


def adopt(record: SessionRecord, by: Claim, *, endpoint: str | None) -> SessionRecord:
    """The destination's worker may generate: `committed` to `adopted`. Viewers are served at `endpoint`."""
    return replace(record, phase="adopted", incarnation=by.incarnation, endpoint=endpoint)


def reclaim(record: SessionRecord, by: Claim) -> SessionRecord:
    """The source takes back what was not adopted: `committed` to `owned` by the source, next epoch."""
    back = replace(record, owner=by.name, incarnation=by.incarnation, epoch=record.epoch + 1)
    return _finished(back, "reclaimed")


def release(record: SessionRecord, by: Claim) -> SessionRecord:
    """Source or destination records that the source's memory is not needed any more: `adopted` to `owned`."""
    return _finished(_held(record, by), "released")


def retake(record: SessionRecord, by: Claim) -> SessionRecord:
    """A later incarnation of the owner takes its session up again after a restart; same phase and epoch."""
    return replace(record, incarnation=by.incarnation)


def update(record: SessionRecord, *, block: int, revision: int, endpoint: str | None) -> SessionRecord:
    """The owner records a newer block or revision, or another endpoint; same phase and epoch."""
    return replace(record, block=block, revision=revision, endpoint=endpoint)


def end(record: SessionRecord) -> SessionRecord:
    """The owner ends the session: `owned` to `ended`. The id may be registered again, at a later epoch."""
    return replace(record, phase="ended")


def resolve(record: SessionRecord, by: Claim, *, least_epoch: int) -> SessionRecord:
    """An operator decides that the world is what `by` holds: `owned` by it, beyond every epoch known of it.

    A move in progress is over; whoever else took part in it has lost.
    """
    mine = replace(
        record, owner=by.name, incarnation=by.incarnation, epoch=max(record.epoch, least_epoch) + 1
    )
    return replace(given_up(mine), phase="owned")


def write_off(record: SessionRecord, *, least_epoch: int = 1) -> SessionRecord:
    """An operator decides that nobody has the world any more: to `ended`, from whatever phase."""
    return replace(given_up(record), phase="ended", epoch=max(record.epoch, least_epoch))


def given_up(record: SessionRecord) -> SessionRecord:
    """The record without the move that it is in: aborted, or reclaimed if it was committed already."""
    if record.move is None:
        return record
    return _finished(record, "aborted" if record.phase == "moving" else "reclaimed")


def _finished(record: SessionRecord, outcome: Outcome) -> SessionRecord:
    return replace(
        record, phase="owned", move=None, outcome=outcome, last_move_id=current_move(record).move_id
    )


def _held(record: SessionRecord, by: Claim) -> SessionRecord:
    return replace(record, incarnation=by.incarnation) if by.name == record.owner else record


def current_move(record: SessionRecord) -> MoveRef:
    """The move that a record is in.

    Raises:
        ProtocolError: it is in none.
    """
    if record.move is None:
        raise ProtocolError(f"session {record.session_id} is in no move", history=[record.phase])
    return record.move


def fate(record: SessionRecord, move_id: str) -> Fate:
    """What became of a move, as far as the record says.

    `superseded`: the move is over and a later one has taken its place. It never became this caller's by then
    unless `record` names the caller as owner: only the destination itself can leave `committed` by `adopt`.
    """
    if record.move is not None and record.move.move_id == move_id:
        return "moving" if record.phase == "moving" else _past_commit(record.phase)
    if record.last_move_id == move_id and record.outcome is not None:
        return record.outcome
    return "superseded"


def _past_commit(phase: Phase) -> Fate:
    return "adopted" if phase == "adopted" else "committed"


def check_record(record: SessionRecord) -> None:
    """Checks a record in itself: sizes, ranges, and that phase, owner and move agree.

    Raises:
        ValidationError: `details["field"]` names the field.
    """
    for field in ("session_id", "owner", "model"):
        check_text(field, getattr(record, field))
    check_text("endpoint", record.endpoint, limit=MAX_ENDPOINT, optional=True)
    check_text("root", record.root, optional=True)
    check_text("last_move_id", record.last_move_id, optional=True)
    for field, least in (("epoch", 1), ("incarnation", 1), ("revision", 0), ("block", -1)):
        _need(least <= getattr(record, field) < 1 << 63, field, f"is out of range; at least {least}")
    _need((record.move is not None) == (record.phase in _IN_MOVE), "move", f"does not fit {record.phase}")
    _need(
        (record.outcome is None) == (record.last_move_id is None), "outcome", "and last_move_id go together"
    )
    if record.move is not None:
        _check_move(record, record.move)


def _check_move(record: SessionRecord, move: MoveRef) -> None:
    for field in ("move_id", "source", "destination"):
        check_text(field, getattr(move, field))
    for field in ("source_incarnation", "destination_incarnation"):
        _need(1 <= getattr(move, field) < 1 << 63, field, "is out of range; at least 1")
    if record.phase == "moving":
        source = Claim(move.source, move.source_incarnation)
        _need(record.holder == source, "move", "does not start at the session's owner")
    else:
        _need(record.owner == move.destination, "owner", "is not the move's destination")


def check_text(field: str, value: str | None, *, limit: int = MAX_TEXT, optional: bool = False) -> None:
    """Checks an identifier or address: not empty, encodable, of at most `limit` bytes of UTF-8.

    Raises:
        ValidationError: `details["field"]` is `field`.
    """
    if value is None:
        _need(optional, field, "is missing")
        return
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValidationError(f"{field} is not valid Unicode", field=field) from error
    _need(0 < size <= limit and "\0" not in value, field, f"must have 1 to {limit} bytes and no NUL")


def _need(holds: bool, field: str, what: str) -> None:
    if not holds:
        raise ValidationError(f"{field} {what}", field=field)
