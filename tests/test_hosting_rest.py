"""The boundary over REST: the node writes the control page for a stack that can't map it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosting_kit import HostKit, line, spec

from worldmove.errors import ConflictError, ManifestError, NotFoundError
from worldmove.hosting.rest import rest_boundary
from worldmove.hosting.shared import SHM
from worldmove.hosting.slots import Slot
from worldmove.manifest import Region, Source
from worldmove.page.messages import Ended, Resume
from worldmove.views import BoundaryView

TWO = (Region("a", "uint8", (7,)), Region("b", "uint8", (5,), rank=1))


async def call(
    slot: Slot, block: int, state: bytes = b"", *, rank: int = 0, wait_s: float = 10, lease_s: float = 30
) -> str:
    view = await rest_boundary(slot.ranks, rank, block, state, wait_s=wait_s, lease_s=lease_s)
    return view.action


async def test_a_stack_generates_pauses_and_hears_where_the_world_went(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    assert slot.ranks.state == "unattended"
    for block in range(1, 5):
        assert await call(slot, block, b"state %d" % block) == "continue"
    assert slot.ranks.state == "live"
    task = asyncio.create_task(slot.ranks.pause(10))
    await asyncio.sleep(0)
    assert await call(slot, 5, b"five", wait_s=0) == "wait"
    pause = await task
    assert (pause.block, pause.host_states) == (5, (b"five",))
    assert await call(slot, 5, b"five", wait_s=0.01) == "wait"
    waiting = asyncio.create_task(call(slot, 5))
    await asyncio.sleep(0.01)
    pause.resume()
    assert await waiting == "continue"
    assert await call(slot, 5) == "continue"
    assert await call(slot, 6) == "continue"
    task = asyncio.create_task(slot.ranks.pause(10))
    waiting = asyncio.create_task(call(slot, 7))
    (await task).moved("B", "wss://b")
    assert await waiting == "moved"
    view = await rest_boundary(slot.ranks, 0, 7, b"", wait_s=0, lease_s=1)
    assert view == BoundaryView(action="moved", destination="B", endpoint="wss://b")
    kit.host.close_slot(slot, Ended("released"))


async def test_a_rank_on_rest_and_one_on_the_socket_meet(kit: HostKit) -> None:
    slot, tickets = await kit.host.open_session(spec(*TWO), "w", 1)
    worker = await kit.worker()
    await worker("join", ticket=line("w", kit.host, tickets[1]))
    worker.tell("run")
    block = 1
    assert await call(slot, block) == "continue"
    for _ in range(10):
        task = asyncio.create_task(slot.ranks.pause(10))
        while not task.done():
            block += 1
            waiting = asyncio.create_task(call(slot, block, b"rest %d" % block))
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                assert await waiting == "continue"
        pause = await task
        assert pause.block == block
        assert pause.host_states[0] == b"rest %d" % block
        pause.resume()
        assert await waiting == "continue"


async def test_blocks_come_one_after_the_other(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(host_state_bytes=4), "w", 1)
    assert await call(slot, 0) == "continue"
    for wrong in (2, 10**12):
        with pytest.raises(ConflictError) as caught:
            await call(slot, wrong)
        assert caught.value.details["block"] == 0
    with pytest.raises(ManifestError):
        await call(slot, 1, b"large")
    assert slot.ranks.block == 0
    for rank in (-1, 1, 99):
        with pytest.raises(NotFoundError):
            await call(slot, 1, rank=rank)


async def test_a_rank_in_the_hands_of_a_worker_is_not_taken(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=2)
    with pytest.raises(ConflictError):
        await call(slot, 3)
    await worker("close")
    await kit.changes.wait(slot, "left")
    assert await call(slot, 3) == "continue"


async def test_silence_ends_the_lease(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    assert await call(slot, 1, b"x", lease_s=0.05) == "continue"
    await kit.changes.wait(slot, "lost")
    assert slot.ranks.state == "unattended"
    # Nobody knows whether it writes: its memory counts as torn.
    with pytest.raises(ConflictError):
        await slot.ranks.pause(1, allow_unattended=True)
    with pytest.raises(ConflictError):
        await call(slot, 2)


async def test_a_call_that_waits_keeps_the_lease(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    await call(slot, 1)
    task = asyncio.create_task(slot.ranks.pause(10))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(call(slot, 2, lease_s=0.02))
    pause = await task
    await asyncio.sleep(0.1)
    assert slot.ranks.state == "paused"
    pause.resume()
    assert await waiting == "continue"


async def test_a_worker_that_takes_over_ends_the_call(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    await call(slot, 1)
    task = asyncio.create_task(slot.ranks.pause(10))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(call(slot, 2))
    pause = await task

    class Other:
        def answer(self, message: object) -> None:
            assert isinstance(message, Resume)

        def ping(self, number: int) -> None: ...

        def close(self) -> None: ...

    slot.ranks.attach(0, Other(), stopped=2)
    with pytest.raises(ConflictError):
        await waiting
    pause.resume()


@pytest.fixture
def shared(run_dir: Path) -> Iterator[str]:
    name = f"wm-test-{run_dir.name}"
    path = SHM / name
    path.write_bytes(bytes(4096))
    yield name
    path.unlink()


async def test_memory_that_the_stack_holds_itself_is_never_called_quiet(kit: HostKit, shared: str) -> None:
    """A stack with shared memory may write before it has ever said anything."""
    region = Region("s", "uint8", (100,), source=Source("shm", shared, 64))
    slot, _ = await kit.host.open_session(spec(region), "w", 1)
    with pytest.raises(ConflictError):
        await slot.ranks.pause(1, allow_unattended=True)
    assert await call(slot, 1) == "continue"
    kit.host.close_slot(slot, Ended("done"))
    plain, _ = await kit.host.open_session(spec(), "w", 1)
    pause = await plain.ranks.pause(1, allow_unattended=True)
    assert (pause.block, pause.host_states) == (0, (b"",))
