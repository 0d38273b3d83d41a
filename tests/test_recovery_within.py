"""A node that died in a move within itself finds two ends of one session: one world goes on, in any order.

The keeper, the host's slots and the ledger are real; the worlds have no workers, as if those had died too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hosting_kit import HostKit, host_kit, region_bytes, spec, until
from ledger_kit import ROOT, Ledgers, move_ref, session

from worldmove.errors import LedgerError
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.slots import Slot
from worldmove.ledger import records
from worldmove.ledger.records import Claim, SessionRecord
from worldmove.ledger.transactional import TransactionalLedger
from worldmove.memory.keeping import Keeper
from worldmove.node.recovery import Recovery
from worldmove.node.resolving import Resolver
from worldmove.sessions import SessionBook

pytestmark = pytest.mark.parametrize("turned", [False, True], ids=["as-found", "turned"])


class Life:
    """One incarnation of a node, as far as recovery needs it."""

    def __init__(
        self, kit: HostKit, ledger: TransactionalLedger, claim: Claim, pool: ExecutorPool | None = None
    ) -> None:
        self.host = kit.host
        self.ledger = ledger
        self.claim = claim
        self.book = SessionBook("A", "http://a", kit.host)
        settings = SimpleNamespace(peer_timeout_ms=2000.0)
        self.services: Any = SimpleNamespace(claim=claim, ledger=ledger, settings=settings, executors=pool)
        self.recovery = Recovery(self.services, self.host, self.book, _alone)

    async def world(self, epoch: int) -> Slot:
        slot, _ = await self.host.open_session(spec(), "w", epoch)
        return slot

    async def standby(self, move_id: str) -> Slot:
        """One that a move was promised."""
        slot, _ = await self.host.open_standby(spec())
        slot.bound = move_id
        await self.host.keep(slot)
        return slot

    async def later(self, epoch: int) -> Slot:
        """One that has taken the session over, at this epoch."""
        slot = await self.standby(f"to-{epoch}")
        self.host.adopt(slot, "w", epoch, slot.manifest, slot.seed)
        await self.host.keep(slot)
        return slot

    @property
    def doubted(self) -> int:
        """How many slots wait for an operator."""
        return sum(waiting.reason is not None for waiting in self.recovery.unsettled.values())

    @contextlib.asynccontextmanager
    async def settling(self, *, turned: bool) -> AsyncIterator[None]:
        """Settles everything that was found, begun in the order of the epochs or the other way round."""
        found = sorted(self.host.slots, key=lambda slot: slot.ranks.page.epoch, reverse=turned)
        tasks = [asyncio.ensure_future(self.recovery.settle(slot)) for slot in found]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert self.recovery.unsettled == {}, "who is told to go leaves nothing behind"


async def _alone() -> None:
    return None


class Stage:
    """Two lives of a node, and the ledger of both."""

    def __init__(self, run_dir: Path, ledgers: Ledgers, keeper: Keeper, pool: ExecutorPool) -> None:
        self.run_dir, self.ledgers, self.keeper, self.pool = run_dir, ledgers, keeper, pool
        self._stack = contextlib.AsyncExitStack()

    async def after(
        self,
        lay: Callable[[Life], Awaitable[Any]],
        write: Callable[[SessionRecord, Claim], list[SessionRecord]] = lambda _record, _claim: [],
        epoch: int = 5,
    ) -> Life:
        """The second life, after slots were laid out in a first one and its ledger had come so far.

        `write`: what became of the record that the first life had at `epoch`, step by step.
        """
        ledger, claim = await self.ledgers.node("A")
        async with host_kit(self.run_dir, keeper=self.keeper) as first:
            await lay(Life(first, ledger, claim))
            record = await ledger.create(session(claim, "w", epoch=epoch))
            for step in write(record, claim):
                await ledger.swap(record, step)
                record = step
        ledger, claim = await self.ledgers.node("A")
        assert claim.incarnation == 2
        kit = await self._stack.enter_async_context(host_kit(self.run_dir, keeper=self.keeper, incarnation=2))
        return Life(kit, ledger, claim, self.pool)

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def stage(run_dir: Path) -> AsyncIterator[Stage]:
    keeper = await Keeper.start(run_dir / "keeper.sock")
    pool, ledgers = ExecutorPool(1, nice=0), Ledgers("sqlite", run_dir)
    await pool.start()
    made = Stage(run_dir, ledgers, keeper, pool)
    yield made
    await made.close()
    await ledgers.close()
    await pool.close()
    for key in await keeper.keys():
        await keeper.drop(key)
    await keeper.close()


async def both(life: Life) -> None:
    await life.world(5)
    await life.later(6)


async def promised(life: Life) -> None:
    await life.world(5)
    await life.standby("m")


def begun(record: SessionRecord, claim: Claim) -> list[SessionRecord]:
    return [records.begin(record, move_ref(claim, claim, "m"))]


def committed(record: SessionRecord, claim: Claim) -> list[SessionRecord]:
    steps = begun(record, claim)
    return [*steps, records.commit(steps[-1], block=3, revision=1, root=ROOT)]


def adopted(record: SessionRecord, claim: Claim) -> list[SessionRecord]:
    steps = committed(record, claim)
    return [*steps, records.adopt(steps[-1], claim, endpoint=None)]


def released(record: SessionRecord, claim: Claim) -> list[SessionRecord]:
    steps = adopted(record, claim)
    return [*steps, records.release(steps[-1], claim)]


def one(life: Life, epoch: int) -> bool:
    """Whether one slot is left, and it is the world."""
    held = life.book.get("w")
    return held is not None and life.host.slots == (held.slot,) and held.slot.ranks.page.epoch == epoch


@pytest.mark.parametrize("write", [adopted, released])
@pytest.mark.parametrize("lay", [both, promised], ids=["installed", "promised"])
async def test_what_the_world_has_left_goes(
    stage: Stage, turned: bool, lay: Callable[[Life], Awaitable[Any]], write: Any
) -> None:
    life = await stage.after(lay, write)
    assert len(life.host.slots) == 2
    async with life.settling(turned=turned):
        await until(lambda: one(life, 6))
        record = await life.ledger.get("w")
        assert record is not None
        assert (record.phase, record.holder) == ("owned", life.claim)
        assert life.host.session("w").ranks.state == "unattended"


async def test_a_world_that_was_committed_is_adopted_by_the_standby(stage: Stage, turned: bool) -> None:
    life = await stage.after(promised, committed)
    async with life.settling(turned=turned):
        await until(lambda: one(life, 6))


async def test_a_world_whose_move_had_not_come_so_far_stays(stage: Stage, turned: bool) -> None:
    life = await stage.after(promised, begun)
    (standby,) = life.host.standbys.values()
    async with life.settling(turned=turned):
        await until(lambda: life.book.get("w") is not None and standby.bound is None)
        held = life.book.get("w")
        assert held is not None
        assert held.slot is life.host.session("w")
        assert held.record.epoch == held.slot.ranks.page.epoch == 5
        assert held.record.outcome == "aborted"
        assert not any(region_bytes(standby, "k"))


async def test_one_that_is_asked_for_later_still_sees_that_the_world_has_left_it(
    stage: Stage, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later end is settled, and waits for nothing any more, when the ledger answers for the other."""
    life = await stage.after(both, released)
    late = min(life.host.slots, key=lambda slot: slot.ranks.page.epoch)
    tried = life.recovery._session

    async def refused(waiting: Any) -> bool:
        if waiting.slot is late and life.book.get("w") is None:
            raise LedgerError("it does not answer")
        return await tried(waiting)

    monkeypatch.setattr(life.recovery, "_session", refused)
    async with life.settling(turned=turned):
        await until(lambda: one(life, 6))


