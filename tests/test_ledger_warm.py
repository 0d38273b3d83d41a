"""Having a record at hand before it is swapped: it changes nothing, and never fails."""

from __future__ import annotations

from pathlib import Path

from ledger_kit import node_info, session

from worldmove.ledger.records import Claim
from worldmove.ledger.sqlite import SqliteLedger


async def test_warming_changes_nothing_and_never_fails(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", busy_ms=50)
    await ledger.claim(node_info("a"))
    record = await ledger.create(session(Claim("a", 1), "world"))
    position = await ledger.position()
    for name in ("world", "nobody"):
        await ledger.warm(name)
    assert await ledger.position() == position
    assert await ledger.get("world") == record
    await ledger.close()
    await ledger.warm("world")
