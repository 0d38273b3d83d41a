"""A ledger in memory, for tests of what stands on it: the same rules and transactions, no durability."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from worldmove.errors import LedgerError
from worldmove.ledger.base import Change
from worldmove.ledger.bell import Bell
from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.ledger.transactional import TransactionalLedger
from worldmove.ledger.transactions import Key, Tables
from worldmove.views import Receipt

T = TypeVar("T")


class MemoryStore:
    """What the ledgers of several nodes share; also `transactions.Tables`, as everything is atomic here."""

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        self._seq = 0
        self._nodes: dict[str, tuple[int, NodeInfo]] = {}
        self._sessions: dict[str, tuple[int, SessionRecord]] = {}
        self._keys: dict[str, Key] = {}
        self._receipts: dict[str, Receipt] = {}

    def _next(self) -> int:
        self._seq += 1
        for bell in self.bells:
            bell.ring()
        return self._seq

    def position(self) -> int:
        """Sequence number of the latest change."""
        return self._seq

    def node(self, name: str) -> NodeInfo | None:
        """One node."""
        return self._nodes[name][1] if name in self._nodes else None

    def nodes(self) -> list[NodeInfo]:
        """All nodes by name."""
        return [self._nodes[name][1] for name in sorted(self._nodes)]

    def put_node(self, node: NodeInfo, *, tell: bool) -> None:
        """Writes a node; an untold write needs one that stands."""
        seq = self._next() if tell else self._nodes[node.name][0]
        self._nodes[node.name] = (seq, node)

    def session(self, session_id: str) -> SessionRecord | None:
        """One session."""
        return self._sessions[session_id][1] if session_id in self._sessions else None

    def sessions(self, after: str, limit: int, *, ended: bool) -> list[SessionRecord]:
        """Sessions by id behind `after`."""
        found = [self._sessions[name][1] for name in sorted(self._sessions) if name > after]
        return [record for record in found if ended or record.phase != "ended"][:limit]

    def put_session(self, record: SessionRecord) -> None:
        """Writes a session."""
        self._sessions[record.session_id] = (self._next(), record)

    def changes(self, after: int, limit: int) -> list[Change]:
        """Sessions and nodes written later than `after`, by sequence number."""
        found = [Change(seq=seq, session=record) for seq, record in self._sessions.values() if seq > after]
        found += [Change(seq=seq, node=node) for seq, node in self._nodes.values() if seq > after]
        return sorted(found, key=lambda change: change.seq)[:limit]

    def key(self, key: str) -> Key | None:
        """One idempotency key."""
        return self._keys.get(key)

    def put_key(self, key: str, value: Key, keep: int) -> None:
        """Adds a key and drops the oldest beyond `keep`."""
        self._keys[key] = value
        while len(self._keys) > keep:
            del self._keys[next(iter(self._keys))]

    def drop_key(self, key: str) -> None:
        """Removes a key."""
        self._keys.pop(key, None)

    def receipt(self, move_id: str) -> Receipt | None:
        """One receipt."""
        return self._receipts.get(move_id)

    def receipts(self, limit: int, after: str | None) -> list[Receipt]:
        """Receipts, newest first, behind the one of `after`."""
        names = list(reversed(self._receipts))
        start = 0 if after is None else names.index(after) + 1
        return [self._receipts[name] for name in names[start : start + limit]]

    def put_receipt(self, receipt: Receipt) -> None:
        """Writes a receipt; a later one of the same move keeps the first one's place."""
        self._receipts[receipt.migration_id] = receipt


class MemoryLedger(TransactionalLedger):
    """`base.Ledger` of one node on a store that others of the same process share."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store
        store.bells.append(self._bell)

    async def _write(self, change: Callable[[Tables], T]) -> T:
        return await self._read(change)

    async def _read(self, look: Callable[[Tables], T]) -> T:
        if self._bell.closed:
            raise LedgerError("the ledger is closed", cause="closed")
        return look(self._store)

    def _listen(self) -> None:
        """Nothing to do: the store rings."""

    async def warm(self, session_id: str) -> None:
        """See `base.Ledger.warm`: all is at hand."""

    async def close(self) -> None:
        """See `base.Ledger.close`."""
        if not self._bell.closed:
            self._bell.close()
            self._store.bells.remove(self._bell)
