"""The destination's driver: takes one session in, verifies it in memory, commits, and hands it over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.adoption import Adoption
from worldmove.arrival import Arrival
from worldmove.driver import Driver, Perform, Services, Work
from worldmove.errors import LostRaceError, PeerError, WorldMoveError
from worldmove.hosting.slots import Slot
from worldmove.inbound import Inbound, World
from worldmove.ledger import records
from worldmove.ledger.records import SessionRecord
from worldmove.machine import Role
from worldmove.opening import Opening
from worldmove.paths import Path
from worldmove.placement import travelled
from worldmove.protocol import State
from worldmove.readiness import Readiness, warm
from worldmove.reading import Reader
from worldmove.receipts import now_text
from worldmove.rounds import RoundPolicy
from worldmove.sessions import Berth

RECLAIM_POLL_S = 0.05
PROGRESS_BYTES = 1 << 20
PROGRESS_S = 0.05
AHEAD_SHARE = 0.5
"""Of a block's time: so long may it take to move on what is foreseen, as blocks would go by otherwise."""


class DestinationMove(Driver):
    """One move, seen from the node that the session comes to.

    Args:
        admit: finds a berth (a standby, or memory alone) for what the source announces, and reserves it.
    """

    role: Role = "destination"

    def __init__(
        self, services: Services, hello: m.Hello, admit: Callable[[m.Hello], Awaitable[Berth]]
    ) -> None:
        policy = RoundPolicy(max_rounds=services.settings.max_rounds, horizon_ms=hello.horizon_ms)
        super().__init__(services, hello.move_id, policy)
        self.hello = hello
        self.created_at = now_text()
        self.state_bytes = hello.manifest.nbytes
        self._arrival = Arrival(services.intake, hello, services.note_rate, services.settings.min_gbps)
        self.path_name: str | None = None
        self.landed = 0
        self._told, self._tell_at = 0, 0.0
        self._admit_berth = admit
        self._berth: Berth | None = None
        self._record: SessionRecord | None = None
        self._reader: Reader | None = None
        self._path: Path | None = None
        self._inbound: Inbound | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._pins = contextlib.ExitStack()
        self._wiping: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._adoption = Adoption(services.ledger, self._attended)
        self._ready = Readiness(self._work, self.fail, services.settings.peer_timeout_ms / 1000)

    @property
    def session_id(self) -> str:
        """The session that moves."""
        return self.hello.session_id

    @property
    def epoch(self) -> int:
        """The session's epoch before the move."""
        return self.hello.epoch

    @property
    def slot(self) -> Slot | None:
        """The berth's memory and ranks."""
        return self._berth.slot if self._berth is not None else None

    def note_record(self, record: SessionRecord) -> None:
        """Keeps the record that stands."""
        self._record = record

    def _actions(self) -> dict[type[p.Action], Perform]:
        return super()._actions() | {
            p.Admit: self._admit,
            p.OpenPath: self._open_path,
            p.Expect: self._expect,
            p.StartRound: self._start_round,
            p.PlanPart: self._plan_part,
            p.CloseRound: self._close_round,
            p.Verify: self._verify,
            p.Repair: self._repair,
            p.CommitRecord: self._commit_record,
            p.AdoptRecord: self._adopt_record,
            p.CloseRecord: self._close_record,
            p.AbortPath: self._abort_path,
            p.AwaitReclaim: self._await_reclaim,
            p.WipeMemory: self._wipe_memory,
            p.Finish: self._finish,
        }

    def _handle(self, event: object) -> None:
        super()._handle(event)
        if self.machine.state not in (State.FINISHING, State.VERIFYING):
            return
        if isinstance(event, m.Round):
            self._ready.begin(self._bound())
            self._work.spawn(warm(self.services.ledger, self.session_id))
        elif isinstance(event, m.Sealed):
            if self.landed < self.state_bytes:  # it may take long, and others write meanwhile
                self._work.spawn(warm(self.services.ledger, self.session_id))
            self._work.spawn(self._receiving().foresee(self._world(event)))

    def _world(self, sealed: m.Sealed) -> World:
        return World(self.session_id, self.hello.epoch, sealed.block, sealed.host_states)

    async def _admit(self, action: p.Admit) -> None:
        try:
            berth = await self._admit_berth(action.hello)
        except WorldMoveError as error:
            rejected = m.Rejected(code=error.code, message=error.message[: m.MAX_TEXT], details=error.details)
            self.post(p.AdmitRefused(rejected=rejected))
            return
        if self.machine.ended:
            berth.vacate()
            return
        self._berth, self.path_name = berth, berth.way.path
        self._pins.enter_context(berth.slot.pinned())
        admitted = m.Admitted(
            incarnation=self.services.claim.incarnation,
            path=berth.way.path,
            lanes=self.services.settings.lanes if berth.way.wants_lanes else 0,
            devices=travelled(action.hello.manifest, berth.memory.manifest),
            **self.services.intake.terms_of(self.move_id),
        )
        self.post(p.AdmitOk(admitted=admitted))

    def _bound(self) -> Berth:
        if self._berth is None:
            raise PeerError("nothing was admitted")
        return self._berth

    async def _open_path(self, action: p.OpenPath) -> None:
        record = await self.services.ledger.get(self.session_id)
        if record is None or records.fate(record, self.move_id) != "moving":
            raise PeerError(f"the record of {self.session_id} does not say that this move has begun")
        if record.epoch != self.hello.epoch:
            raise PeerError(f"the source names epoch {self.hello.epoch}, the record says {record.epoch}")
        self._record = record
        self._reader = Reader(self._bound().memory, self.services.executors, self.hello.seed)
        await self._reader.open()
        opening = Opening(self.services, self.hello, action.begin)
        self._path, ready = await opening.open(self._bound().way, self._reader)
        self.path_name = self._path.name
        self._path.lost.add_done_callback(self._on_path_lost)
        await self._arrival.opened(self._path, self._bound().memory.leaf_map)
        self._inbound = Inbound(self._reader, self._path, self._on_error, self._on_landed, self._arrival.read)
        await self._inbound.open(arm=not self.hello.live, live_share=self.services.settings.live_share)
        if not self.hello.live:
            self._ready.begin(self._bound())
        self.post(ready)

    def _on_path_lost(self, future: asyncio.Future[WorldMoveError]) -> None:
        if not future.cancelled() and not self.machine.facts.complete:
            self.fail(future.result().code, f"path: {future.result()}")

    def _on_landed(self, nbytes: int) -> None:
        self.landed += nbytes
        self._arrival.landed(nbytes)
        told = self.machine.facts.expects or not self.hello.live  # that the next round is the last one
        early = told and self.machine.state is not State.FINISHING
        if early or time.monotonic() < self._tell_at:
            return  # the source doesn't know yet that its world stands, or it was told just now
        if self.landed - self._told >= max(PROGRESS_BYTES, self.state_bytes // 50):
            self._told, self._tell_at = self.landed, time.monotonic() + PROGRESS_S
            self.send(m.Progress(bytes=self.landed))

    def _receiving(self) -> Inbound:
        if self._inbound is None:
            raise PeerError("a round is announced before the path was opened")
        return self._inbound

    async def _expect(self, _action: p.Expect) -> None:
        await self._receiving().expect()

    def _start_round(self, action: p.StartRound) -> None:
        self._arrival.begins(final=action.final)
        self._receiving().start_round(action.number, final=action.final)

    def _plan_part(self, action: p.PlanPart) -> None:
        self._receiving().plan(action.part)

    async def _close_round(self, action: p.CloseRound) -> None:
        count = await self._receiving().close_round()
        if (slow := self._arrival.round(count.bytes, (count.wire_ms or count.ms) / 1000)) is not None:
            self.fail("path-too-slow", slow)
        complete = count.complete(action.number)
        if not count.final:
            await self._receiving().shift_ahead(AHEAD_SHARE * self.hello.manifest.block_ms / 1000)
            await self._arrival.turn()
        self.post(complete)

    async def _verify(self, action: p.Verify) -> None:
        inbound, sealed = self._receiving(), action.sealed
        await inbound.confirm(sealed.block)
        damaged = inbound.damaged()
        if damaged.size:
            self.log.warning("damaged leaves", leaves=int(damaged.size), first=damaged[:8].tolist())
            self.post(p.DamageFound(leaves=int(damaged.size)))
            return
        found = await inbound.root(self._world(sealed))
        if found != sealed.root:
            self.fail("root-mismatch", "leaf tables are equal and the roots are not: the seal is damaged")
            return
        self._bound().load(sealed.block, sealed.host_states)
        if not await self._ready.reached(self._bound()):
            return
        self._arrival.verified()
        count = inbound.count
        verified = m.Verified(
            root=found,
            leaves=count.leaves,
            bytes=count.bytes,
            kept_bytes=inbound.kept_bytes,
            ms=count.ms,
            repair_bytes=inbound.repair_bytes,
            copied_bytes=count.copied_bytes,
            damaged=inbound.damages(),
        )
        self.post(p.MemoryVerified(verified=verified))

    async def _repair(self, _action: p.Repair) -> None:
        await self._receiving().repair()
        self.post(p.Repaired())

    async def _commit_record(self, action: p.CommitRecord) -> None:
        """Adopts in the same write, unless a fault waits between the two: it would come too late."""
        async with self._ledger_turn:
            record = self._begun()
            new = records.commit(
                record, block=action.block, revision=self.hello.manifest.revision, root=action.root
            )
            faults = self.services.faults
            apart = faults is not None and faults.awaits(self, State.COMMITTED)
            try:
                self._record = await self._adoption.commit(record, new, None if apart else self._adopted(new))
            except LostRaceError:
                await self._report_standing()
                return
        committed = m.Committed(epoch=new.epoch, commit_ms=self._arrival.committed())
        self.post(p.RecordCommitted(committed=committed))

    def _begun(self) -> SessionRecord:
        if self._record is None:
            raise PeerError("the record was never read")
        return self._record

    async def _report_standing(self) -> None:
        standing = await self.services.ledger.settle(self.session_id, self.move_id)
        self.note_record(standing)
        self.post(p.RecordSettled(outcome=self.outcome(standing)))

    def _adopt_record(self, _action: p.AdoptRecord) -> Work | None:
        """Also where the swap was written and its reply lost: then the world lives here, worker or not."""
        self._arrival.found_committed()
        if self._adoption.stands(self._begun()):
            self._take_over(self._begun())  # in one go with what came of the commit
            return None
        if self._begun().phase != "adopted":
            self._adoption.check()
        return self._adopt()

    def _attended(self) -> bool:
        return self._bound().attended or self.hello.allow_unattended

    def _adopted(self, record: SessionRecord) -> SessionRecord:
        return records.adopt(record, self.services.claim, endpoint=self._bound().endpoint)

    async def _adopt(self) -> None:
        async with self._ledger_turn:
            record = self._begun()
            new = self._adopted(record)
            try:
                await self.services.ledger.swap(record, new)
            except LostRaceError:
                await self._report_standing()
                return
            self._record = new
        self._take_over(new)

    def _take_over(self, adopted: SessionRecord) -> None:
        """The record says `adopted`: the session lives here, and its worker hears of it."""
        berth = self._bound()
        berth.install(adopted, self.hello, self._arrival.dirty_rate)
        said = m.Adopted(epoch=adopted.epoch, resume_ms=self._arrival.adopted(), endpoint=berth.endpoint)
        self.post(p.RecordAdopted(adopted=said))

    def _close_record(self, _action: p.CloseRecord) -> None:
        self._closing = self._tasks.spawn(self._closed_record())

    async def _closed_record(self) -> None:
        """Takes the move out of the record; if the ledger is away, the next writer's swap does it."""
        async with self._ledger_turn:
            record = self._begun()
            if record.phase != "adopted":
                return
            new = records.release(record, self.services.claim)
            try:
                await self.services.ledger.swap(record, new)
            except LostRaceError as lost:
                new = lost.details.get("record") or record
            self._record = new
            self._bound().follow(new)

    async def _abort_path(self, _action: p.AbortPath) -> None:
        if self._berth is not None:
            self._berth.returning = True
        if self._quiet is None:
            self._quiet = asyncio.ensure_future(self._end_path())
        await asyncio.shield(self._quiet)

    async def _end_path(self) -> None:
        if self._path is not None:
            self._path.abort()
        await self._work.cancel()
        if self._path is not None:
            self._path.abort()
        if self._inbound is not None:
            await self._inbound.stop()
        if self._path is not None:
            await self._path.quiet()
        self._arrival.runs()

    async def _await_reclaim(self, _action: p.AwaitReclaim) -> None:
        """Nobody takes the world here: the source may take it back, else it lives on unattended."""
        self._arrival.waits()
        deadline = time.monotonic() + 2 * self.services.settings.peer_timeout_ms / 1000
        while self.machine.state is State.RECLAIMING:
            try:
                record = await self.services.ledger.settle(self.session_id, self.move_id)
                self.note_record(record)
                if self.outcome(record) != "committed":
                    self.post(p.RecordSettled(outcome=self.outcome(record)))
                    return
                if time.monotonic() >= deadline:
                    await self._adopt()
                    return
            except WorldMoveError as error:
                self.log.warning("ledger does not answer", error=str(error))
            await asyncio.sleep(RECLAIM_POLL_S)

    def _wipe_memory(self, _action: p.WipeMemory) -> None:
        self._wiping = asyncio.ensure_future(self._wipe())

    async def _wipe(self) -> None:
        """Overwrites what arrived, once it is certain that nothing arrives any more."""
        if self._quiet is not None:
            await asyncio.shield(self._quiet)
        if self._reader is not None:
            await self._reader.fill(0)

    async def _finish(self, _action: p.Finish) -> None:
        """Everything of the move goes; a standby that was not used waits again, its memory wiped."""
        try:
            if self.machine.state is State.RELEASED:
                await self._let_go()
            else:
                await self._clean_up()
        finally:
            self._pins.close()
            await self.end()

    async def _let_go(self) -> None:
        if self._closing is not None:  # whoever acts on the move's end finds the record closed
            await asyncio.wait({self._closing})
        try:
            if self._path is not None:
                await self._path.release()
        except WorldMoveError as error:
            self.log.info("path ended instead of being released", error=str(error))
        if self._reader is not None:
            await self._reader.close()

    async def _clean_up(self) -> None:
        await self._work.cancel()
        if self._wiping is not None:
            await asyncio.shield(self._wiping)
        if self._reader is not None:
            await self._reader.close()
        self._arrival.over()
        if self._berth is not None:
            self._berth.vacate()
