"""Sessions without a worker cost one descriptor: their pages lie in a folio, and come out for a worker."""

from __future__ import annotations

import asyncio
import gc
import resource
import weakref
from pathlib import Path

import pytest
from hosting_kit import assert_world, descriptors, host_kit, spec, until

from worldmove.errors import NoMemoryError
from worldmove.hosting.folio import CAPACITY, LARGEST, Folio, Place
from worldmove.memory.keeping import Keeper
from worldmove.memory.limits import SPARE_DESCRIPTORS, check_descriptors, free_descriptors
from worldmove.page.messages import Ended

MANY = 20


def in_keeper(keeper: Keeper) -> int:
    """Open descriptors of the keeper."""
    return len(list(Path(f"/proc/{keeper.pid}/fd").iterdir()))


async def test_idle_sessions_cost_one_descriptor_however_often_the_node_starts(run_dir: Path) -> None:
    keeper = await Keeper.start(run_dir / "keeper.sock")
    held = 0
    for incarnation in (1, 2, 3):
        async with host_kit(run_dir, keeper=keeper, incarnation=incarnation) as kit:
            if incarnation == 1:
                await kit.host.open_session(spec(), "first", 1)
                before, held = descriptors(), in_keeper(keeper)
                for number in range(MANY):
                    slot, _ = await kit.host.open_session(spec(), f"w{number}", 5)
                assert descriptors() - before == in_keeper(keeper) - held == MANY
                held = in_keeper(keeper)
            assert in_keeper(keeper) == held
            assert len([key for key in await keeper.keys() if key.startswith("pages/")]) == 1
            for number in range(MANY):
                slot = kit.host.session(f"w{number}")
                page = slot.ranks.page
                assert (page.incarnation, page.epoch, page.session_id) == (incarnation, 5, f"w{number}")
                assert slot.pages.leaf is not None
                assert not slot.pages.former
            if incarnation == 3:
                for slot in list(kit.host.sessions.values()):
                    kit.host.close_slot(slot, Ended("done"))
    # Nothing keeps the keeper alive.
    assert await keeper.keys() == []
    await keeper.close()


async def test_registrations_that_are_cancelled_keep_no_keeper_alive(run_dir: Path) -> None:
    keeper = await Keeper.start(run_dir / "keeper.sock")
    for turns in range(0, 30, 2):
        async with host_kit(run_dir, keeper=keeper) as kit:
            task = asyncio.create_task(kit.host.open_session(spec(), "w", 1))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait({task})
            for slot in list(kit.host.sessions.values()):
                kit.host.close_slot(slot, Ended("done"))
        assert await keeper.keys() == [], turns
    await keeper.close()


async def test_a_worker_gets_a_page_of_its_own_and_leaves_it_to_the_next_node(run_dir: Path) -> None:
    keeper = await Keeper.start(run_dir / "keeper.sock")
    async with host_kit(run_dir, keeper=keeper) as kit:
        neighbour, _ = await kit.host.open_session(spec(), "neighbour", 1)
        slot, (worker,) = await kit.session()
        assert slot.pages.leaf is None
        assert neighbour.pages.leaf is not None
        await worker("step", n=7)
        # A page that moved in later lies where the worker's page was: it starts empty.
        later, _ = await kit.host.open_session(spec(), "later", 1)
        assert (later.ranks.block, later.ranks.page.session_id) == (0, "later")
        await worker.kill()
        await kit.changes.wait(slot, "lost")
        await until(lambda: not slot.pages.occupied(0))
    async with host_kit(run_dir, keeper=keeper, incarnation=2) as kit:
        slot = kit.host.session("w")
        assert slot.pages.leaf is not None
        slot.ranks.unfence()
        assert slot.ranks.block == 7
        assert_world(slot, 7)
        _, tickets = kit.host.attach("w", {"cpu": "x"})
        (worker,) = await kit.join(slot, tickets)
        await worker("step", n=2)
        assert slot.ranks.block == 9
        await worker.kill()
        for each in list(kit.host.sessions.values()):
            kit.host.close_slot(each, Ended("done"))
    assert await keeper.keys() == []
    await keeper.close()


async def test_a_node_without_descriptors_refuses_and_is_as_it_was(run_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with host_kit(run_dir) as kit:
        slot, _ = await kit.host.open_session(spec(), "w", 1)
        before, free, held = descriptors(), free_descriptors(), kit.budget.held
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - free + SPARE_DESCRIPTORS + 1, hard))
        try:
            with pytest.raises(NoMemoryError) as refused:
                await kit.host.open_session(spec(), "one-more", 1)
            assert refused.value.details == {"required": 2, "available": 1}
            assert (descriptors(), kit.budget.held) == (before, held)
            kit.host.close_slot(slot, Ended("room"))
            await until(lambda: descriptors() < before)
            await kit.host.open_session(spec(), "one-more", 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_keeper_without_descriptors_refuses_and_is_as_it_was(run_dir: Path) -> None:
    keeper = await Keeper.start(run_dir / "keeper.sock")
    async with host_kit(run_dir, keeper=keeper) as kit:
        slot, _ = await kit.host.open_session(spec(), "w", 1)
        before, keys = descriptors(), await keeper.keys()
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (in_keeper(keeper) + 100, 400))
        with pytest.raises(NoMemoryError) as refused:
            await kit.host.open_session(spec(), "one-more", 1)
        assert refused.value.details == {"required": 1, "available": 0}
        assert "one-more" not in kit.host.sessions
        await until(lambda: descriptors() == before)
        assert await keeper.keys() == keys
        # What is held already may change.
        await kit.host.keep(slot)
        kit.host.close_slot(slot, Ended("done"))
    await keeper.close()


def test_places_are_reused_and_empty_again() -> None:
    folio = Folio()
    sizes = {"incarnation": 1, "epoch": 2}
    first, second = folio.add(1, 4096, **sizes), folio.add(2, 0, **sizes)
    assert (first, second) == (Place(0, 16384), Place(16384, 12288))
    page = folio.open(second)
    page.session_id = "x" * 256
    page.close()
    assert folio.free(second) is None
    assert folio.add(2, 0, **sizes) == second
    page = folio.open(second)
    assert (page.session_id, page.epoch, page.ranks) == (None, 2, 2)
    page.close()
    assert folio.add(1, LARGEST, **sizes) is None
    folio._end = CAPACITY
    assert folio.add(1, 4096, **sizes) is None
    key = folio.key
    assert folio.free(first) is None
    assert folio.free(second) == key
    assert folio.fd < 0
    again = folio.add(1, 4096, **sizes)
    assert again == first
    assert folio.key != key
    folio.free(again)


def test_where_no_file_may_be_so_large_there_is_no_folio() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert Folio().add(1, 4096, incarnation=1, epoch=1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_descriptors_are_counted() -> None:
    check_descriptors(1)
    with pytest.raises(NoMemoryError, match="10000000 descriptors are needed"):
        check_descriptors(10_000_000)


async def test_an_ended_session_is_freed_without_the_collector(run_dir: Path) -> None:
    """Sessions are set aside from it (`worldmove.node.heap`): a cycle would stay."""
    async with host_kit(run_dir) as kit:
        gc.disable()
        try:
            slot, _ = await kit.host.open_session(spec(), "w", 1)
            gone = weakref.ref(slot)
            kit.host.close_slot(slot, Ended("done"))
            del slot
            await until(lambda: gone() is None)
        finally:
            gc.enable()
