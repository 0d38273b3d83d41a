"""The time of day has no say in who owns a session: it jumps at every step, far back and far ahead."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from ledger_kit import ROOT, move_ref, node_info, receipt, session

from worldmove.errors import LostRaceError
from worldmove.ledger import records
from worldmove.ledger.lease import Liveness
from worldmove.ledger.sqlite import SqliteLedger

YEAR_S = 365 * 24 * 3600.0


async def test_a_jumping_clock_makes_no_second_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    jumps = itertools.cycle([0.0, -30 * YEAR_S, 30 * YEAR_S, -1.0, 3600.0])
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int((now + next(jumps)) * 1e9))
    here, there = [await SqliteLedger.open(tmp_path / "ledger.db") for _ in range(2)]
    try:
        for ledger, name in ((here, "a"), (there, "b")):
            await ledger.claim(node_info(name))
        assert here.claimed is not None
        assert there.claimed is not None
        owned = await here.create(session(here.claimed))
        moving = records.begin(owned, move_ref(here.claimed, there.claimed))
        await here.swap(owned, moving)
        for ledger in (here, there):
            await ledger.renew()
        committed = records.commit(moving, block=9, revision=1, root=ROOT)
        await there.swap(moving, committed)
        with pytest.raises(LostRaceError):
            await here.swap(moving, records.abort(moving, here.claimed))
        assert await here.settle("world", "move-1") == committed
        await there.put_receipt(receipt("move-1"))
        assert (await here.get("world")) == committed
        alive = Liveness(5.0)
        alive.observe(await here.nodes(), 0.0)
        assert alive.observe(await here.nodes(), 4.0) == {"a": True, "b": True}
    finally:
        await here.close()
        await there.close()
