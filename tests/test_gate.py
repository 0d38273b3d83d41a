"""The receiver's gate: its bucket by property, its asyncio part with real tasks (policy: test_granting_*)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.errors import ConfigError, ProcessLostError, ValidationError
from worldmove.gate import MIN_BATCH, Gate, Grant, Pass
from worldmove.granting.bucket import Bucket
from worldmove.granting.meter import Epoch
from worldmove.granting.pauses import Need

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


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def senders(gate: Gate, *names: str) -> list[Pass]:
    return [gate.join(name, name) for name in names]


async def test_without_a_rate_grants_come_at_once() -> None:
    gate = Gate(None, 1024)
    gate.pace.warm(1e12)
    (one,) = senders(gate, "A")
    async with one.grant(1 << 29), one.grant(1 << 29) as second:
        assert second.nbytes == 1 << 29
        assert gate.view().outstanding_bytes == 1 << 30
    view = gate.view()
    assert (view.outstanding_bytes, view.granted_bytes, view.waiting, view.moves) == (0, 1 << 30, 0, 1)
    assert one.batch_bytes(1 << 24) == 1 << 24


async def test_the_outstanding_bound_holds_and_a_standing_world_goes_first() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    order: list[str] = []

    async def want(one: Pass, nbytes: int) -> Grant:
        grant = await one.acquire(nbytes)
        order.append(one.name)
        return grant

    first, large, small, stands = senders(gate, "first", "large", "small", "stands")
    held = await want(first, 80)
    stands.stand(0.2)
    tasks = [
        asyncio.create_task(want(large, 150)),
        asyncio.create_task(want(small, 5)),
        asyncio.create_task(want(stands, 60)),
    ]
    await settled()
    assert order == ["first"]
    assert gate.view().waiting == 3
    held.landed()
    urgent = await tasks[2]
    await settled()
    assert order == ["first", "stands"]
    urgent.landed()
    urgent.release()
    big = await tasks[0]
    await settled()
    assert order == ["first", "stands", "large"]
    big.release()
    (await tasks[1]).landed()
    assert gate.view().outstanding_bytes == 0


async def test_cancelling_in_every_state_returns_everything() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    (one,) = senders(gate, "A")
    held = await one.acquire(100)
    waiting = asyncio.create_task(one.acquire(10))
    behind = asyncio.create_task(one.acquire(100))
    await settled()
    waiting.cancel()  # cancelled while it waits
    await settled()
    assert gate.view().waiting == 1
    held.landed()  # grants `behind`, whose task has not run yet
    behind.cancel()
    await asyncio.gather(waiting, behind, return_exceptions=True)
    assert (waiting.cancelled(), behind.cancelled()) == (True, True)
    assert gate.view().outstanding_bytes == 0
    assert gate.view().granted_bytes == 100

    held = await one.acquire(100)
    late = asyncio.create_task(one.acquire(50))
    after = asyncio.create_task(one.acquire(60))
    await settled()
    late.cancel()
    held.landed()  # comes between the cancellation and the task's next step
    grant = await after
    assert late.cancelled()
    assert gate.view().outstanding_bytes == 60
    grant.release()


async def test_cancelled_holders_and_failing_blocks_release() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    (one,) = senders(gate, "A")
    entered = asyncio.Event()

    async def hold() -> None:
        async with one.grant(100):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ZeroDivisionError):
        async with one.grant(100):
            raise ZeroDivisionError
    assert gate.view().outstanding_bytes == 0


async def test_whoever_leaves_gives_everything_back_and_wakes_its_waiters() -> None:
    gate = Gate(None, 1, outstanding_bytes=100)
    gone, other = senders(gate, "gone", "other")
    held = await gone.acquire(100)
    waits, next_one = asyncio.create_task(gone.acquire(10)), asyncio.create_task(other.acquire(70))
    await settled()
    gone.leave()
    with pytest.raises(ProcessLostError):
        await waits
    (await next_one).landed()
    held.landed()
    held.release()
    gone.leave()
    with pytest.raises(ProcessLostError):
        await gone.acquire(1)
    view = gate.view()
    assert (view.outstanding_bytes, view.waiting, view.moves) == (0, 0, 1)


async def test_many_tasks_with_random_cancellations_conserve_bytes() -> None:
    gate = Gate(50e6, 1 << 20, outstanding_bytes=1 << 20)
    under_way = 0

    async def move(number: int) -> None:
        nonlocal under_way
        one = gate.join(f"m{number}", f"s{number % 7}", deadline_s=number)
        if number % 3 == 0:
            one.stand(number)
        for step in range(10):
            async with one.grant(10_000 + number * step) as grant:
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
    (one,) = senders(slow, "A")
    (await one.acquire(10**6)).landed()
    waiting = asyncio.create_task(one.acquire(1))  # due in eleven days
    await settled()
    assert not waiting.done()
    assert slow.view().waiting == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert slow.view().waiting == 0

    gate = Gate(10e6, 100_000)
    (one,) = senders(gate, "A")
    for _ in range(10):
        (await one.acquire(100_000)).landed()
    assert gate.view().granted_bytes == 10**6
    assert gate.view().rate_bytes_per_s == 10e6
    assert one.batch_bytes(1 << 24) == MIN_BATCH


async def test_only_whoever_is_about_to_ask_for_a_batch_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(None, 1024, outstanding_bytes=2 * MIN_BATCH)
    (one,) = senders(gate, "A")
    held: list[bool] = []
    monkeypatch.setattr(gate._policy, "hold_back", lambda: held.append(True))
    assert gate.batch_bytes(1 << 24) == MIN_BATCH
    assert not held
    assert one.batch_bytes(1 << 24) == MIN_BATCH
    assert held


async def test_a_sender_that_lets_a_grant_go_by_is_cut_off() -> None:
    gate = Gate(None, 1, patience_s=0.02)
    reasons: asyncio.Queue[str] = asyncio.Queue()
    liar = gate.join("m", "liar", on_cut=reasons.put_nowait)
    await liar.acquire(1000)
    async with asyncio.timeout(5):
        assert "liar did not send 1000 granted bytes" in await reasons.get()
    assert gate.view().cut_off >= 1
    liar.leave()
    assert gate.view().outstanding_bytes == 0


async def test_measured_epochs_are_told() -> None:
    told: list[tuple[Epoch, float]] = []
    gate = Gate(None, 1, on_epoch=lambda epoch, now: told.append((epoch, now)))
    (one,) = senders(gate, "A")
    while not told:
        async with one.grant(gate.bound_bytes):
            await asyncio.sleep(0.01)
    ((epoch, _),) = told
    assert epoch.alone == "A"
    assert 0 < epoch.goodput < 1e9
    assert gate.view().goodput_bytes_per_s == epoch.goodput


async def test_a_world_may_stop_while_the_last_grant_of_another_is_under_way() -> None:
    """Nothing lands meanwhile: its turn comes once so much time has gone by."""
    gate = Gate(None, 1)
    need = Need(0.2, 0.0, 0.1, 5.0, 9.0)
    await gate.turn("a", need)
    second = asyncio.create_task(gate.turn("b", need))
    await settled()
    assert gate.view().waiting_pauses == 1
    gate.stands("a", 5.0)
    assert await second >= 0.1
    third = asyncio.create_task(gate.turn("c", need))
    await settled()
    gate.progress("a", 0.0)
    await settled()
    assert not third.done(), "the work for the second one is more than a block's"
    gate.turn_over("a")
    gate.turn_over("b")
    await third
    gate.turn_over("c")


async def test_worlds_stop_in_turn() -> None:
    gate = Gate(None, 1)
    need = Need(0.2, 0.0, 0.1, 0.25, 9.0)
    assert await gate.turn("a", need) < 1
    assert await gate.turn("a", need) == 0.0, "it has its turn already"
    second = asyncio.create_task(gate.turn("b", need))
    third = asyncio.create_task(gate.turn("c", need))
    await settled()
    assert gate.view().waiting_pauses == 2
    gate.stands("a", 0.25)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.turn_over("b")
    gate.turn_over("a")
    await third
    gate.turn_over("c")
    gate.turn_over("c")
    assert gate.view().waiting_pauses == 0


@pytest.mark.parametrize(
    "arguments",
    [
        *({"rate_bytes_per_s": rate} for rate in (0, -1, math.inf, math.nan)),
        {"burst_bytes": 0},
        {"outstanding_bytes": 0},
        {"senders": 0},
    ],
)
async def test_senseless_gates_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Gate(**({"rate_bytes_per_s": 1.0, "burst_bytes": 1} | arguments))


async def test_senseless_grants_are_refused() -> None:
    gate = Gate(None, 1)
    (one,) = senders(gate, "A")
    for nbytes in (0, -1):
        with pytest.raises(ValidationError):
            await one.acquire(nbytes)
    assert gate.view().waiting == 0


async def test_a_world_that_stands_waits_for_no_more_than_others_have_to_send() -> None:
    gate = Gate(None, 1 << 20)
    most = gate.bound_bytes
    assert gate.blocked_s(1e6, copying=0, standing=0) == 0.0
    assert gate.blocked_s(1e6, copying=0, standing=2_000_000) == 2.0
    assert gate.blocked_s(1e6, copying=1_000_000, standing=2_000_000) == 3.0
    assert gate.blocked_s(1e6, copying=0, standing=1 << 40) == most / 1e6
    # Beside moves that copy, twice the window may be tried.
    assert gate.blocked_s(1e6, copying=1 << 40, standing=0) == 2 * most / 1e6
