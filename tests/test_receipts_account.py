"""The account of a move: what its receipt says after whole moves, good and bad."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
from ledger_kit import node_info
from machine_kit import EPOCH, EVENTS, HELLO, REJECTED
from move_scenarios import SCENARIOS

from worldmove import messages as m
from worldmove.errors import MoveAbortedError, NoWorkerError, PeerError
from worldmove.hosting.ranks import Pause
from worldmove.ledger.memory import MemoryLedger, MemoryStore
from worldmove.machine import Machine
from worldmove.receipts import Account
from worldmove.views import Receipt

HORIZON_S = HELLO.horizon_ms / 1000


@pytest_asyncio.fixture
async def ledger() -> AsyncIterator[MemoryLedger]:
    made = MemoryLedger(MemoryStore())
    await made.claim(node_info("a"))
    yield made
    await made.close()


def played(scenario: str, stopped_ago_s: float = 0.01) -> tuple[Account, Machine]:
    """A source's account after a scenario; its world stopped so long before the move's end."""
    move = SCENARIOS[scenario]()
    account = Account(move.hello, "b")
    for line in move.lines:
        if line.role == "source":
            if type(line.event).__name__ == "WorldPaused":
                stopped_at = time.monotonic() - stopped_ago_s
                account.paused(Pause(line.event.block, (), stopped_at, True, cast(Any, None)))
            account.note(line.event)
    return account, move.source.machine


async def receipt(ledger: MemoryLedger, account: Account, machine: Machine) -> Receipt:
    await account.write(ledger, machine, EPOCH + 1)
    assert account.receipt is not None
    return account.receipt


async def test_a_good_move(ledger: MemoryLedger) -> None:
    account, machine = played("live_rounds")
    found = await receipt(ledger, account, machine)
    assert (found.state, found.code, found.reason) == ("released", None, None)
    assert (found.source, found.destination, found.path, found.lanes) == ("a", "b", "staged", 1)
    assert [(one.number, one.final) for one in found.rounds] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert found.sent_bytes == sum(one.bytes for one in found.rounds)
    assert found.state_bytes == HELLO.manifest.nbytes
    assert found.epoch == EPOCH + 1
    assert found.block == 9
    assert found.pause_ms is not None
    assert found.pause_ms == pytest.approx(found.data_ms + found.commit_ms + found.resume_ms)  # type: ignore[operator]
    assert not found.missed
    assert await ledger.receipt(HELLO.move_id) == found


async def test_a_late_move_is_committed_and_missed(ledger: MemoryLedger) -> None:
    found = await receipt(ledger, *played("not_live", stopped_ago_s=HORIZON_S + 0.05))
    assert found.state == "released"
    assert found.missed


async def test_an_aborted_move_says_why(ledger: MemoryLedger) -> None:
    found = await receipt(ledger, *played("damage_stays"))
    assert (found.state, found.code) == ("aborted", "damaged")
    assert found.reason == "4 leaves still differ after 2 repairs"
    assert (found.destination_root, found.pause_ms, found.data_ms, found.missed) == (None, None, None, False)
    assert not any(one.final for one in found.rounds)


async def test_a_rejection_leaves_no_receipt_in_the_ledger(ledger: MemoryLedger) -> None:
    account, machine = played("rejected")
    found = await receipt(ledger, account, machine)
    assert found.state == "rejected"
    assert await ledger.receipt(HELLO.move_id) is None
    error = account.rejection(machine.facts.code, machine.facts.message)
    assert type(error) is NoWorkerError
    assert error.message == REJECTED.message


async def test_why_a_move_was_not_admitted() -> None:
    account = Account(HELLO, "b")
    assert account.rejection(None, None) is None
    assert type(account.rejection("peer", "gone")) is PeerError
    cancelled = account.rejection("cancelled", "by an operator")
    assert isinstance(cancelled, MoveAbortedError)
    assert cancelled.details == {"reason": "cancelled"}


async def test_damaged_leaves_are_named(ledger: MemoryLedger) -> None:
    account, machine = played("not_live")
    verified = EVENTS["Verified"]
    account.note(
        m.Verified(
            root=verified.root,
            leaves=1,
            bytes=1,
            kept_bytes=7,
            repair_bytes=5,
            ms=1.0,
            damaged=(m.DamagedLeaf("k", 3, 2),),
        )
    )
    found = await receipt(ledger, account, machine)
    assert [(one.region, one.leaf, one.attempts) for one in found.damaged] == [("k", 3, 2)]
    assert (found.kept_bytes, found.repair_bytes) == (7, 5)
    assert found.sent_bytes == sum(one.bytes for one in found.rounds) + 5


@pytest.mark.parametrize(("kept", "copied", "again"), [(0, 0, 1000), (400, 100, 1500), (0, 1 << 40, 1 << 40)])
async def test_what_was_sent_twice_is_told_of_the_paused_round(
    ledger: MemoryLedger, kept: int, copied: int, again: int
) -> None:
    """It began at another stop, and was sent all the same. No peer's word makes it more than was sent."""
    account, machine = played("not_live")
    (taken,) = machine.facts.rounds
    sent = HELLO.manifest.nbytes + 1000
    machine.facts = msgspec.structs.replace(
        machine.facts, rounds=(msgspec.structs.replace(taken, bytes=sent, copied_bytes=copied),)
    )
    account.note(m.Verified(root="ab" * 32, leaves=1, bytes=sent, kept_bytes=kept, ms=1.0))
    found = await receipt(ledger, account, machine)
    (paused,) = found.rounds
    assert found.sent_bytes == paused.bytes == sent
    assert paused.again_bytes == min(again, sent)


async def test_a_receipt_that_cannot_be_kept_does_not_stop_the_move(ledger: MemoryLedger) -> None:
    """Thousands of damaged leaves with long names make a receipt that the ledger refuses."""
    account, machine = played("not_live")
    damaged = (m.DamagedLeaf("r" * 128, 1, 1),) * 10_000
    account.note(m.Verified(root="ab" * 32, leaves=1, bytes=1, kept_bytes=0, ms=1.0, damaged=damaged))
    found = await receipt(ledger, account, machine)
    assert len(found.damaged) == 10_000
    assert await ledger.receipt(HELLO.move_id) is None
    await ledger.close()
    await receipt(ledger, *played("not_live"))
