"""What source and destination drivers share: the loop between a machine, its peer and the ledger.

A driver decides synchronously and acts afterwards: `post` runs the machine and starts what it asks for;
whatever comes of that is posted as the next event. Errors of actions become `Failed` events, so that
there is one way in which a move goes wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.config import Settings
from worldmove.descriptors import DescriptorDoor
from worldmove.directing import DirectLanes, DirectRates
from worldmove.errors import LedgerError, NotFoundError, ProtocolError, WorldMoveError
from worldmove.executor.devices import Pools
from worldmove.hosting.slots import Slot
from worldmove.intake import Intake
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import Claim, SessionRecord, fate
from worldmove.machine import Machine, Role
from worldmove.outlet import Outlet
from worldmove.protocol import State
from worldmove.reaching import Reaches
from worldmove.rings import Rings
from worldmove.rounds import RoundPolicy
from worldmove.tasks import Tasks
from worldmove.transport.pool import LanePool

Work = Coroutine[Any, Any, None]
ABORTABLE = frozenset(
    {
        State.REQUESTED,
        State.ADMITTED,
        State.PREPARED,
        State.COPYING,
        State.PAUSING,
        State.FINISHING,
        State.VERIFYING,
    }
)
LEDGER_RETRY_S = 0.2
STANDING = frozenset({State.FINISHING, State.VERIFYING, State.COMMITTED})
"""While the world of a move stands: whoever only tells of the move waits a little."""
LOG_AFTER_S = 0.05
LOG_TRIES = 4
"""So often at most a line of the log waits that long."""
KEPT_STEPS = 64

WORK = (
    p.OfferPath, p.NoteLanded, p.ReadTable, p.PauseWorld, p.SealWorld,
    p.Admit, p.OpenPath, p.CloseRound, p.Expect, p.Verify, p.Repair,
)  # fmt: skip
"""Actions that may be cancelled when a move is given up. Those on the record never are."""


class PeerChannel(Protocol):
    """One control connection, message by message; `move_id` is the one in its address."""

    @property
    def move_id(self) -> str:
        """The move that this connection is for."""

    async def send(self, message: bytes) -> None:
        """Sends one message; raises ConnectionLostError once the connection is gone."""

    async def receive(self) -> bytes:
        """The next message; raises ConnectionLostError once the connection is gone."""

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes with a WebSocket status code; never raises."""


class Faults(Protocol):
    """What tests make go wrong in moves (`worldmove.faults`)."""

    def channel(self, move: Driver, channel: PeerChannel) -> PeerChannel:
        """The move's control connection, as it is to be used."""

    def entered(self, move: Driver) -> None:
        """The move has come into a state; nothing has been done in it yet."""

    def awaits(self, move: Driver, state: State) -> bool:
        """Whether something is to go wrong once the move comes into this state."""

    def work(self, move: Driver, action: p.Action, work: Work) -> Work:
        """The work of an action, as it is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What a node lends to its moves. `faults` is there only on nodes that were started with the option."""

    settings: Settings
    claim: Claim
    url: str
    boot_id: str
    ledger: Ledger
    lanes: LanePool
    direct: DirectLanes
    direct_rates: DirectRates
    reaches: Reaches
    rings: Rings
    executors: Pools
    intake: Intake
    outlet: Outlet
    door: DescriptorDoor
    turns: asyncio.Semaphore
    """One for each move away that may be under way at once; those that are admitted wait for theirs."""
    faults: Faults | None = None
    note_rate: Callable[[str, int, float], None]
    """Told (path, bytes, seconds) of every round that moved enough to say something about the path."""


Perform = Callable[[Any], Work | None]


