"""What each ledger call reads, checks and writes, over any store's open transaction; synchronous and pure.

A function here runs inside one transaction: it checks everything first and writes last, so a raised error
leaves nothing behind even where the store cannot roll back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from worldmove.errors import (
    FencedError,
    IdempotencyMismatchError,
    LostRaceError,
    NotFoundError,
    SessionExistsError,
    ValidationError,
    WorldMoveError,
)
from worldmove.ledger.base import MAX_PAGE, Change
from worldmove.ledger.records import (
    MAX_ENDPOINT,
    Claim,
    NodeInfo,
    SessionRecord,
    abort,
    check_record,
    check_text,
    forestall,
)
from worldmove.ledger.rules import check_resolve, check_swap
from worldmove.views import ENDED_STATES, Receipt

MAX_KEYS = 10_000
"""Idempotency keys that are remembered; the oldest make room."""
MAX_RECEIPT = 1 << 20
"""Bytes of one receipt as JSON."""


class Key(NamedTuple):
    """An idempotency key's reservation."""

    body_hash: str
    move_id: str


class Tables(Protocol):
    """A store inside one open transaction. Writes are seen by later reads of the same transaction."""

    def position(self) -> int:
        """Sequence number of the latest change."""

    def changes(self, after: int, limit: int) -> list[Change]:
        """Sessions and nodes written later than `after`, by sequence number."""

    def node(self, name: str) -> NodeInfo | None:
        """One node."""

    def nodes(self) -> list[NodeInfo]:
        """All nodes by name, resigned ones too."""

    def put_node(self, node: NodeInfo, *, tell: bool) -> None:
        """Writes a node; if not `tell`, one that stands already, and it is no change to watchers."""

    def session(self, session_id: str) -> SessionRecord | None:
        """One session."""

    def sessions(self, after: str, limit: int, *, ended: bool) -> list[SessionRecord]:
        """Sessions by id behind `after`, in code point order."""

    def put_session(self, record: SessionRecord) -> None:
        """Writes a session."""

    def key(self, key: str) -> Key | None:
        """One idempotency key."""

    def put_key(self, key: str, value: Key, keep: int) -> None:
        """Adds a key and drops the oldest beyond `keep`."""

    def drop_key(self, key: str) -> None:
        """Removes a key."""

    def receipt(self, move_id: str) -> Receipt | None:
        """One receipt."""

    def receipts(self, limit: int, after: str | None) -> list[Receipt]:
        """Receipts, newest first, behind the one of `after`, which exists."""

    def put_receipt(self, receipt: Receipt) -> None:
        """Writes a receipt; a later one of the same move keeps the first one's place."""


def check_claim(tables: Tables, claim: Claim | None) -> NodeInfo:
    """The writer's own entry, if its claim still is the latest.

    Raises:
        FencedError: nothing was claimed, the node resigned, or a later incarnation has claimed the name.
    """
    if claim is None:
        raise FencedError("this node has claimed no name in the ledger")
    node = tables.node(claim.name)
    if node is None or node.resigned or node.incarnation != claim.incarnation:
        latest = None if node is None else node.incarnation
        raise FencedError(
            f"incarnation {claim.incarnation} of node {claim.name} is no longer the claimed one",
            incarnation=claim.incarnation,
            claimed=latest,
        )
    return node


def claim_name(tables: Tables, node: NodeInfo) -> Claim:
    """Writes the next incarnation of a node's name."""
    check_text("name", node.name)
    check_text("url", node.url, limit=MAX_ENDPOINT)
    check_text("boot_id", node.boot_id)
    last = tables.node(node.name)
    claimed = replace(node, incarnation=(last.incarnation if last else 0) + 1, beat=0, resigned=False)
    tables.put_node(claimed, tell=True)
    return claimed.claim


def renew(tables: Tables, claim: Claim | None) -> None:
    """Adds one to the writer's beat."""
    node = check_claim(tables, claim)
    tables.put_node(replace(node, beat=node.beat + 1), tell=False)


def resign(tables: Tables, claim: Claim | None) -> None:
    """Marks the writer as gone; its incarnation is remembered."""
    node = check_claim(tables, claim)
    tables.put_node(replace(node, resigned=True), tell=True)


def create(tables: Tables, claim: Claim | None, record: SessionRecord) -> SessionRecord:
    """Registers a session; see `Ledger.create`."""
    writer = check_claim(tables, claim)
    check_record(record)
    if record.phase != "owned" or record.outcome is not None or record.root is not None:
        raise ValidationError("a new session is owned, without root and outcome", field="phase")
    if record.holder != writer.claim:
        raise ValidationError("a new session belongs to the node that registers it", field="owner")
    last = tables.session(record.session_id)
    if last is not None and last.phase != "ended":
        raise SessionExistsError(f"session {record.session_id} exists at {last.owner}", owner=last.owner)
    if last is not None:
        record = replace(record, epoch=max(record.epoch, last.epoch + 1))
    tables.put_session(record)
    return record


