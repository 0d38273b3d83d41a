"""The moves of one node: asked for, watched, cancelled, and taken in from peers."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.destination import DestinationMove
from worldmove.driver import STANDING, Driver, PeerChannel, Services
from worldmove.errors import (
    AlreadyMovingError,
    ConflictError,
    DeadlineError,
    FramingError,
    LedgerError,
    NotFoundError,
    RejectedError,
    UnauthorizedError,
    WorldMoveError,
)
from worldmove.hosting.ranks import Change
from worldmove.hosting.slots import Slot
from worldmove.intake import admitted, rejection
from worldmove.memory.limits import MOVE_DESCRIPTORS, check_descriptors
from worldmove.node.admitting import Admission
from worldmove.node.asking import impossible, rejected
from worldmove.node.departing import Departures
from worldmove.node.metrics import Metrics
from worldmove.node.moveviews import of_receipt, of_source
from worldmove.node.roster import Roster
from worldmove.node.traces import known, note, trace
from worldmove.sessions import Berth, SessionBook
from worldmove.source import SourceMove
from worldmove.views import ENDED_STATES, DryRun, MigrationPage, MigrationRequest, MigrationView

PROGRESS_S = 0.25
SHOWN_AFTER_S = 0.005
SHOWN_TRIES = 10
"""What happens while a world stands is shown when that is over, or after so many times so long."""
CLOSING_WAITS = 3
"""Times the peer's: a world is taken back within one of them, or taken without a worker within two."""


