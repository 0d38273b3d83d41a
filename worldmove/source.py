"""The source's driver: leads the move of one session away from this node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.delta.geometry import steps_of
from worldmove.driver import Driver, PeerChannel, Perform, Services, Work
from worldmove.errors import LostRaceError, MoveAbortedError, PeerError, WorldMoveError
from worldmove.hosting.ranks import Pause
from worldmove.hosting.slots import Slot
from worldmove.ledger import records
from worldmove.ledger.records import MoveRef, SessionRecord
from worldmove.machine import Role
from worldmove.outbound import Outbound
from worldmove.rates import SETTLE
from worldmove.receipts import Account
from worldmove.rounds import RoundPolicy
from worldmove.sessions import Session

Connect = Callable[[], Awaitable[PeerChannel]]
DOUBT_POLL_S = 0.05
LOOK_S = 0.002


class SourceMove(Driver):
    """One move, seen from the node that owns the session.

    Attributes:
        session: what moves; its `move` is this driver until the move has ended.
        account: times and bytes for the receipt.
        admission: completes with `None` once the destination has taken the session, or with the rejection.
    """

    role: Role = "source"

    def __init__(
        self, services: Services, session: Session, hello: m.Hello, destination: str, connect: Connect
    ) -> None:
        policy = RoundPolicy(
            max_rounds=services.settings.max_rounds,
            horizon_ms=hello.horizon_ms,
            block_ms=hello.manifest.block_ms,
            state_bytes=hello.manifest.nbytes,
            strided=any(steps_of(hello.manifest.regions)),
        )
        self.state_bytes = policy.state_bytes
        super().__init__(services, hello.move_id, policy)
        self.session = session
        self.hello = hello
        self.destination = destination
        self.account = Account(hello, destination)
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connect = connect
        self._memory = Outbound(services, session.slot, hello, self._on_lane_lost, self._on_direct_lost)
        self._before: SessionRecord | None = None
        self._pause: Pause | None = None
        self._gave_up_at: float | None = None
        self._quiet: asyncio.Future[None] | None = None

    @property
    def session_id(self) -> str:
        """The session that moves."""
        return self.hello.session_id

    @property
    def epoch(self) -> int:
        """The session's epoch before the move."""
        return self.hello.epoch

    @property
    def slot(self) -> Slot:
        """The session's memory and ranks here."""
        return self.session.slot

    def note_record(self, record: SessionRecord) -> None:
        """The session follows its record."""
        self.session.record = record
        self.account.settled(record)

    def _actions(self) -> dict[type[p.Action], Perform]:
        return super()._actions() | {
            p.BeginRecord: self._begin_record,
            p.OfferPath: self._offer_path,
            p.NotePrepared: self._note_prepared,
            p.NoteLanded: self._note_landed,
            p.ReadTable: self._read_table,
            p.PauseWorld: self._pause_world,
            p.SealWorld: self._seal_world,
            p.ResumeWorld: self._resume_world,
            p.ReleaseWorld: self._release_world,
            p.AbortPath: self._abort_path,
            p.AwaitAdoption: self._await_adoption,
            p.Finish: self._finish,
        }

    def begin(self) -> None:
        """Starts the move."""
        self.limit(self.hello.deadline_ms)
        self._tasks.spawn(self._open())

    async def _open(self) -> None:
        try:
            channel = await self._connect()
        except PeerError as error:
            self.post(p.PeerLost(message=str(error)))
            return
        if self.machine.ended:
            # It was cancelled while the peer took its time.
            await channel.close()
            return
        self.start_peer(channel)
        self.post(p.Start(hello=self.hello))

    def _handle(self, event: object) -> None:
        self.account.note(event)
        before = self.machine.state
        super()._handle(event)
        if self.machine.state is p.State.SETTLING and before is not p.State.SETTLING:
            self._gave_up_at = time.monotonic()
        if self.machine.state is p.State.COMMITTED and before is not p.State.COMMITTED:
            # A peer that answers pings and hangs would leave the world standing: the record then decides.
            self.later(
                self.services.settings.peer_timeout_ms,
                lambda: self._give_up("peer", "committed, and no word of an adoption", committed=True),
            )
        if self.machine.state not in (p.State.REQUESTED, p.State.REJECTED, p.State.ABORTED):
            self._answer(None)

    def _answer(self, error: WorldMoveError | None) -> None:
        if self.admission.done():
            return
        if error is None:
            self.admission.set_result(None)
        else:
            self.admission.set_exception(error)

    async def _begin_record(self, _action: p.BeginRecord) -> None:
        claim = self.services.claim
        await self.services.turns.acquire()
        self.done.add_done_callback(lambda _done: self.services.turns.release())
        # Not before its turn: those that wait for theirs may be many.
        watch = self._tasks.spawn(self.account.timeline.watch(lambda: self.slot.ranks.block))
        self.done.add_done_callback(lambda _done: watch.cancel())
        async with self._ledger_turn:
            if self.machine.state is not p.State.ADMITTED:
                return  # given up, and perhaps settled already: it must not begin after that
            old = await self._closed_record()
            move = MoveRef(
                move_id=self.move_id,
                source=claim.name,
                source_incarnation=claim.incarnation,
                destination=self.destination,
                destination_incarnation=self.account.destination_incarnation,
            )
            new = records.begin(old, move)
            self._before = old
            await self.services.ledger.swap(old, new)
            self.session.record = new
        self.post(p.RecordBegun())

    async def _settled_record(self) -> SessionRecord:
        """Whether the move has begun may be unknown, too: then it is written off before it can."""
        return await self.services.ledger.settle(self.session_id, self.move_id, self._before)

    async def _closed_record(self) -> SessionRecord:
        """The session's record, out of the move that brought it here: its last swap may have been lost."""
        record = self.session.record
        if record.phase == "adopted":
            closed = records.release(record, self.services.claim)
            await self.services.ledger.swap(record, closed)
            self.session.record = record = closed
        return record

    async def _offer_path(self, action: p.OfferPath) -> None:
        self.post(p.PathOffered(begin=await self._memory.offer(action)))

    def _on_direct_lost(self, future: asyncio.Future[WorldMoveError]) -> None:
        facts = self.machine.facts  # before the path is open the staged one may still take its place
        if facts.path == "direct" and not (facts.lanes and self.machine.state is p.State.ADMITTED):
            self._on_lane_lost(future)

    def _on_lane_lost(self, future: asyncio.Future[WorldMoveError]) -> None:
        facts = self.machine.facts
        if not future.cancelled() and not facts.complete and facts.path != "local":  # there they are spare
            self.fail(future.result().code, f"lane: {future.result()}")

    def _send(self, action: p.Send) -> None:
        if isinstance(action.message, m.Round):
            self.account.timeline.begins(time.monotonic())
        super()._send(action)

    def _note_prepared(self, _action: p.NotePrepared) -> None:
        self.account.prepared()
        facts = self.machine.facts
        if facts.path == "staged" or facts.lanes:
            self._work.spawn(self._memory.keep_only(facts.path))
        self.post(p.PreparedHere(block=self.session.slot.ranks.block))

    def _note_landed(self, _action: p.NoteLanded) -> Work | None:
        if self._waits_for_block(0.0):
            return self._see_block()
        self.post(p.LandedHere(block=self.session.slot.ranks.block))
        return None

    def _waits_for_block(self, waited_s: float) -> bool:
        facts, ranks = self.machine.facts, self.session.slot.ranks
        since = ranks.block - facts.blocks[-1]
        left_ms = self.hello.deadline_ms - self.account.elapsed_ms
        return ranks.attended and facts.policy.waits(facts.rounds, since, waited_s * 1000, left_ms)

    async def _see_block(self) -> None:
        landed = time.monotonic()
        while self._waits_for_block(time.monotonic() - landed):  # noqa: ASYNC110 - a store in shared memory
            await asyncio.sleep(LOOK_S)
        self.post(p.LandedHere(block=self.session.slot.ranks.block))

    async def _read_table(self, action: p.ReadTable) -> None:
        table, block = self._memory.table, self.session.slot.ranks.block

        def send(first: int, count: int) -> None:
            if self.machine.facts.path == "local":  # the destination reads the table where it is
                self.send(m.TablePart(number=action.number, first=first, shown=count))
                return
            for start in range(first, first + count, m.MAX_PART_LEAVES):
                some = min(m.MAX_PART_LEAVES, first + count - start)
                self.send(m.TablePart(number=action.number, first=start, digests=table.slice(start, some)))

        in_turns = self.machine.facts.path == "direct" and not self.hello.live
        await self._memory.read(send, urgent=action.final, in_turns=in_turns, pause=self._pause)
        self.post(p.TableDone(number=action.number, block=block))

    async def _pause_world(self, _action: p.PauseWorld) -> None:
        ranks = self.session.slot.ranks
        # The workers of a node that has just started again come back at their boundaries.
        await ranks.roll.back(self.services.settings.peer_timeout_ms / 1000)
        timeout = max(self.hello.deadline_ms - self.account.elapsed_ms, 0) / 1000
        if self.hello.live:
            await self._memory.last_round()
            self.send(m.Pausing())
        rounds = self.machine.facts.rounds
        self._memory.expect_stop(rounds[-1].bytes if rounds else self.state_bytes)
        self._pause = await ranks.pause(timeout, allow_unattended=self.hello.allow_unattended)
        self._memory.stands()
        self.account.paused(self._pause)
        self._limit_pause(self._pause.stopped_at)
        self.post(p.WorldPaused(block=self._pause.block))

    def _limit_pause(self, stopped_at: float) -> None:
        """A pause that lasts too long is given up while the world can still go on here within its horizon."""
        horizon_s = self.hello.horizon_ms / 1000
        spare_s = min(self.services.intake.settling_s(), horizon_s / 2)
        left_ms = (stopped_at + horizon_s - spare_s - time.monotonic()) * 1000
        late = f"the world would stand longer than its horizon of {self.hello.horizon_ms:g} ms"
        self.later(max(left_ms, 0.0), lambda: self.fail("horizon", late))

    def _seal_world(self, _action: p.SealWorld) -> Work | None:
        pause = self._pause
        if pause is None:
            raise PeerError("a seal is wanted before the world was paused")
        root = self._memory.root_at_once(pause)
        if root is None:
            return self._seal_large(pause)
        self._sealed(pause, root)  # in one go with the end of the table
        return None

    async def _seal_large(self, pause: Pause) -> None:
        self._sealed(pause, await self._memory.root(pause))

    def _sealed(self, pause: Pause, root: str) -> None:
        self.account.source_root = root
        sealed = m.Sealed(block=pause.block, host_states=pause.host_states, root=root)
        self.post(p.WorldSealed(sealed=sealed))

    def _resume_world(self, _action: p.ResumeWorld) -> None:
        if self._pause is not None:
            self._pause.resume()
            self.account.timeline.resumed(time.monotonic())
            settled_s = time.monotonic() - (self._gave_up_at or inf)
            if settled_s < self.hello.horizon_ms / 1000:  # longer: the ledger was away, no earlier end helps
                self.services.intake.note_time(SETTLE, settled_s)

    async def _release_world(self, _action: p.ReleaseWorld) -> None:
        self.session.leave(self.destination, self.session.record.endpoint)
        await self._memory.close()
        self.post(p.WorldReleased())

    async def _abort_path(self, _action: p.AbortPath) -> None:
        if self._quiet is None:
            self._quiet = asyncio.ensure_future(self._ended_path())
        await asyncio.shield(self._quiet)

    async def _ended_path(self) -> None:
        self._memory.drop()
        await self._work.cancel()
        await self._memory.end()

    async def _await_adoption(self, _action: p.AwaitAdoption) -> None:
        """The destination has the peer's time to adopt; then the world is taken back by a swap."""
        deadline = time.monotonic() + self.services.settings.peer_timeout_ms / 1000
        ledger, claim = self.services.ledger, self.services.claim
        while self.machine.state is p.State.RECLAIMING:
            try:
                record = await ledger.settle(self.session_id, self.move_id)
                if self.outcome(record) == "committed" and time.monotonic() >= deadline:
                    new = records.reclaim(record, claim)
                    await ledger.swap(record, new)
                    record = new
            except LostRaceError:
                continue
            except WorldMoveError as error:
                self.log.warning("ledger does not answer; the world waits for it", error=str(error))
            else:
                if self.outcome(record) != "committed":
                    self.note_record(record)
                    self.post(p.RecordSettled(outcome=self.outcome(record)))
                    return
            await asyncio.sleep(DOUBT_POLL_S)

    async def _finish(self, _action: p.Finish) -> None:
        facts = self.machine.facts
        if self.account.dirty_rate is not None:
            self.session.dirty_rate = self.account.dirty_rate
        try:
            if self._quiet is not None:
                await asyncio.shield(self._quiet)
            else:
                await self._memory.close()
            refused = self.account.rejection(facts.code, facts.message)
            self._answer(self.services.outlet.advised(refused))
            await self.account.write(self.services.ledger, self.machine, self.session.record.epoch)
        finally:
            self._answer(MoveAbortedError("the move ended unexpectedly", reason="internal"))
            self._memory.free()
            self.session.end_move(self)
            await self.end()