def swap(tables: Tables, claim: Claim | None, old: SessionRecord, new: SessionRecord) -> None:
    """Compare-and-swap on a whole record; see `Ledger.swap`."""
    check_swap(old, new, check_claim(tables, claim).claim)
    stands = tables.session(old.session_id)
    if stands != new:
        _need_standing(stands, old, old.session_id)
        tables.put_session(new)


def swap_then(
    tables: Tables,
    claim: Claim | None,
    old: SessionRecord,
    new: SessionRecord,
    then: SessionRecord,
    *,
    provided: Callable[[], None] | None = None,
) -> WorldMoveError | None:
    """Two swaps, of which the second may be refused alone; see `Ledger.swap_then`.

    Only the last record is written: nobody can see the one between, and each write costs statements.
    """
    writer = check_claim(tables, claim).claim
    check_swap(old, new, writer)
    stands = tables.session(old.session_id)
    if stands == then and then not in (old, new):
        return None
    if stands != new:
        _need_standing(stands, old, old.session_id)
    refused = _refusal(new, then, writer, provided)
    last = then if refused is None else new
    if stands != last:
        tables.put_session(last)
    return refused


def _refusal(
    old: SessionRecord, new: SessionRecord, writer: Claim, provided: Callable[[], None] | None
) -> WorldMoveError | None:
    try:
        if provided is not None:
            provided()
        check_swap(old, new, writer)
    except WorldMoveError as error:
        return error
    return None


def _need_standing(stands: SessionRecord | None, old: SessionRecord | None, session_id: str) -> None:
    if stands != old:
        phase = "nothing" if stands is None else f"{stands.phase} at epoch {stands.epoch}"
        raise LostRaceError(f"session {session_id} is {phase} by now", record=stands)


def settle(
    tables: Tables,
    claim: Claim | None,
    session_id: str,
    move_id: str,
    before: SessionRecord | None = None,
) -> SessionRecord:
    """Writes `aborted` unless the move is over or past its commit; see `Ledger.settle`."""
    writer = check_claim(tables, claim).claim
    check_text("session_id", session_id)
    stands = tables.session(session_id)
    if stands is None:
        raise NotFoundError(f"the ledger has no session {session_id}")
    if stands.phase == "moving" and stands.move is not None and stands.move.move_id == move_id:
        aborted = abort(stands, writer)
    elif stands == before:
        aborted = forestall(stands, move_id)
    else:
        return stands
    check_swap(stands, aborted, writer)
    tables.put_session(aborted)
    return aborted


def resolve(tables: Tables, claim: Claim | None, old: SessionRecord | None, new: SessionRecord) -> None:
    """An operator's decision, by compare-and-swap as well; see `Ledger.resolve`."""
    check_resolve(old, new, check_claim(tables, claim).claim)
    stands = tables.session(new.session_id)
    if stands != new:
        _need_standing(stands, old, new.session_id)
        tables.put_session(new)


def reserve_key(tables: Tables, claim: Claim | None, key: str, wanted: Key) -> str | None:
    """Reserves an idempotency key; see `Ledger.idempotent`."""
    check_claim(tables, claim)
    check_text("idempotency_key", key)
    check_text("body_hash", wanted.body_hash)
    check_text("move_id", wanted.move_id)
    taken = tables.key(key)
    if taken is None:
        tables.put_key(key, wanted, MAX_KEYS)
        return None
    if taken.body_hash != wanted.body_hash:
        raise IdempotencyMismatchError("the idempotency key was used with another request body")
    return taken.move_id


def forget_key(tables: Tables, claim: Claim | None, key: str, move_id: str) -> None:
    """Frees an idempotency key if it stands for `move_id`."""
    check_claim(tables, claim)
    check_text("idempotency_key", key)
    taken = tables.key(key)
    if taken is not None and taken.move_id == move_id:
        tables.drop_key(key)


def put_receipt(tables: Tables, claim: Claim | None, receipt: Receipt) -> None:
    """Keeps a receipt unless one in an ended state stands already."""
    check_claim(tables, claim)
    check_text("migration_id", receipt.migration_id)
    if len(msgspec.json.encode(receipt)) > MAX_RECEIPT:
        raise ValidationError(f"a receipt has at most {MAX_RECEIPT} bytes", field="receipt")
    stands = tables.receipt(receipt.migration_id)
    if stands is None or stands.state not in ENDED_STATES:
        tables.put_receipt(receipt)


def check_limit(limit: int) -> int:
    """`limit`, if a page may have that many entries.

    Raises:
        ValidationError: it is not within 1 and `MAX_PAGE`.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise ValidationError(f"limit must be within 1 and {MAX_PAGE}, not {limit}", field="limit")
    return limit
