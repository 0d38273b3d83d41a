"""What both drivers share: who may give up when, what a record means, and the talk with the peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from ledger_kit import node_info
from machine_kit import EVENTS, HELLO, POLICY, facts

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.config import Settings
from worldmove.directing import DirectRates
from worldmove.driver import Driver, Services
from worldmove.errors import ConnectionLostError, LedgerError, NoWorkerError
from worldmove.ledger import records
from worldmove.ledger.memory import MemoryLedger, MemoryStore
from worldmove.ledger.records import Claim, MoveRef, SessionRecord
from worldmove.machine import Role
from worldmove.protocol import ENDED, State
from worldmove.reaching import Reaches

A, B, C = Claim("a", 1), Claim("b", 1), Claim("c", 1)
MOVE = MoveRef(
    move_id=HELLO.move_id, source="a", source_incarnation=1, destination="b", destination_incarnation=1
)
SECOND = MoveRef(
    move_id="move-2", source="b", source_incarnation=1, destination="c", destination_incarnation=1
)
ROOT = "ab" * 32


def owned(claim: Claim = A, epoch: int = HELLO.epoch) -> SessionRecord:
    return SessionRecord(
        session_id=HELLO.session_id, epoch=epoch, owner=claim.name, incarnation=claim.incarnation, model="toy"
    )


class Wire:
    """One end of a connection between two drivers, message by message."""

    move_id = HELLO.move_id

    def __init__(self) -> None:
        self.peer: Wire = self
        self.sent: list[bytes] = []
        self.closed: list[str] = []
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._lost = False

    def put(self, data: bytes) -> None:
        self._inbox.put_nowait(data)

    def lose(self) -> None:
        self._lost = True
        self._inbox.put_nowait(None)

    async def send(self, message: bytes) -> None:
        if self._lost:
            raise ConnectionLostError("gone")
        self.sent.append(message)

    async def receive(self) -> bytes:
        data = await self._inbox.get()
        if data is None:
            raise ConnectionLostError("gone")
        return data

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.closed.append(f"{code} {reason}")


class FlakyLedger(MemoryLedger):
    """Fails as often as it is told to, before anything is written."""

    failures = 0

    async def settle(self, session_id: str, move_id: str) -> SessionRecord:
        if self.failures:
            self.failures -= 1
            raise LedgerError("no answer")
        return await super().settle(session_id, move_id)


class Side(Driver):
    """A driver whose work does nothing: what it decides is looked at."""

    def __init__(self, role: Role, services: Services) -> None:
        self.role = role
        self.performed: list[p.Action] = []
        self.standing: SessionRecord | None = None
        super().__init__(services, HELLO.move_id, POLICY)

    def _actions(self) -> Any:
        kinds = set(p.Action.__subclasses__()) - {p.Send, p.SettleRecord}
        return super()._actions() | dict.fromkeys(kinds, self.performed.append)

    def at(self, state: State, **changes: Any) -> Side:
        self.machine.state = state
        self.machine.facts = facts(self.role, state, **changes)
        return self

    @property
    def session_id(self) -> str:
        return HELLO.session_id

    @property
    def epoch(self) -> int:
        return HELLO.epoch

    def note_record(self, record: SessionRecord) -> None:
        self.standing = record

    async def settled(self) -> None:
        await self._tasks.join()


@pytest_asyncio.fixture
async def ledgers() -> AsyncIterator[dict[str, FlakyLedger]]:
    store = MemoryStore()
    made = {role: FlakyLedger(store) for role in ("source", "destination")}
    await made["source"].claim(node_info("a"))
    await made["destination"].claim(node_info("b"))
    await made["source"].create(owned())
    yield made
    for ledger in made.values():
        await ledger.close()


def side(role: Role, ledger: FlakyLedger | None = None) -> Side:
    services = Services(
        settings=Settings(name="n", ledger="sqlite:///x.db", run_dir=Path("run")),
        claim=A if role == "source" else B,
        url="http://127.0.0.1:8001",
        boot_id="boot",
        ledger=cast(Any, ledger),
        lanes=cast(Any, None),
        direct={},
        direct_rates=DirectRates(),
        reaches=Reaches({}),
        rings=cast(Any, None),
        executors=cast(Any, None),
        intake=cast(Any, None),
        outlet=cast(Any, None),
        door=cast(Any, None),
        turns=asyncio.Semaphore(1),
        note_rate=lambda _path, _bytes, _seconds: None,
    )
    return Side(role, services)


def later(record: SessionRecord) -> SessionRecord:
    """Another move has begun since, by whoever owns the session, and has ended."""
    claim = record.holder
    ref = MoveRef(
        move_id="move-2",
        source=claim.name,
        source_incarnation=claim.incarnation,
        destination="c",
        destination_incarnation=1,
    )
    return records.abort(records.begin(record, ref), claim)


BEGUN = records.begin(owned(), MOVE)
COMMITTED = records.commit(BEGUN, block=5, revision=1, root=ROOT)
ADOPTED = records.adopt(COMMITTED, B, endpoint=None)
RELEASED = records.release(ADOPTED, B)
RECLAIMED = records.reclaim(COMMITTED, A)
ABORTED = records.abort(BEGUN, A)
NEXT = records.begin(RELEASED, SECOND)
BACK = owned(A, HELLO.epoch + 2)

OUTCOMES = [
    ("committed", COMMITTED, "committed", "committed"),
    ("adopted", ADOPTED, "adopted", "adopted"),
    ("released", RELEASED, "adopted", "adopted"),
    ("released, and the next move runs", NEXT, "adopted", "adopted"),
    ("aborted", ABORTED, "aborted", "aborted"),
    ("reclaimed", RECLAIMED, "reclaimed", "reclaimed"),
    ("never begun", owned(), "aborted", "aborted"),
    ("never begun, another ended", later(owned()), "aborted", "aborted"),
    ("aborted, then another", later(ABORTED), "aborted", "aborted"),
    ("released, then another", later(RELEASED), "adopted", "aborted"),
    ("released, and came back by another", BACK, "adopted", "aborted"),
    ("reclaimed, then brought here by another", owned(B, HELLO.epoch + 3), "adopted", "aborted"),
]  # fmt: skip
"""What stands in the record, and what it means for a source and a destination that have to ask."""


@pytest.mark.parametrize(
    ("what", "record", "source", "destination"), OUTCOMES, ids=[one[0] for one in OUTCOMES]
)
async def test_what_a_record_means(
    what: str, record: SessionRecord, source: p.Outcome, destination: p.Outcome
) -> None:
    assert side("source").outcome(record) == source, what
    assert side("destination").outcome(record) == destination, what


@pytest.mark.parametrize("role", ["source", "destination"])
@pytest.mark.parametrize("state", [state for state in State if state not in ENDED])
async def test_who_may_give_up(role: Role, state: State) -> None:
    """An operator or a deadline only before the commit; an error of the driver's own work also after it."""
    asked = side(role).at(state)
    before = asked.machine.state
    late = state in (State.COMMITTED, State.ADOPTED, State.SETTLING, State.RECLAIMING)
    if not late and not (role == "destination" and state is State.PAUSING):
        assert asked.abortable
        return
    asked.fail("cancelled", "by an operator")
    assert asked.machine.state is before
    broken = side(role).at(state)
    broken._on_error(NoWorkerError("the standby's worker died"))
    assert broken.machine.state is (State.RECLAIMING if state is State.COMMITTED else before)


