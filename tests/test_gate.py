"""The receiver's gate: its pure parts by property, its asyncio part with real tasks."""

from __future__ import annotations

import asyncio
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worldmove.errors import ConfigError, ValidationError
from worldmove.gate import MIN_BATCH, Bucket, Gate, Grant, Queue, Request

sizes = st.integers(1, 1 << 26)
rates = st.floats(1e3, 1e10)
bursts = st.integers(1, 1 << 26)
gaps = st.floats(0, 10)


@given(rate=rates, burst=bursts, steps=st.lists(st.tuples(sizes, gaps), min_size=1, max_size=40))
def test_no_interval_grants_more_than_its_share(
    rate: float, burst: int, steps: list[tuple[int, float]]
) -> None:
    bucket, now = Bucket(rate, burst), 0.0
    taken: list[tuple[float, int]] = []
    for nbytes, gap in steps:
        now += gap
        now += bucket.delay(now)
        bucket.take(nbytes, now)
        taken.append((now, nbytes))
    for first in range(len(taken)):
        total = 0
        for at, nbytes in taken[first:]:
            allowed = burst + rate * (at - taken[first][0])
            assert total <= allowed * (1 + 1e-9) + 1  # without the grant that is being given
            total += nbytes


@given(rate=rates, burst=bursts, grants=st.lists(sizes, min_size=1, max_size=40))
def test_a_backlog_is_served_at_the_full_rate(rate: float, burst: int, grants: list[int]) -> None:
    bucket, now = Bucket(rate, burst), 5.0
    for nbytes in grants:
        now += bucket.delay(now)
        bucket.take(nbytes, now)
    served_before_last = sum(grants[:-1])
    due = max(0.0, (served_before_last - burst) / rate)
    assert now - 5.0 <= due * (1 + 1e-6) + 1e-6


@given(rate=rates, burst=bursts, nbytes=sizes, back=st.floats(0, 100))
def test_time_never_runs_backwards_in_a_bucket(rate: float, burst: int, nbytes: int, back: float) -> None:
    bucket = Bucket(rate, burst)
    bucket.take(nbytes, 1000.0)
    before = bucket.delay(1000.0)
    assert bucket.delay(1000.0 - back) == before
    assert bucket.delay(1000.0) == before


@given(burst=bursts, nbytes=sizes)
def test_a_refund_makes_good(burst: int, nbytes: int) -> None:
    bucket = Bucket(1e6, burst)
    bucket.take(burst, 0.0)
    level = bucket.delay(0.0)
    bucket.take(nbytes, 0.0)
    bucket.refund(nbytes, 0.0)
    assert math.isclose(bucket.delay(0.0), level, abs_tol=1e-6)


