"""The ledger's interface, as drivers and tests see it.

It is made to fit any store with transactions over single keys: a session, a node, an idempotency key and a
receipt are one key each; every call reads and writes a few keys in one transaction.

Outcomes: a call that returns has been written durably; one that raises `LostRaceError`, `FencedError`,
`ProtocolError` or `ValidationError` has written nothing. After any other `LedgerError`, or when the caller
was cancelled, the outcome is *unknown*: the write may have happened, or may still happen. For a move it is
settled by `settle`, never by reading alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from worldmove.errors import WorldMoveError
from worldmove.ledger.records import Claim, NodeInfo, SessionRecord
from worldmove.views import Receipt

MAX_PAGE = 1001
"""Entries; one more than a client gets at once, so that whoever asks for them knows whether more follow."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A session or a node that was written: exactly one of the two is set. `seq` grows with every change."""

    seq: int
    session: SessionRecord | None = None
    node: NodeInfo | None = None


class Ledger(Protocol):
    """The durable record of who owns which session at which epoch; one instance writes for one node.

    Every call may raise LedgerError (see the module's text for what is known then). Every writing call
    checks in its own transaction that this instance's claim still is the node's latest, and raises
    FencedError otherwise, also before `claim` and after `resign`.
    """

    @property
    def claimed(self) -> Claim | None:
        """Name and incarnation under which this instance writes; `None` before `claim`."""

    async def claim(self, node: NodeInfo) -> int:
        """Claims the next incarnation of `node.name` and returns it; earlier ones are fenced from now on.

        `node.incarnation`, `node.beat` and `node.resigned` are ignored.
        """

    async def renew(self) -> None:
        """Renews the node's lease: adds one to its beat. Watchers are not told."""

    async def resign(self) -> None:
        """Gives the name back at a clean end: observers see it gone at once, this instance writes no more."""

    async def nodes(self) -> list[NodeInfo]:
        """All nodes that have claimed and not resigned, by name, dead or alive."""

    async def create(self, record: SessionRecord) -> SessionRecord:
        """Registers a session that this node owns and returns the record as it stands.

        An ended id starts again one epoch later; the epoch in `record` is the least that it gets.

        Raises:
            SessionExistsError: the id is in use; `details["owner"]` says where.
        """

    async def get(self, session_id: str) -> SessionRecord | None:
        """The session's record, ended ones too; `None` if the id was never registered."""

    async def swap(self, old: SessionRecord, new: SessionRecord) -> None:
        """Replaces `old` by `new` if the ledger holds exactly `old`.

        If it already holds `new`, the call returns as if it had just written it: the repetition of a call
        whose reply was lost gives the same answer.

        Args:
            old: what has to stand.
            new: what stands then.

        Raises:
            LostRaceError: it holds another record; `details["record"]` is that one, or `None`.
            ProtocolError: no transition of `rules.TRANSITIONS` leads from `old` to `new` for this node.
        """

    async def swap_then(
        self,
        old: SessionRecord,
        new: SessionRecord,
        then: SessionRecord,
        *,
        provided: Callable[[], None] | None = None,
    ) -> WorldMoveError | None:
        """Replaces `old` by `new`, and that by `then`: two swaps in one transaction with one durable write.

        Both are checked as `swap` checks them, in this order. Where the first is refused, nothing is written;
        where only the second is, the first one stands. Readers and watchers see what came of both: `old`,
        `then`, or `new` where the second was refused. It is one change.

        If the ledger already holds `then`, the call returns as if it had just written it; if it holds `new`,
        only the second is left to do. So the repetition of a call whose reply was lost takes no step back.

        Args:
            old: what has to stand.
            new: what is written for certain.
            then: what takes its place at once.
            provided: called in the write's own transaction, in whatever thread that runs, before the second
                is checked; a `WorldMoveError` that it raises refuses the second. Any other error is raised
                here, and nothing is written.

        Returns:
            What refused the second; `None` where `then` stands.

        Raises:
            LostRaceError: another record stands; as `swap`.
            ProtocolError: as `swap`, of the first.
        """

    async def resolve(self, old: SessionRecord | None, new: SessionRecord) -> None:
        """Replaces `old` as an operator has decided, whatever role this node has in it.

        Args:
            old: the record that stands; `None` where the ledger knows nothing of the session.
            new: made by `records.resolve` or `records.write_off`; `rules.check_resolve` checks it.

        Raises:
            LostRaceError: another record stands.
            ProtocolError: `new` is neither.
        """

    async def settle(
        self, session_id: str, move_id: str, before: SessionRecord | None = None
    ) -> SessionRecord:
        """Settles a move whose outcome is unknown, and returns the record that stands.

        If the record is still `moving` with this move, `aborted` is written; so no commit that is under way
        can land any more. `records.fate` reads the answer.

        Args:
            session_id: of the session.
            move_id: of the move.
            before: from a source whose write of the move's beginning may itself be under way: the record
                that it was to replace. If that still stands, `aborted` is written into it.

        Raises:
            NotFoundError: the session was never registered.
        """

    async def sessions(
        self, after: str | None = None, limit: int = MAX_PAGE, *, ended: bool = False
    ) -> list[SessionRecord]:
        """Up to `limit` sessions by id (code point order), starting behind `after`; ended ones on request."""

    async def idempotent(self, key: str, body_hash: str, move_id: str) -> str | None:
        """Reserves an idempotency key for `move_id`; returns the earlier move's id if it is taken already.

        Keys are shared by all nodes. The latest `transactions.MAX_KEYS` are remembered.

        Raises:
            IdempotencyMismatchError: the key was used with another body.
        """

    async def forget(self, key: str, move_id: str) -> None:
        """Frees a key again (a rejected request is not kept), if it still stands for `move_id`."""

    async def put_receipt(self, receipt: Receipt) -> None:
        """Keeps a move's receipt. The first one in an ended state stays for good."""

    async def receipt(self, move_id: str) -> Receipt | None:
        """The receipt of one move."""

    async def receipts(self, limit: int = 100, after: str | None = None) -> list[Receipt]:
        """Up to `limit` receipts, newest first, starting behind the one of move `after`.

        Raises:
            NotFoundError: there is no receipt of move `after`.
        """

    def watch(self, after: int = 0) -> AsyncGenerator[Change, None]:
        """Changes of sessions and nodes by any node, in the order of `seq`, from those later than `after`.

        With 0 everything that stands comes first. Each key's last state is certain to arrive; steps between
        may be passed over. Ends when the ledger is closed; raises LedgerError when it fails, and may then
        be called again with the last `seq` seen.
        """

    async def position(self) -> int:
        """`seq` of the latest change; a watch that starts from it tells only of what comes later."""

    async def warm(self, session_id: str) -> None:
        """Gets ready for a swap of this session that comes soon; changes nothing, and does not fail."""

    async def ping(self) -> float:
        """Milliseconds of a durable write, which renews the lease too; before `claim`, of a read."""

    async def close(self) -> None:
        """Waits for calls under way, ends watches, frees files and threads. Does not resign."""
