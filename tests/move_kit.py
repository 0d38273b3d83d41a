"""A whole move without I/O: two machines, the ledger's rules, a network that can break, and drivers.

The drivers follow `worldmove.source` and `worldmove.destination` step by step, but every wait is a `yield`:
whoever runs the simulation decides what happens next. Each call to the ledger has two waits, so that
anything may happen between the write and its reply. A violated promise raises `AssertionError` at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from machine_kit import HELLO
from move_ends import DestinationSide, SourceSide
from move_side import Job, Line, Side

from worldmove import protocol as p
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.ledger.transactions import claim_name


class Move:
    """The whole of it: two sides, one record, one connection.

    Commit and adoption are one write, or, `apart`, two, between which anything may happen.
    """

    def __init__(self, *, live: bool = True, apart: bool = True) -> None:
        self.apart = apart
        self.store = MemoryStore()
        claims = [
            claim_name(self.store, NodeInfo(name=name, url=f"http://{name}", boot_id="boot"))
            for name in ("a", "b")
        ]
        owner = claims[0]
        self.store.put_session(
            SessionRecord(
                session_id=HELLO.session_id,
                epoch=HELLO.epoch,
                owner=owner.name,
                incarnation=owner.incarnation,
                model="toy",
                block=7,
            )
        )
        self.lines: list[Line] = []
        self.hello = msgspec.structs.replace(HELLO, live=live)
        self.source = SourceSide(self, claims[0])
        self.destination = DestinationSide(self, claims[1])

    @property
    def record(self) -> SessionRecord:
        """The session's record, as it stands."""
        record = self.store.session(HELLO.session_id)
        assert record is not None
        return record

    @property
    def sides(self) -> tuple[SourceSide, DestinationSide]:
        return self.source, self.destination

    def start(self) -> None:
        self.source.post(p.Start(hello=self.hello))

    def cut(self, keep: tuple[int, int] = (0, 0)) -> None:
        """The connection breaks: of what was under way to source and destination only `keep` arrives."""
        for side, count in zip(self.sides, keep, strict=True):
            side.closed = True
            side.inbox = deque([*list(side.inbox)[:count], None])

    def crash(self, side: Side) -> None:
        """A node dies; its peer gets what was sent, and then the news."""
        side.crash()
        side.closed = True
        side.inbox.clear()
        side.peer.inbox.append(None)

    def choices(self) -> list[tuple[Side, Job | None]]:
        """All that could happen next: a side's job goes on, or (`None`) its next message arrives."""
        found: list[tuple[Side, Job | None]] = []
        for side in self.sides:
            if side.alive:
                found += [(side, job) for job in side.ready()]
                found += [(side, None)] if side.inbox else []
        return found

    def take(self, side: Side, job: Job | None, answer: Any = None) -> None:
        """Lets one of the `choices` happen; `answer` is a `Fault` for a call, a bool for a passing time."""
        if job is None:
            side.deliver()
        else:
            side.step(job, "none" if answer is None and job.waits == "ledger" else answer)
        self.check()

    def check(self) -> None:
        """What holds at every instant."""
        assert not (self.source.running and self.destination.running), "two worlds run"
        if self.destination.running:
            assert self.record.owner == self.destination.claim.name, "a world runs where it is not owned"
        if self.source.running:
            assert self.record.owner == self.source.claim.name, "a world runs where it is not owned"

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 4000) -> bool:
        """Everything happens in turn, and time passes only where nothing else can. True: `until` holds."""
        for number in range(limit):
            if until():
                return True
            open_ones = self.choices()
            if not open_ones:
                return until()
            able = [(side, job) for side, job in open_ones if job is None or job.waits != "time"]
            side, job = (able or open_ones)[number % len(able or open_ones)]
            self.take(side, job, None if able else True)
        raise AssertionError("the move never ends")