class Line(RuleBasedStateMachine):
    """A queue against a model: two lines, a set of grants that are out, conservation of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 1000
        self.bucket = Bucket(500.0, 300)
        self.queue = Queue(self.bucket, self.limit)
        self.now = 0.0
        self.lines: dict[bool, deque[Request]] = {True: deque(), False: deque()}
        self.out: dict[int, Request] = {}
        self.spent = 0.0

    def serve(self) -> float | None:
        granted, wait = self.queue.due(self.now)
        for request in granted:
            line = self.lines[True] or self.lines[False]
            assert line.popleft() == request
            assert not self.out or sum(r.nbytes for r in self.out.values()) + request.nbytes <= self.limit
            self.out[request.number] = request
            self.spent += request.nbytes
        return wait

    @rule(nbytes=st.integers(1, 2000), urgent=st.booleans())
    def ask(self, nbytes: int, urgent: bool) -> None:
        self.lines[urgent].append(self.queue.ask(nbytes, urgent=urgent))
        self.serve()

    @rule(gap=gaps)
    def wait(self, gap: float) -> None:
        self.now += gap
        self.serve()

    @precondition(lambda self: self.out)
    @rule(pick=st.randoms(use_true_random=False), used=st.booleans())
    def back(self, pick: object, used: bool) -> None:
        request = self.out.pop(pick.choice(sorted(self.out)))  # type: ignore[attr-defined]
        if used:
            self.queue.give_back(request)
        else:
            self.queue.undo(request, self.now)
            self.spent -= request.nbytes
        self.serve()

    @precondition(lambda self: any(self.lines.values()))
    @rule(pick=st.randoms(use_true_random=False))
    def leave(self, pick: object) -> None:
        everyone = [request for line in self.lines.values() for request in line]
        request = pick.choice(everyone)  # type: ignore[attr-defined]
        for line in self.lines.values():
            if request in line:
                line.remove(request)
        self.queue.withdraw(request)
        self.serve()

    @invariant()
    def conserves(self) -> None:
        assert self.queue.outstanding == sum(request.nbytes for request in self.out.values())
        assert self.queue.waiting == sum(map(len, self.lines.values()))
        assert self.spent <= 300 + 500.0 * self.now + 2000 + 1

    def teardown(self) -> None:
        """Nobody starves: with time passing and grants coming back, every line runs empty."""
        turns = 2 * (self.queue.waiting + len(self.out)) + 2
        for _ in range(turns):
            for request in self.out.values():
                self.queue.give_back(request)
            self.out.clear()
            wait = self.serve()
            self.now += wait or 0.0
        assert self.queue.waiting == 0


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_rate_grants_come_at_once() -> None:
    gate = Gate(None, 1024)
    async with gate.grant(1 << 30), gate.grant(1 << 30) as second:
        assert second.nbytes == 1 << 30
        assert gate.view().outstanding_bytes == 2 << 30
    view = gate.view()
    assert (view.outstanding_bytes, view.granted_bytes, view.waiting) == (0, 2 << 30, 0)
    assert gate.batch_bytes(1 << 24) == 1 << 24


async def test_the_outstanding_bound_holds_and_urgent_goes_first() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    order: list[str] = []

    async def want(name: str, nbytes: int, *, urgent: bool = False) -> Grant:
        grant = await gate.acquire(nbytes, urgent=urgent)
        order.append(name)
        return grant

    first = await want("first", 80)
    tasks = [
        asyncio.create_task(want("large", 150)),
        asyncio.create_task(want("small", 5)),
        asyncio.create_task(want("urgent", 60, urgent=True)),
    ]
    await settled()
    assert order == ["first"]
    assert gate.view().waiting == 3
    first.release()
    urgent = await tasks[2]
    await settled()
    assert order == ["first", "urgent"]
    urgent.release()
    urgent.release()
    large = await tasks[0]
    await settled()
    assert order == ["first", "urgent", "large"]
    large.release()
    (await tasks[1]).release()
    assert gate.view().outstanding_bytes == 0


async def test_cancelling_in_every_state_returns_everything() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    held = await gate.acquire(100)
    waiting = asyncio.create_task(gate.acquire(10))
    behind = asyncio.create_task(gate.acquire(100))
    await settled()
    waiting.cancel()  # cancelled while it waits
    await settled()
    assert gate.view().waiting == 1
    held.release()  # grants `behind`, whose task has not run yet
    behind.cancel()
    await asyncio.gather(waiting, behind, return_exceptions=True)
    assert (waiting.cancelled(), behind.cancelled()) == (True, True)
    assert gate.view().outstanding_bytes == 0
    assert gate.view().granted_bytes == 100

    held = await gate.acquire(100)
    late = asyncio.create_task(gate.acquire(50))
    after = asyncio.create_task(gate.acquire(60))
    await settled()
    late.cancel()
    held.release()  # comes between the cancellation and the task's next step
    grant = await after
    assert late.cancelled()
    assert gate.view().outstanding_bytes == 60
    grant.release()


async def test_cancelled_holders_and_failing_blocks_release() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    entered = asyncio.Event()

    async def hold() -> None:
        async with gate.grant(100):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ZeroDivisionError):
        async with gate.grant(100):
            raise ZeroDivisionError
    assert gate.view().outstanding_bytes == 0


async def test_many_tasks_with_random_cancellations_conserve_bytes() -> None:
    gate = Gate(50e6, 1 << 20, outstanding_bytes=1 << 20)
    under_way = 0

    async def move(number: int) -> None:
        nonlocal under_way
        for step in range(10):
            async with gate.grant(10_000 + number * step, urgent=number % 3 == 0) as grant:
                under_way += grant.nbytes
                assert under_way <= gate.view().outstanding_bytes <= 1 << 20
                try:
                    await asyncio.sleep(0)
                finally:
                    under_way -= grant.nbytes

    tasks = [asyncio.create_task(move(number)) for number in range(40)]
    for number, task in enumerate(tasks):
        if number % 4 == 1:
            await asyncio.sleep(0)
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert sum(outcome is None for outcome in outcomes) >= 30
    view = gate.view()
    assert (view.outstanding_bytes, view.waiting, under_way) == (0, 0, 0)


async def test_a_paced_gate_waits_for_its_rate() -> None:
    slow = Gate(1.0, 1)
    (await slow.acquire(10**6)).release()
    waiting = asyncio.create_task(slow.acquire(1))  # due in eleven days
    await settled()
    assert not waiting.done()
    assert slow.view().waiting == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert slow.view().waiting == 0

    gate = Gate(10e6, 100_000)
    for _ in range(10):
        (await gate.acquire(100_000)).release()
    assert gate.view().granted_bytes == 10**6
    assert gate.view().rate_bytes_per_s == 10e6
    assert gate.batch_bytes(1 << 24) == MIN_BATCH


@pytest.mark.parametrize(
    ("rate", "burst", "outstanding"),
    [(0, 1, None), (-1, 1, None), (math.inf, 1, None), (math.nan, 1, None), (1, 0, None), (1, 1, 0)],
)
async def test_senseless_gates_are_refused(rate: float, burst: int, outstanding: int | None) -> None:
    with pytest.raises(ConfigError):
        Gate(rate, burst, outstanding_bytes=outstanding)


async def test_senseless_grants_are_refused() -> None:
    gate = Gate(None, 1)
    for nbytes in (0, -1):
        with pytest.raises(ValidationError):
            await gate.acquire(nbytes)
    assert gate.view().waiting == 0
