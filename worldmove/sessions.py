"""The sessions of one node, the berths for those that come, and the news of both."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from worldmove import messages as m
from worldmove.feed import Feed
from worldmove.hosting.host import Host
from worldmove.hosting.memory import Holding
from worldmove.hosting.ranks import Change
from worldmove.hosting.slots import Slot
from worldmove.ledger.records import SessionRecord
from worldmove.page.messages import Ended, Moved
from worldmove.rates import SPAN_S
from worldmove.views import SessionEvent, SessionState, SessionView

MAX_FEEDS = 20_000


class Session:
    """One session that this node holds.

    Attributes:
        slot: memory and ranks.
        settled: set while no move stands in its record.
        move: the driver of the move away from here, while there is one.
    """

    def __init__(self, slot: Slot, record: SessionRecord, book: SessionBook) -> None:
        self.slot = slot
        self.settled = asyncio.Event()
        self.record = record
        self.move: Any = None
        self._book = book
        self._dirty_rate: float | None = None
        self._dirtied_at = 0.0

    @property
    def record(self) -> SessionRecord:
        """The ledger's record, as this node last saw it."""
        return self._record

    @record.setter
    def record(self, record: SessionRecord) -> None:
        self._record = record
        if record.phase in ("owned", "ended"):
            self.settled.set()
        else:
            self.settled.clear()

    @property
    def dirty_rate(self) -> float | None:
        """Bytes to send per second of generating, as the last ten minutes' moves show; `None`: unknown.

        A session that no worker is attached to stays as it is.
        """
        if not self.slot.ranks.attended:
            return 0.0
        return self._dirty_rate if time.monotonic() - self._dirtied_at <= SPAN_S else None

    @dirty_rate.setter
    def dirty_rate(self, rate: float | None) -> None:
        self._dirty_rate, self._dirtied_at = rate, time.monotonic()

    @property
    def id(self) -> str:
        """The session's id."""
        return self.record.session_id

    @property
    def state(self) -> SessionState:
        """What a viewer or operator wants to know."""
        state = self.slot.ranks.state
        if state == "paused" and self.move is not None and self.move.waits_for_ledger:
            return "fenced"
        return "ended" if state == "moved" else state

    def view(self, node: str, url: str) -> SessionView:
        """As shown by the node that holds it."""
        manifest = self.slot.manifest
        return SessionView(
            id=self.id,
            model=manifest.model,
            owner=node,
            owner_url=url,
            epoch=self.record.epoch,
            block=self.slot.ranks.block,
            state=self.state,
            revision=manifest.revision,
            bytes=self.slot.holding.leaf_map.total,
            ranks=len(manifest.ranks),
            block_ms=manifest.block_ms,
            horizon_ms=manifest.horizon_ms,
            dirty_bytes_per_s=self.dirty_rate,
            snapshot_block=self.slot.spare.block if self.slot.spare is not None else None,
            endpoint=self.record.endpoint,
            migration_id=self.move.move_id if self.move is not None else None,
        )

    def begin_move(self, move: Any) -> None:
        """From now on the session is in a move."""
        self.move = move
        self._book.publish(self, "moving")

    def end_move(self, move: Any) -> None:
        """The move has ended; the session is free for the next one, if it is still here."""
        if self.move is move:
            self.move = None
            if self._book.get(self.id) is self:
                self._book.publish(self, "state")

    def leave(self, destination: str, endpoint: str | None) -> None:
        """Tells the worker where its session went, and gives up memory and name here."""
        self._book.publish(self, "moved", owner=destination, endpoint=endpoint)
        self._book.remove(self, Moved(destination, endpoint))


class Way(NamedTuple):
    """How the bytes of a session will come.

    Attributes:
        path: its name.
        in_case: whether lanes of the staged path are wanted, too, in case that fails.
        reason: why a better path is not tried.
    """

    path: str
    in_case: bool = False
    reason: str = ""

    @property
    def wants_lanes(self) -> bool:
        """Whether the source is to offer lanes of the staged path."""
        return self.path == "staged" or self.in_case


