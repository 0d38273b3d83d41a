"""Ranks pause together at one block, whatever they do, and go on: with real worker processes."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import pytest
from hosting_kit import HostKit, assert_pause, assert_world, line, spec

from worldmove.errors import ConflictError, DeadlineError, NoWorkerError
from worldmove.manifest import Region
from worldmove.page.control import NEVER
from worldmove.page.messages import Ended

TWO = (Region("a", "uint8", (700,), rank=0), Region("b", "float64", (50,), rank=1))


async def test_a_running_world_pauses_and_goes_on(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    assert slot.ranks.state == "live"
    worker.tell("run")
    last = -1
    for _ in range(50):
        pause = await slot.ranks.pause(5)
        assert slot.ranks.state == "paused"
        assert pause.attended
        assert pause.block > last
        assert_pause(slot, pause)
        assert slot.ranks.block == pause.block
        last = pause.block
        pause.resume()
        assert not pause.held
        assert slot.ranks.page.pause_at == NEVER
    pause = await slot.ranks.pause(5)
    pause.moved("B", "wss://b")
    assert await worker.hear() == {
        "moved": "B",
        "endpoint": "wss://b",
        "block": pause.block,
        "asked": pause.block,
    }
    assert slot.ranks.state == "moved"
    with pytest.raises(ConflictError, match="moved"):
        await slot.ranks.pause(1)


async def test_nothing_changes_while_a_pause_holds(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run", until=100_000_000)
    pause = await slot.ranks.pause(5)
    assert pause.stopped_at <= time.monotonic()
    for _ in range(20):
        assert_pause(slot, pause)
        await asyncio.sleep(0.005)
    pause.resume()
    pause.resume()
    pause.moved("too late", None)
    assert slot.ranks.state == "live"
    again = await slot.ranks.pause(5)
    assert again.block > pause.block
    pause.resume()
    assert again.held


async def test_independent_ranks_meet_at_one_block(kit: HostKit) -> None:
    """One rank is much faster than the other and waits for it."""
    slot, (fast, slow) = await kit.session(*TWO)
    fast.tell("run")
    slow.tell("run", pace_s=0.002)
    for _ in range(30):
        pause = await slot.ranks.pause(20)
        assert_pause(slot, pause)
        pause.resume()
        if slot.ranks.page.block(0) - slot.ranks.page.block(1) > 2000:
            break
    pause = await slot.ranks.pause(60)
    assert_pause(slot, pause)
    pause.moved("B", None)
    assert (await fast.hear())["block"] == (await slow.hear())["block"] == pause.block


async def test_ranks_that_wait_for_each_other_never_lock_up(kit: HostKit) -> None:
    """A rank that stopped a block too early would hold the other one in its collective for ever."""
    ours, theirs = socket.socketpair()
    slot, tickets = await kit.host.open_session(spec(*TWO), "w", 1)
    first = await kit.worker(pass_fds=[ours.fileno()])
    second = await kit.worker(pass_fds=[theirs.fileno()])
    for worker, ticket in zip((first, second), tickets, strict=True):
        await worker("join", ticket=line("w", kit.host, ticket))
    first.tell("run", peer=ours.fileno())
    second.tell("run", peer=theirs.fileno())
    ours.close()
    theirs.close()
    for _ in range(300):
        pause = await slot.ranks.pause(10)
        assert_pause(slot, pause)
        pause.resume()
    pause = await slot.ranks.pause(10)
    pause.moved("B", None)
    assert (await first.hear())["block"] == (await second.hear())["block"] == pause.block


async def test_callable_host_state_is_asked_only_when_wanted(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    answer = await worker("step", n=20, lazy=True)
    assert answer == {"block": 20, "asked": 0}
    worker.tell("run", lazy=True)
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)
    pause.moved("B", None)
    assert (await worker.hear())["asked"] == 1


async def test_a_late_rank_is_named_and_the_others_generate_on(kit: HostKit) -> None:
    slot, (quick, _idle) = await kit.session(*TWO)
    quick.tell("run")
    with pytest.raises(DeadlineError) as caught:
        await slot.ranks.pause(0.3)
    assert caught.value.details["ranks"] == [1]
    assert slot.ranks.page.pause_at == NEVER
    kit.host.close_slot(slot, Ended("enough"))
    assert (await quick.hear())["block"] > 0


async def test_a_stopped_worker_is_found_by_the_deadline(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run", pace_s=0.001)
    worker.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError):
        await slot.ranks.pause(0.3)
    worker.process.send_signal(signal.SIGCONT)
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)


async def test_a_cancelled_pause_leaves_nothing_paused(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    task = asyncio.create_task(slot.ranks.pause(30))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slot.ranks.page.pause_at == NEVER
    assert (await worker("step", n=10))["block"] == 10
    # One that is cancelled at the very moment at which the ranks meet lets them go all the same.
    worker.tell("run")
    for turns in range(40):
        task = asyncio.create_task(slot.ranks.pause(30))
        for _ in range(turns % 8):
            await asyncio.sleep(0)
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(done[0], BaseException):
            done[0].resume()
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)


async def test_pauses_take_turns(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run")
    blocks = []

    async def hold() -> None:
        pause = await slot.ranks.pause(20)
        assert_pause(slot, pause)
        blocks.append(pause.block)
        await asyncio.sleep(0.001)
        assert pause.held
        pause.resume()

    await asyncio.gather(*(hold() for _ in range(20)))
    assert blocks == sorted(set(blocks))
    held = await slot.ranks.pause(5)
    with pytest.raises(DeadlineError):
        await slot.ranks.pause(0.05)
    assert held.held


async def test_a_session_that_ends_is_heard_at_the_next_boundary(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run", pace_s=0.001)
    kit.host.close_slot(slot, Ended("an operator said so"))
    answer = await worker.hear()
    assert answer["ended"] == "an operator said so"
    assert slot.ranks.block == answer["block"]


async def test_ending_a_session_ends_the_pause_that_is_wanted(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    task = asyncio.create_task(slot.ranks.pause(30))
    await asyncio.sleep(0.02)
    kit.host.close_slot(slot, Ended("now"))
    with pytest.raises(ConflictError):
        await task
    assert (await worker("run"))["ended"] == "now"


async def test_a_rank_that_dies_ends_the_pause_that_waits_for_it(kit: HostKit) -> None:
    slot, (alive, dead) = await kit.session(*TWO)
    alive.tell("run")
    task = asyncio.create_task(slot.ranks.pause(30))
    await asyncio.sleep(0.02)
    await dead.kill()
    with pytest.raises(NoWorkerError) as caught:
        await task
    assert caught.value.details["ranks"] == [1]
    assert slot.ranks.state == "unattended"
    with pytest.raises(NoWorkerError):
        await slot.ranks.pause(1, allow_unattended=True)


async def test_a_rank_that_dies_while_it_stands_leaves_the_pause_valid(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run")
    pause = await slot.ranks.pause(5)
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    assert_pause(slot, pause)
    pause.resume()
    assert slot.ranks.state == "unattended"
    again = await slot.ranks.pause(1, allow_unattended=True)
    assert (again.block, again.host_states, again.attended) == (pause.block, pause.host_states, False)
    assert_world(slot, again.block)
