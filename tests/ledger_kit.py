"""Builders shared by the ledger's tests: nodes, records, receipts, and a world of ledgers on one store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from worldmove.ledger.memory import MemoryLedger, MemoryStore
from worldmove.ledger.records import Claim, MoveRef, NodeInfo, SessionRecord
from worldmove.ledger.sqlite import SqliteLedger
from worldmove.ledger.transactional import TransactionalLedger
from worldmove.views import MoveState, Receipt

ROOT = "ab" * 32


def node_info(name: str) -> NodeInfo:
    return NodeInfo(name=name, url=f"http://{name}:8001", boot_id="boot-1")


def session(holder: Claim, session_id: str = "world", **fields: object) -> SessionRecord:
    base = {"session_id": session_id, "epoch": 1, "owner": holder.name, "incarnation": holder.incarnation}
    return SessionRecord(**{**base, "model": "m", "block": 3, **fields})  # type: ignore[arg-type]


def move_ref(source: Claim, destination: Claim, move_id: str = "move-1") -> MoveRef:
    return MoveRef(
        move_id=move_id,
        source=source.name,
        source_incarnation=source.incarnation,
        destination=destination.name,
        destination_incarnation=destination.incarnation,
    )


def receipt(move_id: str, state: MoveState = "released", reason: str | None = None) -> Receipt:
    return Receipt(
        migration_id=move_id,
        session_id="world",
        source="a",
        destination="b",
        state=state,
        path="staged",
        live=True,
        epoch=2,
        block=4,
        state_bytes=100,
        sent_bytes=90,
        kept_bytes=10,
        rounds=(),
        damaged=(),
        source_root=ROOT,
        destination_root=ROOT,
        pause_ms=1.0,
        data_ms=0.5,
        commit_ms=0.25,
        resume_ms=0.25,
        total_ms=9.0,
        missed=False,
        lanes=1,
        finished_at="2026-11-29T00:00:00Z",
        reason=reason,
    )


class Ledgers:
    """Several nodes' ledgers on one store of the given kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self._store = MemoryStore() if kind == "memory" else None
        self.opened: list[TransactionalLedger] = []

    async def open(self) -> TransactionalLedger:
        ledger: TransactionalLedger
        if self._store is None:
            ledger = await SqliteLedger.open(self.path)
        else:
            ledger = MemoryLedger(self._store)
        self.opened.append(ledger)
        return ledger

    async def node(self, name: str) -> tuple[TransactionalLedger, Claim]:
        ledger = await self.open()
        return ledger, Claim(name, await ledger.claim(node_info(name)))

    async def close(self) -> None:
        for ledger in self.opened:
            await ledger.close()


Opener = Callable[[str, Path], Ledgers]