class Berth:
    """Reserved memory for one session that comes: a standby's, or memory without a worker.

    Attributes:
        way: how the bytes will come.
        over: completes when the session has come, or the berth is vacant again.
        returning: whether the move has failed, so that a standby will be vacant as soon as it is wiped.
    """

    def __init__(self, slot: Slot, way: Way, hello: m.Hello, book: SessionBook, *, bare: bool) -> None:
        self.slot = slot
        self.way = way
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.returning = False
        self._move_id = hello.move_id
        self._coming = hello.session_id
        self._book = book
        self._bare = bare
        self._session: Session | None = None

    @property
    def memory(self) -> Holding:
        """Where the bytes go."""
        return self.slot.holding

    @property
    def attended(self) -> bool:
        """Whether a worker is there for every rank."""
        return self.slot.ranks.attended

    @property
    def endpoint(self) -> str | None:
        """Where the session will be served from here."""
        return self.slot.manifest.endpoint

    def returns_before(self, hello: m.Hello) -> bool:
        """Whether a standby comes back from here that `hello` may wait for.

        A session that asks anew has left its former move, whether that has been heard of here or not.
        """
        return not self._bare and (self.returning or self._coming == hello.session_id)

    def load(self, block: int, host_states: tuple[bytes, ...]) -> None:
        """Before the commit: block and host states into the page; nobody is told."""
        self._book.host.load(self.slot, block, host_states)

    async def keep(self) -> None:
        """Before the commit: returns when the keeper has all that another incarnation needs to adopt."""
        await self._book.host.keep(self.slot)

    async def answer(self, timeout_s: float) -> None:
        """Before the commit: returns when every worker has given a sign of life; raises as `RollCall.ask`.

        Memory without a worker has nobody to ask.
        """
        if not self._bare:
            await self.slot.ranks.roll.ask(timeout_s)

    def install(self, record: SessionRecord, hello: m.Hello, dirty_rate: float | None) -> None:
        """The record says `adopted`: the slot is the session's, and its worker may generate."""
        host = self._book.host
        host.adopt(self.slot, record.session_id, record.epoch, hello.manifest, hello.seed)
        self._session = self._book.add(self.slot, record)
        self._session.dirty_rate = dirty_rate
        self._end()

    def follow(self, record: SessionRecord) -> None:
        """The record of the installed session has changed."""
        if self._session is not None and self._session.record.epoch == record.epoch:
            self._session.record = record

    def vacate(self) -> None:
        """The session did not come; memory has been wiped. A standby waits again, bare memory goes."""
        self._book.host.unbind(self.slot, self._move_id)
        if self._bare:
            self._book.host.close_slot(self.slot, Ended("the session did not come"))
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class SessionBook:
    """All sessions of a node by id, and the feed of each. `on_added` hears of each that begins here."""

    def __init__(
        self, node: str, url: str, host: Host, on_added: Callable[[Session], None] | None = None
    ) -> None:
        self.host = host
        self._on_added = on_added
        self._node = node
        self._url = url
        self._sessions: dict[str, Session] = {}
        self._busy: dict[str, Session] = {}
        self._feeds: OrderedDict[str, Feed[SessionEvent]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def states(self) -> Counter[str]:
        """How many sessions are in each state; most of a large number have no worker: counted only."""
        states = Counter[str](str(session.state) for session in self._busy.values())
        states["unattended"] += len(self._sessions) - len(self._busy)
        return states

    def _note(self, session: Session) -> None:
        """Keeps in mind whether the session's state has to be looked at."""
        here = self._sessions.get(session.id) is session
        if here and (session.move is not None or session.slot.ranks.state != "unattended"):
            self._busy[session.id] = session
        else:
            self._busy.pop(session.id, None)

    def get(self, session_id: str) -> Session | None:
        """The session, if this node holds it."""
        return self._sessions.get(session_id)

    def add(self, slot: Slot, record: SessionRecord) -> Session:
        """A session begins here, by registration or adoption."""
        session = Session(slot, record, self)
        self._sessions[record.session_id] = session
        self.feed(record.session_id).open()
        self.publish(session, "registered")
        if self._on_added is not None:
            self._on_added(session)
        return session

    def remove(self, session: Session, answer: Moved | Ended) -> None:
        """A session ends here; its workers hear why, and its memory goes."""
        now = self._sessions.get(session.id)
        if now is session:
            del self._sessions[session.id]
            self._busy.pop(session.id, None)
        self.host.close_slot(session.slot, answer)
        if now is not None and now is not session:
            # It has moved within this node: what the world is now is the last that its feed tells.
            self.publish(now, "state")

    def feed(self, session_id: str) -> Feed[SessionEvent]:
        """The news of a session; kept for a while after it has left."""
        feed = self._feeds.setdefault(session_id, Feed())
        self._feeds.move_to_end(session_id)
        while len(self._feeds) > max(MAX_FEEDS, 2 * len(self._sessions)):
            _, oldest = self._feeds.popitem(last=False)
            oldest.close()
        return feed

    def publish(
        self, session: Session, kind: Any, *, owner: str | None = None, endpoint: str | None = None
    ) -> None:
        """Tells whoever reads the session's feed what has changed."""
        self._note(session)
        feed = self.feed(session.id)
        view = session.view(owner or self._node, self._url)
        if owner is not None:
            view = SessionView(
                **{name: getattr(view, name) for name in view.__struct_fields__}
                | {"owner": owner, "owner_url": None, "endpoint": endpoint, "migration_id": None}
            )
        feed.publish(SessionEvent(seq=feed.last + 1, type=kind, session=view))

    def on_slot_change(self, slot: Slot, change: Change) -> None:
        """What happened to the workers of a slot that holds a session."""
        session = self._sessions.get(slot.id)
        if session is None or session.slot is not slot:
            return
        if session.move is not None and change == "revised":
            session.move.fail("revised", "the session's regions were revised during the move")
        if session.move is not None and change in ("lost", "left"):
            session.move.fail("worker-lost", "the session's worker is gone")
        self.publish(session, "state")