async def test_a_failed_adoption_lets_the_source_have_its_world_back() -> None:
    destination = side("destination").at(State.COMMITTED)
    wire = Wire()
    destination.start_peer(wire)
    destination._on_error(NoWorkerError("the standby's worker died"))
    assert [type(action) for action in destination.performed] == [p.AwaitReclaim]
    await destination._close_peer()
    assert m.decode(wire.sent[0]) == m.Abort(code="no-worker", message="the standby's worker died")


async def test_an_illegal_message_ends_the_move_before_the_commit(ledgers: dict[str, FlakyLedger]) -> None:
    source = side("source", ledgers["source"]).at(State.COPYING)
    source.post(EVENTS["Adopted"])
    assert source.machine.facts.code == "protocol"
    await source.settled()
    assert source.machine.state is State.ABORTED
    assert source.standing == owned()


async def test_an_illegal_message_after_the_commit_sends_the_source_to_the_record() -> None:
    source = side("source").at(State.COMMITTED)
    source.post(EVENTS["Landed"])
    assert source.machine.state is State.RECLAIMING
    assert [type(action) for action in source.performed] == [p.AwaitAdoption]


async def test_an_illegal_message_does_not_stop_a_destination_that_adopts() -> None:
    destination = side("destination").at(State.COMMITTED)
    destination.post(EVENTS["Hello"])
    assert destination.machine.state is State.COMMITTED
    destination.post(EVENTS["RecordAdopted"])
    assert destination.machine.state is State.ADOPTED