class Driver:
    """Base of both drivers: one move, until its machine has ended.

    Attributes:
        machine: decides.
        move_id: the move.
        done: completes when the move has ended and everything that belongs to it is gone.
    """

    role: Role

    def __init__(self, services: Services, move_id: str, policy: RoundPolicy) -> None:
        self.services = services
        self.move_id = move_id
        self.machine = Machine(self.role, policy)
        self.started = time.monotonic()
        self._visible = self.machine.shown
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self.log = structlog.get_logger().bind(move=move_id, role=self.role)
        self._channel: PeerChannel | None = None
        self._writer: asyncio.Task[None] | None = None
        self._events: deque[Any] = deque()
        self._steps: deque[tuple[str, float, float]] = deque(maxlen=KEPT_STEPS)
        self._handling = False
        self._untold: list[tuple[str, str]] = []
        self._outbox: asyncio.Queue[m.Message | None] = asyncio.Queue()
        self._tasks = Tasks(self._on_error)
        self._work = Tasks(self._on_error)
        self._peer_tasks = Tasks(self._on_peer_error)
        self._ledger_turn = asyncio.Lock()
        self._timers: list[asyncio.TimerHandle] = []
        self._performers = self._actions()

    def _actions(self) -> dict[type[p.Action], Perform]:
        """Which method performs which action; subclasses add theirs."""
        return {p.Send: self._send, p.SettleRecord: self._settle}

    @property
    def abortable(self) -> bool:
        """Whether the move can still be given up by this side."""
        return self.machine.state in ABORTABLE

    @property
    def visible(self) -> State:
        """The contract's state, for people: an ended one only once everything of the move is gone."""
        return self.machine.shown if self.done.done() else self._visible

    @property
    def waits_for_ledger(self) -> bool:
        """Whether only the ledger's record can tell how it goes on."""
        return self.machine.state in (State.SETTLING, State.RECLAIMING)

    def later(self, milliseconds: float, call: Callable[[], None]) -> None:
        """Calls something unless the move has ended by then."""
        self._timers.append(asyncio.get_running_loop().call_later(milliseconds / 1000, call))

    def limit(self, milliseconds: float) -> None:
        """Gives the move up if it is not committed by then."""
        self.later(milliseconds, lambda: self.fail("deadline", f"not committed within {milliseconds:g} ms"))

    def fail(self, code: str, message: str) -> None:
        """Gives the move up, unless it is committed or over already."""
        if self.abortable:
            self.post(p.Failed(code=code, message=message))

    def post(self, event: Any) -> None:
        """Lets the machine answer an event, and starts what it asks for. Never raises."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._handling = False

    def note(self, step: str) -> None:
        """Remembers when something happened in this move; the last of it is logged when the move has ended.

        By the host's monotonic clock, so that the lines of both its nodes can be put together, and by what
        this thread has worked, which says the same on a busy machine.
        """
        self._steps.append((step, time.monotonic(), time.thread_time()))

    def _handle(self, event: Any) -> None:
        if self.machine.ended:
            return
        self.note(type(event).__name__)
        before = self.machine.state
        try:
            actions = self.machine.handle(event)
        except ProtocolError as error:
            self.log.warning("illegal event", error=str(error), history=self.machine.history[-20:])
            if not isinstance(event, p.Failed):
                self._give_up(error.code, str(error), committed=self.role == "source")
            return
        after = self.machine.state
        if after is not before and self.services.faults is not None:
            self.services.faults.entered(self)
        if not self.machine.ended:
            self._visible = self.machine.shown
        self.changed.set()
        for action in actions:
            self._perform(action)
        if after is not before:
            self._note_state(before)

    def _note_state(self, before: State) -> None:
        if not self._untold:
            asyncio.get_running_loop().call_later(LOG_AFTER_S, self._tell, LOG_TRIES)
        self._untold.append((str(before), str(self.machine.state)))

    def _tell(self, tries: int) -> None:
        """Logs the states since the last time; not while the world stands, unless that lasts.

        A line of the log takes longer than a message to the peer.
        """
        if tries and self.machine.state in STANDING:
            asyncio.get_running_loop().call_later(LOG_AFTER_S, self._tell, tries - 1)
            return
        untold, self._untold = self._untold, []
        for before, after in untold:
            self.log.info("state", before=before, state=after)

    def _perform(self, action: p.Action) -> None:
        try:
            work = self._performers[type(action)](action)
        except WorldMoveError as error:
            self._on_error(error)
            return
        if work is not None:
            if self.services.faults is not None:
                work = self.services.faults.work(self, action, work)
            group = self._work if isinstance(action, WORK) else self._tasks
            group.spawn(work, name=f"{self.role} {self.move_id} {type(action).__name__}")

    def _on_error(self, error: BaseException) -> None:
        if isinstance(error, WorldMoveError):
            self._give_up(error.code, str(error), committed=True)
            return
        self.log.error("unexpected error", exc_info=error)
        self._give_up("internal", f"{type(error).__name__}: {error}", committed=True)

    def _give_up(self, code: str, message: str, *, committed: bool) -> None:
        """Like `fail`; with `committed` also past the commit, where the record then tells how it goes on."""
        if self.abortable or (committed and self.machine.state is State.COMMITTED):
            self.post(p.Failed(code=code, message=message))

    def _send(self, action: p.Send) -> None:
        self.send(action.message)

    def send(self, message: m.Message) -> None:
        """Puts a message in the queue to the peer; order is kept, nothing waits."""
        self._outbox.put_nowait(message)

    def start_peer(self, channel: PeerChannel) -> None:
        """Begins to talk over `channel`."""
        if self.services.faults is not None:
            channel = self.services.faults.channel(self, channel)
        self._channel = channel
        self._writer = self._peer_tasks.spawn(self._write(channel), name=f"{self.role} {self.move_id} write")
        self._peer_tasks.spawn(self._read(channel), name=f"{self.role} {self.move_id} read")

    async def _write(self, channel: PeerChannel) -> None:
        while (message := await self._outbox.get()) is not None:
            await channel.send(m.encode(message))

    async def _read(self, channel: PeerChannel) -> None:
        while True:
            self.post(m.decode(await channel.receive()))

    def _on_peer_error(self, error: BaseException) -> None:
        if isinstance(error, WorldMoveError):
            self.post(p.PeerLost(message=str(error)))
        else:
            self._on_error(error)

    async def _close_peer(self) -> None:
        """Lets what is queued for the peer leave, within the peer's time, then closes."""
        if self._channel is None or self._writer is None:
            return
        self._outbox.put_nowait(None)
        try:
            async with asyncio.timeout(self.services.settings.peer_timeout_ms / 1000):
                await asyncio.wait({self._writer})
                await self._channel.close(1000, str(self.machine.state))
        except (TimeoutError, WorldMoveError):
            self.log.info("peer did not take the last words")
        await self._peer_tasks.cancel()

    async def end(self) -> None:
        """The last thing of a move: the peer hears the rest, and whoever waits for `done` goes on."""
        for timer in self._timers:
            timer.cancel()
        try:
            await self._close_peer()
        finally:
            if not self.done.done():
                self.done.set_result(None)
            self.changed.set()
            steps = [(step, round(at * 1000, 3), round(work * 1000, 3)) for step, at, work in self._steps]
            self.log.info("steps", steps=steps)

    async def abandon(self) -> None:
        """Ends the driver without a word: the node goes at once, the record tells the next one what was."""
        for timer in self._timers:
            timer.cancel()
        for group in (self._work, self._tasks, self._peer_tasks):
            await group.cancel()
        if not self.done.done():
            self.done.set_result(None)

    async def _settle(self, _action: p.SettleRecord) -> None:
        """Writes `aborted` where nothing else stands, and obeys the record; asks until the ledger answers."""
        async with self._ledger_turn:
            while True:
                try:
                    record = await self._settled_record()
                except NotFoundError:
                    self.log.warning("the ledger does not know the session; the move never began")
                    self.post(p.RecordSettled(outcome="aborted"))
                    return
                except LedgerError as error:
                    self.log.warning("ledger does not answer; the move waits for it", error=str(error))
                    await asyncio.sleep(LEDGER_RETRY_S)
                else:
                    break
        self.note_record(record)
        self.post(p.RecordSettled(outcome=self.outcome(record)))

    async def _settled_record(self) -> SessionRecord:
        return await self.services.ledger.settle(self.session_id, self.move_id)

    def outcome(self, record: SessionRecord) -> p.Outcome:
        """What a record that stands means for this side.

        A record that knows nothing of the move: it was never begun, or a later one has taken its place. For
        the source the epoch tells which, as a commit raised it and this side would know of its own reclaim.
        A destination that still has to ask has adopted nothing.
        """
        found = fate(record, self.move_id)
        if found in ("committed", "adopted", "aborted", "reclaimed"):
            return found
        if found == "released":
            return "adopted"
        return "adopted" if self.role == "source" and record.epoch > self.epoch else "aborted"

    @property
    def session_id(self) -> str:
        """The session that moves."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The session's epoch before the move."""
        raise NotImplementedError

    @property
    def slot(self) -> Slot | None:
        """The session's memory and ranks on this side, once there are any."""
        raise NotImplementedError

    def note_record(self, record: SessionRecord) -> None:
        """Keeps the record that stands."""
        raise NotImplementedError
