"""The asynchronous face of `transactions`, for every store that can run a function in one transaction."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TypeVar

from worldmove.errors import NotFoundError, WorldMoveError
from worldmove.ledger import transactions
from worldmove.ledger.base import MAX_PAGE, Change
from worldmove.ledger.bell import Bell
from worldmove.ledger.records import Claim, NodeInfo, SessionRecord, check_text
from worldmove.ledger.transactions import Key, Tables, check_limit
from worldmove.views import Receipt

T = TypeVar("T")
_WATCH_PAGE = 256


class TransactionalLedger(ABC):
    """Implements `base.Ledger` on `_write` and `_read`; stores add those, `close`, and ring the bell."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._claimed: Claim | None = None

    @abstractmethod
    async def _write(self, change: Callable[[Tables], T]) -> T:
        """Runs `change` in one durable transaction, whatever becomes of the caller; then rings."""

    @abstractmethod
    async def _read(self, look: Callable[[Tables], T]) -> T:
        """Runs `look` in one transaction that sees a consistent state."""

    @abstractmethod
    def _listen(self) -> None:
        """The bell is needed from now on."""

    @abstractmethod
    async def close(self) -> None:
        """See `base.Ledger.close`."""

    @property
    def claimed(self) -> Claim | None:
        """See `base.Ledger.claimed`."""
        return self._claimed

    async def claim(self, node: NodeInfo) -> int:
        """See `base.Ledger.claim`."""
        claimed = await self._write(partial(transactions.claim_name, node=node))
        self._claimed = claimed
        return claimed.incarnation

    async def renew(self) -> None:
        """See `base.Ledger.renew`."""
        await self._write(partial(transactions.renew, claim=self._claimed))

    async def resign(self) -> None:
        """See `base.Ledger.resign`."""
        await self._write(partial(transactions.resign, claim=self._claimed))

    async def nodes(self) -> list[NodeInfo]:
        """See `base.Ledger.nodes`."""
        found = await self._read(lambda tables: tables.nodes())
        return [node for node in found if not node.resigned]

    async def create(self, record: SessionRecord) -> SessionRecord:
        """See `base.Ledger.create`."""
        return await self._write(partial(transactions.create, claim=self._claimed, record=record))

    async def get(self, session_id: str) -> SessionRecord | None:
        """See `base.Ledger.get`."""
        check_text("session_id", session_id)
        return await self._read(lambda tables: tables.session(session_id))

    async def swap(self, old: SessionRecord, new: SessionRecord) -> None:
        """See `base.Ledger.swap`."""
        await self._write(partial(transactions.swap, claim=self._claimed, old=old, new=new))

    async def swap_then(
        self,
        old: SessionRecord,
        new: SessionRecord,
        then: SessionRecord,
        *,
        provided: Callable[[], None] | None = None,
    ) -> WorldMoveError | None:
        """See `base.Ledger.swap_then`."""
        both = partial(
            transactions.swap_then, claim=self._claimed, old=old, new=new, then=then, provided=provided
        )
        return await self._write(both)

    async def resolve(self, old: SessionRecord | None, new: SessionRecord) -> None:
        """See `base.Ledger.resolve`."""
        await self._write(partial(transactions.resolve, claim=self._claimed, old=old, new=new))

    async def settle(
        self, session_id: str, move_id: str, before: SessionRecord | None = None
    ) -> SessionRecord:
        """See `base.Ledger.settle`."""
        return await self._write(
            partial(
                transactions.settle,
                claim=self._claimed,
                session_id=session_id,
                move_id=move_id,
                before=before,
            )
        )

    async def sessions(
        self, after: str | None = None, limit: int = MAX_PAGE, *, ended: bool = False
    ) -> list[SessionRecord]:
        """See `base.Ledger.sessions`."""
        check_limit(limit)
        check_text("after", after, optional=True)
        return await self._read(lambda tables: tables.sessions(after or "", limit, ended=ended))

    async def idempotent(self, key: str, body_hash: str, move_id: str) -> str | None:
        """See `base.Ledger.idempotent`."""
        wanted = Key(body_hash, move_id)
        return await self._write(
            partial(transactions.reserve_key, claim=self._claimed, key=key, wanted=wanted)
        )

    async def forget(self, key: str, move_id: str) -> None:
        """See `base.Ledger.forget`."""
        await self._write(partial(transactions.forget_key, claim=self._claimed, key=key, move_id=move_id))

    async def put_receipt(self, receipt: Receipt) -> None:
        """See `base.Ledger.put_receipt`."""
        await self._write(partial(transactions.put_receipt, claim=self._claimed, receipt=receipt))

    async def receipt(self, move_id: str) -> Receipt | None:
        """See `base.Ledger.receipt`."""
        check_text("move_id", move_id)
        return await self._read(lambda tables: tables.receipt(move_id))

    async def receipts(self, limit: int = 100, after: str | None = None) -> list[Receipt]:
        """See `base.Ledger.receipts`."""
        check_limit(limit)
        check_text("after", after, optional=True)

        def page(tables: Tables) -> list[Receipt]:
            if after is not None and tables.receipt(after) is None:
                raise NotFoundError(f"the ledger has no receipt of move {after}")
            return tables.receipts(limit, after)

        return await self._read(page)

    async def watch(self, after: int = 0) -> AsyncGenerator[Change, None]:
        """See `base.Ledger.watch`."""
        self._listen()
        while not self._bell.closed:
            rings = self._bell.rings  # taken before the look, so that nothing slips in between
            changes = await self._changes(after)
            for change in changes:
                after = change.seq
                yield change
            if len(changes) < _WATCH_PAGE:
                await self._bell.wait(rings)

    async def _changes(self, after: int) -> list[Change]:
        return await self._read(lambda tables: tables.changes(after, _WATCH_PAGE))

    async def position(self) -> int:
        """See `base.Ledger.position`."""
        return await self._read(lambda tables: tables.position())

    @abstractmethod
    async def warm(self, session_id: str) -> None:
        """See `base.Ledger.warm`."""

    async def ping(self) -> float:
        """See `base.Ledger.ping`."""
        begun = time.perf_counter()
        if self._claimed is None:
            await self.position()
        else:
            await self.renew()
        return (time.perf_counter() - begun) * 1e3