async def test_settling_asks_until_the_ledger_answers(ledgers: dict[str, FlakyLedger]) -> None:
    await ledgers["source"].swap(owned(), BEGUN)
    ledgers["source"].failures = 2
    source = side("source", ledgers["source"]).at(State.VERIFYING)
    source.fail("deadline", "too late")
    assert source.waits_for_ledger
    assert source.machine.shown is State.VERIFYING
    await source.settled()
    assert source.machine.state is State.ABORTED
    assert source.standing is not None
    assert source.standing.outcome == "aborted"


async def test_of_two_sides_that_settle_both_read_the_same(ledgers: dict[str, FlakyLedger]) -> None:
    await ledgers["source"].swap(owned(), BEGUN)
    sides = [side(role, ledgers[role]).at(State.VERIFYING) for role in ("source", "destination")]
    for one in sides:
        one.fail("cancelled", "by both")
    for one in sides:
        await one.settled()
        assert one.machine.state is State.ABORTED
    assert sides[0].standing == sides[1].standing
    assert [type(action) for action in sides[0].performed][-2:] == [p.ResumeWorld, p.Finish]
    assert [type(action) for action in sides[1].performed][-3:] == [p.AbortPath, p.WipeMemory, p.Finish]


async def test_a_commit_that_stands_is_obeyed(ledgers: dict[str, FlakyLedger]) -> None:
    await ledgers["source"].swap(owned(), BEGUN)
    await ledgers["destination"].swap(BEGUN, COMMITTED)
    source = side("source", ledgers["source"]).at(State.VERIFYING)
    source.fail("deadline", "too late")
    await source.settled()
    assert source.machine.state is State.RECLAIMING
    assert p.ResumeWorld() not in source.performed


async def test_messages_leave_in_order_and_all_before_the_end() -> None:
    source = side("source")
    wire = Wire()
    source.start_peer(wire)
    source.post(p.Start(hello=HELLO))
    for number in range(50):
        source.send(m.TableEnd(number=number + 1))
    await source._close_peer()
    found = [m.decode(data) for data in wire.sent]
    assert found == [HELLO, *(m.TableEnd(number=number + 1) for number in range(50))]
    assert wire.closed == ["1000 requested"]


async def changes(one: Driver, state: State) -> None:
    while one.machine.state is not state:
        one.changed.clear()
        await one.changed.wait()


@pytest.mark.parametrize("garbage", [b"", b"\x01", b"\x02\x80", b"\x01" + b"\xff" * 50])
async def test_a_peer_that_talks_nonsense_is_lost(garbage: bytes) -> None:
    source = side("source").at(State.COMMITTED)
    wire = Wire()
    source.start_peer(wire)
    wire.put(garbage)
    await changes(source, State.RECLAIMING)
    assert source.machine.facts.code == "peer"
    await source.abandon()


async def test_a_lost_connection_is_a_lost_peer_and_words_to_nobody_do_not_hang() -> None:
    source = side("source")
    wire = Wire()
    source.start_peer(wire)
    wire.lose()
    await changes(source, State.ABORTED)
    source.send(m.Prepared())
    await source._close_peer()
    assert source.machine.facts.code == "peer"


async def test_nothing_happens_after_the_end() -> None:
    source = side("source")
    source.post(p.Failed(code="cancelled", message="at once"))
    history = list(source.machine.history)
    for event in EVENTS.values():
        source.post(event)
    assert source.machine.history == history
    assert source.performed == [p.Finish(code="cancelled", message="at once")]


async def test_an_ended_state_is_shown_only_when_everything_is_gone() -> None:
    source = side("source")
    source.post(p.Failed(code="cancelled", message="at once"))
    assert source.machine.state is State.ABORTED
    assert source.visible is State.REQUESTED
    await source.abandon()
    assert source.visible is State.ABORTED
    assert source.done.done()


async def test_events_of_events_wait_for_their_turn() -> None:
    """What a performer posts is answered after the actions of the event before it."""
    source = side("source").at(State.ADMITTED)
    order: list[str] = []

    def note(_action: p.Action) -> None:
        source.post(p.PreparedHere())
        order.append(str(source.machine.state))

    source._performers = {**source._performers, p.NotePrepared: note}
    source.post(m.Prepared())
    assert order == ["prepared"]
    assert source.machine.state is State.COPYING


async def test_an_unexpected_error_of_an_action_is_a_failure_of_the_move(
    ledgers: dict[str, FlakyLedger],
) -> None:
    source = side("source", ledgers["source"]).at(State.PAUSING)

    async def broken(_action: Any) -> None:
        raise RuntimeError("a bug")

    source._performers = {**source._performers, p.ReadTable: broken}
    source.post(p.WorldPaused(block=3))
    await source._work.join()
    assert source.machine.facts.code == "internal"
    await source.settled()
    assert source.machine.state is State.ABORTED