class Moves:
    """Starts, remembers and ends moves.

    Args:
        services: what drivers get.
        book: the node's sessions.
        admission: for sessions that come.
        metrics: told of each move that ends.
        departures: for sessions that go.
    """

    def __init__(
        self,
        services: Services,
        book: SessionBook,
        admission: Admission,
        metrics: Metrics,
        departures: Departures,
    ) -> None:
        self._services = services
        self._book = book
        self._admission = admission
        self._departures = departures
        self._roster = Roster(services.claim.name, metrics)
        self._metrics = metrics
        self._asking: dict[str, asyncio.Future[MigrationView]] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._roster)

    async def migrate(self, request: MigrationRequest, key: str | None) -> MigrationView:
        """Starts a move; returns once the destination has admitted it.

        Raises:
            NotFoundError, NotOwnerError, SamePlaceError, AlreadyMovingError, ValidationError,
            IdempotencyMismatchError, PeerError, and whatever the destination rejects the move with.
        """
        move_id = f"move-{secrets.token_hex(8)}"
        if key is not None:
            digest = hashlib.sha256(msgspec.json.encode(request)).hexdigest()
            earlier = await self._services.ledger.idempotent(key, digest, move_id)
            if earlier is not None and earlier != move_id:
                asked = self._asking.get(earlier)
                return await (self._earlier(request, earlier) if asked is None else asyncio.shield(asked))
        # A task of its own: who asks again shares its answer, and who goes away leaves no key behind.
        asking = self._asking[move_id] = asyncio.ensure_future(self._ask(request, move_id, key))
        asking.add_done_callback(lambda done: self._answered(move_id, done))
        return await asyncio.shield(asking)

    async def _earlier(self, request: MigrationRequest, move_id: str) -> MigrationView:
        try:
            return await self.migration(move_id)
        except NotFoundError:
            session = self._book.get(request.session_id)
            manifest = session.slot.manifest if session is not None else None
            return of_receipt(await trace(self._services, request, move_id, manifest))

    async def _ask(self, request: MigrationRequest, move_id: str, key: str | None) -> MigrationView:
        try:
            move = await self._start(request, move_id)
            await asyncio.shield(move.admission)
        except WorldMoveError:
            if key is not None:
                await self._services.ledger.forget(key, move_id)
            raise
        await note(move)
        return of_source(move)

    def _answered(self, move_id: str, asking: asyncio.Future[MigrationView]) -> None:
        del self._asking[move_id]
        if not asking.cancelled():
            asking.exception()

    async def _start(self, request: MigrationRequest, move_id: str) -> SourceMove:
        self._check_open()
        session, node, devices = await self._departures.locate(request)
        hello = self._departures.hello(session, request, move_id, devices)
        connect = partial(self._departures.connect, node, move_id)
        check_descriptors(MOVE_DESCRIPTORS, spare=0)
        if session.move is not None:
            raise AlreadyMovingError(
                f"session {session.id!r} is in move {session.move.move_id}", migration_id=session.move.move_id
            )
        move = SourceMove(self._services, session, hello, node.name, connect)
        session.begin_move(move)
        self._roster.keep(move)
        move.begin()
        return move

    async def dry_run(self, request: MigrationRequest) -> DryRun:
        """Whether the destination would admit the move now; nothing is reserved."""
        self._check_open()
        return await self._departures.dry_run(request)

    def _check_open(self) -> None:
        if self._closing:
            raise RejectedError("this node is shutting down", retry_after_ms=1000)

    async def migration(self, move_id: str) -> MigrationView:
        """A move that runs here, ended here, or of which the ledger has a receipt.

        Raises:
            NotFoundError: nobody knows it.
        """
        move = self._roster.running(move_id)
        if move is not None:
            return self._roster.view(move)
        ended = self._roster.ended(move_id)
        if ended is not None:
            return await self._with_receipt(ended)
        receipt = await self._services.ledger.receipt(move_id)
        if receipt is None:
            raise NotFoundError(f"migration {move_id!r} is not known")
        return of_receipt(receipt if receipt.state in ENDED_STATES else await known(self._services, receipt))

    async def _with_receipt(self, view: MigrationView) -> MigrationView:
        """An ended move as seen from its destination: the source left the receipt in the ledger."""
        if view.receipt is not None:
            return view
        try:
            left = await self._services.ledger.receipt(view.id)
        except LedgerError:
            return view
        # The source may have left no more than its note so far.
        written = left is not None and left.state in ENDED_STATES
        return msgspec.structs.replace(view, receipt=left) if written else view

    async def migrations(self, after: str | None, limit: int) -> MigrationPage:
        """Running moves, then ended ones, newest first."""
        return self._roster.page(after, limit)

    async def events(self, move_id: str) -> AsyncIterator[MigrationView]:
        """The move as it goes on; ends with its last state."""
        last: MigrationView | None = None
        while True:
            move = self._roster.running(move_id)
            # Looked at before the view is taken: whoever ends while it is handed out has another, last one.
            over = move is None or move.done.done()
            view = await self.migration(move_id)
            if view != last:
                last = view
                yield view
            if move is None or over:
                return
            await _either(move.changed, PROGRESS_S)
            await _passed(move)

    async def cancel(self, move_id: str) -> MigrationView:
        """Gives a move up and waits until the source has its world back.

        Raises:
            NotFoundError: nobody knows it.
            ConflictError: it is committed or over.
        """
        move = self._roster.running(move_id)
        if move is None:
            view = await self.migration(move_id)
            raise ConflictError(f"migration {move_id!r} has ended as {view.state}", state=view.state)
        if not move.abortable:
            raise ConflictError(f"migration {move_id!r} is {move.machine.shown} and cannot be cancelled")
        move.fail("cancelled", "cancelled by an operator")
        await asyncio.shield(move.done)
        return self._roster.view(move)

    async def serve_peer(self, channel: PeerChannel) -> None:
        """The destination's side of a move, from the peer's first message to the end.

        Raises:
            FramingError: the first message is no hello, or of another move than the address says.
            UnauthorizedError: the move is known here already, or is said to be this node's own and is not.
            DeadlineError: the peer says nothing.
        """
        timeout_ms = self._services.settings.peer_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                hello = m.decode(await channel.receive())
        except TimeoutError as error:
            raise DeadlineError(f"no hello came within {timeout_ms:g} ms") from error
        if not isinstance(hello, m.Hello) or hello.move_id != channel.move_id:
            raise FramingError("the first message must be the hello of the move in the address")
        refusal = impossible(hello)
        if hello.dry_run or refusal is not None:
            await channel.send(m.encode(refusal or await self._verdict(hello)))
            return
        if not self._roster.may_open(hello.move_id, within=hello.source == self._services.claim.name):
            raise UnauthorizedError(f"move {hello.move_id!r} was opened before, or never asked for here")
        move = DestinationMove(self._services, hello, self._admit)
        move.limit(hello.deadline_ms + self._services.settings.peer_timeout_ms)
        self._roster.keep(move)
        move.done.add_done_callback(lambda _done: self._services.intake.over(hello.move_id))
        move.post(hello)
        move.start_peer(channel)
        await asyncio.shield(move.done)

    async def _admit(self, hello: m.Hello) -> Berth:
        try:
            self._check_open()
            return await self._admission.admit(hello)
        except WorldMoveError as error:
            self._services.intake.rejected[error.code] += 1
            self._metrics.rejected(error.code)
            raise

    async def _verdict(self, hello: m.Hello) -> m.Message:
        try:
            await self._admission.look(hello)
            path = self._admission.check(hello)
            verdict = self._services.intake.judge(hello, path)
        except WorldMoveError as error:
            return rejected(error)
        if not verdict.admissible:
            return rejected(rejection(verdict))
        return m.Admitted(
            incarnation=self._services.claim.incarnation, path=path, lanes=0, **admitted(verdict)
        )

    def on_slot_change(self, slot: Slot, change: Change) -> None:
        """A standby that a move has bound may have lost its worker."""
        if slot.session_id is None and slot.bound is not None and change in ("lost", "left", "revised"):
            move = self._roster.arriving(slot.bound)
            if move is not None:
                move.fail("worker-lost", f"the standby's worker {change}")

    async def close(self) -> None:
        """Takes no more moves; those before their pause are rolled back, others finish (`Roster.drained`)."""
        self._closing = True
        for move in self._roster:
            if move.machine.state not in (p.State.PAUSING, p.State.FINISHING, p.State.VERIFYING):
                move.fail("shutting-down", "a node of the move is shutting down")
        await self._roster.drained(CLOSING_WAITS * self._services.settings.peer_timeout_ms / 1000)

    async def abort(self) -> None:
        """Ends every driver at once; the ledger's records settle what was under way."""
        self._closing = True
        for move in self._roster:
            await move.abandon()


async def _passed(move: Driver) -> None:
    """Returns when the world stands no more, or that lasts: to show a step takes as long as the step."""
    for _ in range(SHOWN_TRIES):
        if move.machine.state not in STANDING:
            return
        await asyncio.sleep(SHOWN_AFTER_S)


async def _either(changed: asyncio.Event, seconds: float) -> None:
    changed.clear()
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return
