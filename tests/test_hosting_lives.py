"""Deaths: of workers between blocks and inside them, and of nodes whose worlds go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hosting_kit import (
    HostKit,
    WorkerProcess,
    assert_pause,
    assert_world,
    host_kit,
    line,
    region_bytes,
    spec,
    until,
)
from hosting_worker import host_state

from worldmove.errors import ConflictError, FingerprintMismatchError, NotFoundError, NoWorkerError
from worldmove.hosting.shared import SHM
from worldmove.hosting.slots import Slot
from worldmove.manifest import Region, Source
from worldmove.memory.keeping import Keeper
from worldmove.page.messages import Ended, Moved

NODE = Path(__file__).with_name("hosting_node.py")
REGIONS = [{"name": "k", "dtype": "uint8", "shape": [5000]}]
TWO = [*REGIONS, {"name": "v", "dtype": "uint8", "shape": [70], "rank": 1}]


async def test_another_worker_continues_from_the_last_boundary(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=7)
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    assert slot.ranks.state == "unattended"
    with pytest.raises(NoWorkerError):
        await slot.ranks.pause(1)
    pause = await slot.ranks.pause(1, allow_unattended=True)
    assert pause.block == 7
    assert_pause(slot, pause)
    pause.resume()
    with pytest.raises(FingerprintMismatchError):
        kit.host.attach("w", {"cpu": "y"})
    with pytest.raises(NotFoundError):
        kit.host.attach("nobody", {})
    _, (ticket,) = kit.host.attach("w", {"cpu": "x"})
    other = await kit.worker()
    answer = await other("join", ticket=line("w", kit.host, ticket))
    assert (answer["block"], answer["host_state"]) == (7, host_state(0, 7).decode())
    other.tell("run")
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)


async def test_a_world_torn_in_mid_block_is_refused_to_everybody(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=2)
    worker.tell("half")
    await kit.changes.wait(slot, "lost")
    with pytest.raises(ConflictError, match="middle of a block"):
        await slot.ranks.pause(1, allow_unattended=True)
    with pytest.raises(ConflictError, match="middle of a block"):
        kit.host.attach("w", {"cpu": "x"})


async def test_a_stack_that_does_not_mark_its_blocks_leaves_no_world(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    assert await worker("unmarked") == {"block": 1}
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    with pytest.raises(ConflictError):
        await slot.ranks.pause(1, allow_unattended=True)


async def test_a_callable_host_state_dies_with_its_worker(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=3, lazy=True)
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    with pytest.raises(ConflictError, match="host state"):
        await slot.ranks.pause(1, allow_unattended=True)


async def test_a_worker_without_a_connection_still_has_its_world(kit: HostKit) -> None:
    """A connection that breaks is no death: nobody else gets the memory, and the worker comes back."""
    slot, (worker,) = await kit.session()
    worker.tell("run")
    seat = slot.ranks.seat(0)
    assert seat is not None
    seat.close()
    await kit.changes.wait(slot, "lost")
    assert slot.ranks.state == "unattended"
    with pytest.raises(ConflictError, match="lives"):
        await slot.ranks.pause(1, allow_unattended=True)
    with pytest.raises(ConflictError, match="in the hands"):
        kit.host.attach("w", {"cpu": "x"})
    await kit.changes.wait(slot, "attached", count=2)
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)


async def test_a_forked_child_does_not_keep_the_rank(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=2)
    child = (await worker("fork"))["pid"]
    try:
        await worker("step")
        await worker.kill()
        await kit.changes.wait(slot, "lost")
        pause = await slot.ranks.pause(1, allow_unattended=True)
        assert_pause(slot, pause)
    finally:
        os.kill(child, signal.SIGKILL)


async def test_a_rank_that_stands_when_its_connection_breaks_comes_back_standing(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    worker.tell("run")
    pause = await slot.ranks.pause(5)
    seat = slot.ranks.seat(0)
    assert seat is not None
    seat.close()
    await kit.changes.wait(slot, "attached", count=2)
    assert_pause(slot, pause)
    pause.moved("B", None)
    assert (await worker.hear())["moved"] == "B"


class NodeProcess(WorkerProcess):
    """A node that can be killed and stopped; spoken to like a worker."""

    @classmethod
    async def launch(cls, run_dir: Path, incarnation: int) -> NodeProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(NODE), str(run_dir), str(incarnation), stdin=-1, stdout=-1, limit=1 << 24
        )
        return cls(process)


class Stage:
    """A first node, its workers, and whatever comes after it."""

    def __init__(self, run_dir: Path, node: NodeProcess, stack: contextlib.AsyncExitStack) -> None:
        self.run_dir = run_dir
        self.node = node
        self._stack = stack

    async def workers(self, tickets: list[str], what: str = "join") -> list[WorkerProcess]:
        workers = []
        for ticket in tickets:
            worker = await WorkerProcess.start("http://127.0.0.1:9")
            self._stack.push_async_callback(worker.kill)
            await worker(what, ticket=ticket)
            workers.append(worker)
        return workers

    async def next_node(self, incarnation: int = 2) -> tuple[HostKit, Slot]:
        """A new incarnation, in this process; the slot that it found."""
        keeper = await Keeper.start(self.run_dir / "keeper.sock")
        self._stack.push_async_callback(keeper.close)
        kit = await self._stack.enter_async_context(
            host_kit(self.run_dir, keeper=keeper, incarnation=incarnation)
        )
        (slot,) = [*kit.host.sessions.values(), *kit.host.standbys.values()]
        return kit, slot


@pytest.fixture
async def stage(run_dir: Path) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:
        node = await NodeProcess.launch(run_dir, 1)
        stack.push_async_callback(_empty, run_dir)
        stack.push_async_callback(node.kill)
        yield Stage(run_dir, node, stack)


async def _empty(run_dir: Path) -> None:
    """Lets the keeper go: it ends when it holds nothing."""
    keeper = await Keeper.start(run_dir / "keeper.sock")
    for key in await keeper.keys():
        await keeper.drop(key)
    await keeper.close()


async def test_a_world_outlives_its_node_and_is_moved_by_the_next(stage: Stage) -> None:
    made = await stage.node("session", regions=TWO)
    first, second = await stage.workers(made["tickets"])
    first.tell("run")
    second.tell("run")
    assert (await stage.node("pause"))["block"] > 0
    await stage.node("resume")
    await stage.node.kill()
    kit, slot = await stage.next_node()
    assert (slot.id, slot.seed, slot.ranks.page.epoch) == ("w", 11, 3)
    assert slot.ranks.state == "fenced"
    with pytest.raises(ConflictError):
        await slot.ranks.pause(1)
    await kit.changes.wait(slot, "attached")
    slot.ranks.unfence()
    assert slot.ranks.page.incarnation == 2
    assert len(slot.pages.fds) == 1
    for _ in range(20):
        pause = await slot.ranks.pause(10)
        assert_pause(slot, pause)
        pause.resume()
    pause = await slot.ranks.pause(10)
    pause.moved("B", None)
    # Every block was generated by the worker that had the world all along: none was missed.
    for worker in (first, second):
        assert await worker.hear() == {
            "moved": "B",
            "endpoint": None,
            "block": pause.block,
            "asked": pause.block,
        }


@pytest.mark.parametrize("outcome", ["resume", "moved", "gone"])
async def test_a_rank_that_stands_waits_for_the_next_node(stage: Stage, outcome: str) -> None:
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    worker.tell("run")
    block = (await stage.node("pause"))["block"]
    await stage.node.kill()
    kit, slot = await stage.next_node()
    await kit.changes.wait(slot, "attached")
    assert slot.ranks.state == "fenced"
    assert slot.ranks.block == block
    assert_world(slot, block)
    with pytest.raises(ConflictError, match="fenced"):
        await slot.ranks.pause(5)
    if outcome == "resume":
        slot.ranks.unfence()
        pause = await slot.ranks.pause(5)
        assert pause.block > block
        assert_pause(slot, pause)
    elif outcome == "moved":
        slot.ranks.finish(Moved("B", "wss://b"))
        assert await worker.hear() == {"moved": "B", "endpoint": "wss://b", "block": block, "asked": block}
    else:
        kit.host.close_slot(slot, Ended("settled elsewhere"))
        assert (await worker.hear())["ended"] == "settled elsewhere"


async def test_a_rank_that_stands_is_told_when_nobody_knows_it_any_more(stage: Stage) -> None:
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    worker.tell("run")
    await stage.node("pause")
    await stage.node.kill()
    await _empty(stage.run_dir)
    async with host_kit(stage.run_dir, incarnation=2):
        assert "any more" in (await worker.hear())["ended"]


async def test_a_stopped_incarnation_that_wakes_up_changes_nothing(stage: Stage) -> None:
    """Its page is not the one that anybody looks at."""
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    worker.tell("run")
    await stage.node("pause")
    stage.node.process.send_signal(signal.SIGSTOP)
    kit, slot = await stage.next_node()
    await kit.changes.wait(slot, "attached")
    slot.ranks.unfence()
    pause = await slot.ranks.pause(5)
    stage.node.process.send_signal(signal.SIGCONT)
    await stage.node("resume")
    await asyncio.sleep(0.05)
    assert_pause(slot, pause)
    assert slot.ranks.page.pause_at == pause.block
    pause.moved("B", None)
    assert (await worker.hear())["block"] == pause.block


async def test_worker_and_node_killed_together_leave_the_world_with_the_keeper(stage: Stage) -> None:
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    await worker("step", n=9)
    await stage.node.kill()
    await worker.kill()
    kit, slot = await stage.next_node()
    slot.ranks.unfence()
    pause = await slot.ranks.pause(1, allow_unattended=True)
    assert pause.block == 9
    assert_pause(slot, pause)
    pause.resume()
    _, (again,) = kit.host.attach("w", {"cpu": "x"})
    (other,) = await stage.workers([line("w", kit.host, again)])
    assert (await other("step"))["block"] == 10


async def test_a_living_worker_that_has_not_come_back_holds_its_world(stage: Stage) -> None:
    """It generates without a node: its memory must not count as left at a boundary."""
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    await worker("step", n=4)
    await stage.node.kill()
    await worker("step", n=2)
    worker.process.send_signal(signal.SIGSTOP)
    kit, slot = await stage.next_node()
    slot.ranks.unfence()
    assert slot.ranks.block == 6
    with pytest.raises(ConflictError, match="lives"):
        await slot.ranks.pause(1, allow_unattended=True)
    with pytest.raises(ConflictError):
        kit.host.attach("w", {"cpu": "x"})
    await worker.kill()
    pause = await slot.ranks.pause(1, allow_unattended=True)
    assert pause.block == 6
    assert_pause(slot, pause)


async def test_a_revision_without_a_node_is_told_to_the_next(stage: Stage) -> None:
    (ticket,) = (await stage.node("session", regions=REGIONS))["tickets"]
    (worker,) = await stage.workers([ticket])
    await worker("revise", resize={"k": [6000]})
    await stage.node.kill()
    await worker("step")
    await worker("revise", resize={"k": [7000]}, add=[{"name": "n", "dtype": "int64", "shape": [2]}])
    await worker("step")
    kit, slot = await stage.next_node()
    slot.ranks.unfence()
    worker.tell("run")
    await kit.changes.wait(slot, "attached")
    await until(lambda: slot.manifest.revision == 3)
    assert [region.shape for region in slot.manifest.regions] == [(7000,), (2,)]
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)


@pytest.mark.parametrize("adopt", [False, True])
async def test_a_promised_standby_outlives_its_node(stage: Stage, adopt: bool) -> None:
    made = await stage.node("standby")
    (worker,) = await stage.workers(made["tickets"], "standby")
    await stage.node("load", standby=made["id"], bind="move-5", block=20, adopt=adopt)
    await stage.node.kill()
    kit, slot = await stage.next_node()
    if not adopt:
        assert (slot.kind, slot.bound, slot.id) == ("standby", "move-5", made["id"])
        worker.tell("wait")
        await kit.changes.wait(slot, "attached")
        kit.host.adopt(slot, "w", 9, slot.manifest, 12)
        slot.ranks.unfence()
    else:
        assert (slot.kind, slot.id, slot.ranks.page.epoch) == ("session", "w", 9)
        slot.ranks.unfence()
        worker.tell("wait")
    answer = await worker.hear()
    assert (answer["id"], answer["block"], answer["host_state"]) == ("w", 20, "brought along")
    worker.tell("run")
    await until(lambda: slot.ranks.attended)
    pause = await slot.ranks.pause(10)
    assert_pause(slot, pause)


async def test_many_extents_are_kept_and_found(run_dir: Path) -> None:
    """More descriptors than one key of the keeper holds."""
    names = [f"wm-test-{run_dir.name}-{number}" for number in range(260)]
    for name in names:
        (SHM / name).write_bytes(name.encode())
    try:
        await _keep_and_find(run_dir, names)
    finally:
        for name in names:
            (SHM / name).unlink()
        await _empty(run_dir)


async def _keep_and_find(run_dir: Path, names: list[str]) -> None:
    regions = [Region(name, "uint8", (len(name),), source=Source("shm", name)) for name in names]
    keeper = await Keeper.start(run_dir / "keeper.sock")
    async with host_kit(run_dir, keeper=keeper) as first:
        slot, tickets = await first.host.open_session(spec(*regions), "w", 1)
        assert len(slot.fds) == 260
        (worker,) = await first.join(slot, tickets)
        read = await worker("read", name=names[255])
        assert bytes.fromhex(read["hex"]).decode() == names[255]
        await worker.kill()
    async with host_kit(run_dir, keeper=keeper, incarnation=2) as second:
        slot = second.host.session("w")
        assert region_bytes(slot, names[259]).decode() == names[259]
        second.host.close_slot(slot, Ended("done"))
    assert await keeper.keys() == []
    await keeper.close()
