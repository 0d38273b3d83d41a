"""A ledger to which faults happen: replies get lost, calls come late, or twice, or not at all."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from worldmove.errors import LedgerError, WorldMoveError
from worldmove.faults.points import Fault
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import SessionRecord
from worldmove.tasks import Tasks
from worldmove.views import Receipt

T = TypeVar("T")


class FaultyLedger:
    """Passes every call on; the calls about one session misbehave when they are told to.

    Args:
        inner: the real ledger.
        on_error: told what a call raised for which nobody waited any more.
    """

    def __init__(self, inner: Ledger, on_error: Callable[[BaseException], None]) -> None:
        self._inner = inner
        self._due: dict[str, list[Fault]] = {}
        self._down_until = 0.0
        self._later = Tasks(on_error)

    def befall(self, session_id: str, fault: Fault) -> None:
        """The next call about this session goes wrong."""
        self._due.setdefault(session_id, []).append(fault)

    def spare(self, session_id: str) -> None:
        """Nothing is due for this session any more."""
        self._due.pop(session_id, None)

    def down(self, ms: float) -> None:
        """Every call fails for a while."""
        self._down_until = asyncio.get_running_loop().time() + ms / 1000

    def __getattr__(self, name: str) -> Any:
        """Whatever is about no single session of a move."""
        call = getattr(self._inner, name)
        return self._guarded(call) if inspect.iscoroutinefunction(call) else call

    def _guarded(self, call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(call)
        async def guarded(*arguments: Any, **named: Any) -> T:
            self._check_up()
            return await call(*arguments, **named)

        return guarded

    def _check_up(self) -> None:
        if asyncio.get_running_loop().time() < self._down_until:
            raise LedgerError("the ledger does not answer", cause="fault")

    async def get(self, session_id: str) -> SessionRecord | None:
        """As `Ledger.get`."""
        return await self._call(session_id, lambda: self._inner.get(session_id))

    async def swap(self, old: SessionRecord, new: SessionRecord) -> None:
        """As `Ledger.swap`."""
        await self._call(new.session_id, lambda: self._inner.swap(old, new))

    async def swap_then(
        self,
        old: SessionRecord,
        new: SessionRecord,
        then: SessionRecord,
        *,
        provided: Callable[[], None] | None = None,
    ) -> WorldMoveError | None:
        """As `Ledger.swap_then`."""
        return await self._call(
            new.session_id, lambda: self._inner.swap_then(old, new, then, provided=provided)
        )

    async def settle(
        self, session_id: str, move_id: str, before: SessionRecord | None = None
    ) -> SessionRecord:
        """As `Ledger.settle`."""
        return await self._call(session_id, lambda: self._inner.settle(session_id, move_id, before))

    async def put_receipt(self, receipt: Receipt) -> None:
        """As `Ledger.put_receipt`."""
        await self._call(receipt.session_id, lambda: self._inner.put_receipt(receipt))

    async def close(self) -> None:
        """As `Ledger.close`; calls that were to come later don't."""
        await self._later.cancel()
        await self._inner.close()

    async def _call(self, session_id: str, call: Callable[[], Awaitable[T]]) -> T:
        self._check_up()
        due = self._due.get(session_id)
        if not due:
            return await call()
        fault = due.pop(0)
        match fault.what:
            case "ledger-refuse":
                raise LedgerError("the ledger refuses", cause="fault")
            case "ledger-lost":
                await call()
                raise LedgerError("the reply was lost", cause="fault")
            case "ledger-late":
                # Like a statement under way: it is performed also if its caller has gone meanwhile.
                return await asyncio.shield(asyncio.ensure_future(self._after(fault.ms, call)))
            case "ledger-orphan":
                self._later.spawn(self._forgotten(fault.ms, call))
                raise LedgerError("the ledger did not answer in time", cause="fault")
        self._later.spawn(self._forgotten(fault.ms, call))
        return await call()

    async def _after(self, ms: float, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(ms / 1000)
        return await call()

    async def _forgotten(self, ms: float, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._after(ms, call)
        except WorldMoveError:
            return


def as_ledger(ledger: FaultyLedger) -> Ledger:
    """The same as what it stands for."""
    return cast(Ledger, ledger)
