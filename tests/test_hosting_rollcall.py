"""Signs of life: real workers that wait, poll, sleep, die and come back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from hosting_kit import Caller, HostKit, host_kit, manifest, spec, until
from test_hosting_rest import call

from worldmove.errors import DeadlineError, NoWorkerError
from worldmove.manifest import Region
from worldmove.memory.keeping import Keeper
from worldmove.page.messages import Hello, Memory, Ping, Pong, Ready, Welcome

TWO = (Region("a", "uint8", (700,), rank=0), Region("b", "float64", (50,), rank=1))
SOON_S = 0.1


@pytest.fixture
async def keeper(run_dir: Path):
    keeper = await Keeper.start(run_dir / "keeper.sock")
    yield keeper
    for key in await keeper.keys():
        await keeper.drop(key)
    await keeper.close()


async def test_every_rank_of_a_standby_that_waits_answers(kit: HostKit) -> None:
    slot, workers = await kit.standby(*TWO)
    for worker in workers:
        worker.tell("wait")
    for _ in range(3):
        await slot.ranks.roll.ask(10)
    assert slot.vacant


async def test_a_stopped_rank_is_named_and_gets_nothing_until_it_answers(kit: HostKit) -> None:
    slot, workers = await kit.standby(*TWO)
    for worker in workers:
        worker.tell("wait")
    await slot.ranks.roll.ask(10)
    workers[1].process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError) as caught:
        await slot.ranks.roll.ask(SOON_S)
    assert caught.value.details["ranks"] == [1]
    assert slot.ranks.roll.silent == {1}
    assert slot.ranks.attended
    assert not slot.vacant
    with pytest.raises(NoWorkerError):
        kit.host.find_standby(manifest(*TWO), {"cpu": "x"})
    workers[1].process.send_signal(signal.SIGCONT)
    await until(lambda: slot.vacant)
    await slot.ranks.roll.ask(10)


async def test_a_stack_that_polls_answers_when_it_polls(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    asked = asyncio.create_task(slot.ranks.roll.ask(10))
    await asyncio.sleep(0)
    # It takes what is there and doesn't wait; the ping is.
    assert await worker("wait", timeout=0) == {}
    await asked
    with pytest.raises(DeadlineError):
        await slot.ranks.roll.ask(SOON_S)
    assert not slot.vacant
    assert await worker("wait", timeout=0) == {}
    await until(lambda: slot.vacant)


async def test_a_late_answer_is_none_to_the_next_call(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_standby(spec())
    caller = Caller(kit)
    assert isinstance(await caller.say(Hello(ticket.token)), Welcome)
    assert isinstance(await caller.hear(), Memory)
    await caller.channel.send(Ready())
    await kit.changes.wait(slot, "attached")
    with pytest.raises(DeadlineError):
        await slot.ranks.roll.ask(SOON_S)
    second = asyncio.create_task(slot.ranks.roll.ask(10))
    first, then = await caller.hear(), await caller.hear()
    assert isinstance(first, Ping)
    assert isinstance(then, Ping)
    await caller.channel.send(Pong(first.number))
    await until(lambda: not slot.ranks.roll.silent)
    assert not second.done()
    await caller.channel.send(Pong(then.number))
    await second
    caller.channel.close()


async def test_a_worker_that_dies_is_not_waited_for(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    asked = asyncio.create_task(slot.ranks.roll.ask(10))
    await asyncio.sleep(0)
    await worker.kill()
    with pytest.raises(NoWorkerError):
        await asked
    with pytest.raises(NoWorkerError):
        await slot.ranks.roll.ask(10)
    assert not slot.ranks.roll.silent


async def test_a_cancelled_call_leaves_nothing(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    asked = asyncio.create_task(slot.ranks.roll.ask(10))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not slot.ranks.roll.silent
    worker.tell("wait")
    await slot.ranks.roll.ask(10)


async def test_a_rank_on_rest_answers_with_a_call(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    await call(slot, 1)
    asked = asyncio.create_task(slot.ranks.roll.ask(10))
    await asyncio.sleep(0)
    assert not asked.done()
    await call(slot, 2)
    await asked


async def test_workers_that_live_are_waited_for_after_a_restart(run_dir: Path, keeper: Keeper) -> None:
    async with host_kit(run_dir, keeper=keeper) as kit:
        _slot, (worker,) = await kit.session()
        await worker("step")
        await kit.host.close()
        async with host_kit(run_dir, keeper=keeper, incarnation=2) as again:
            slot = again.host.sessions["w"]
            slot.ranks.unfence()
            waiting = asyncio.create_task(slot.ranks.roll.back(30))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not slot.ranks.attended
            worker.tell("run", pace_s=0.01)
            await waiting
            pause = await slot.ranks.pause(10)
            assert pause.attended
            pause.resume()


async def test_nobody_waits_for_the_dead(run_dir: Path, keeper: Keeper) -> None:
    async with host_kit(run_dir, keeper=keeper) as kit:
        _slot, (worker,) = await kit.session()
        await worker("step")
        await worker.kill()
        await kit.host.close()
        async with host_kit(run_dir, keeper=keeper, incarnation=2) as again:
            await again.host.sessions["w"].ranks.roll.back(30)