@pytest.mark.parametrize("epochs", [(5, 6), (4, 5, 6)])
async def test_no_end_goes_on_by_a_record_that_does_not_know_the_latest(
    stage: Stage, turned: bool, epochs: tuple[int, ...]
) -> None:
    """The ledger was set back to before the move: the world that it says is here is the one that was left."""

    async def lay(life: Life) -> None:
        await life.world(epochs[0])
        for epoch in epochs[1:]:
            await life.later(epoch)

    life = await stage.after(lay)
    async with life.settling(turned=turned):
        await until(lambda: life.doubted == len(epochs))
        assert [slot.ranks.state for slot in life.host.slots] == ["fenced"] * len(epochs)
        assert life.book.get("w") is None
        assert life.recovery.fenced("w") in life.host.slots


@pytest.mark.parametrize("known", [True, False], ids=["set-back", "lost"])
@pytest.mark.parametrize("decision", ["keep", "end"])
async def test_an_operator_decides_about_both_ends_at_once(
    stage: Stage, turned: bool, known: bool, decision: Any
) -> None:
    life = await stage.after(both)
    if not known:
        stage.ledgers.path.unlink()
        await stage.ledgers.close()
        life.ledger, life.claim = await stage.ledgers.node("A")
        life.services.ledger, life.services.claim = life.ledger, life.claim
    async with life.settling(turned=turned):
        await until(lambda: life.doubted == 2)
        resolver = Resolver(life.services, life.host, life.book, life.recovery)
        await resolver.resolve("w", decision)
        if decision == "keep":
            await until(lambda: one(life, 7))
        else:
            await until(lambda: not life.host.slots)
