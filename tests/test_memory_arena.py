"""Arenas: sealed, cleared, counted, and gone when nobody holds them."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_kit import holders, open_descriptors

from worldmove.errors import NoMemoryError, TransportError
from worldmove.ipc import map_shared, sealed_memfd
from worldmove.memory.arena import HEADROOM_BYTES, MemoryBudget, create_arena, free_arenas, free_bytes
from worldmove.memory.limits import MemoryView, machine_memory

MB = 1024 * 1024
PAGE = mmap.PAGESIZE


def unique() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.mark.parametrize("nbytes", [1, 511, PAGE, PAGE + 1, 5 * MB + 3])
def test_an_arena_is_zero_and_all_there(nbytes: int) -> None:
    fd = create_arena(nbytes, unique())
    status = os.fstat(fd)
    assert status.st_size == nbytes
    assert status.st_blocks * 512 >= nbytes
    assert os.pread(fd, nbytes, 0) == bytes(nbytes)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_nobody_can_change_the_size_of_an_arena() -> None:
    fd = create_arena(2 * PAGE, unique())
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (0, PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    mapped = map_shared(fd, 2 * PAGE)
    mapped[-1] = 7
    assert os.pread(fd, 1, 2 * PAGE - 1) == b"\x07"
    mapped.close()
    os.close(fd)


def test_the_name_shows_who_holds_it() -> None:
    name = unique()
    fd = create_arena(PAGE, name)
    assert holders(name) == {os.getpid()}
    mapped = map_shared(fd, PAGE)
    os.close(fd)
    assert holders(name) == {os.getpid()}
    mapped.close()
    assert holders(name) == set()


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated() -> None:
    name = unique()
    before = open_descriptors()
    with pytest.raises(NoMemoryError) as caught:
        create_arena(1 << 50, name)
    assert caught.value.details["required_bytes"] == 1 << 50
    assert 0 < caught.value.details["available_bytes"] <= machine_memory().total
    assert open_descriptors() <= before
    assert holders(name) == set()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_memory_without_size_is_refused(nbytes: int) -> None:
    with pytest.raises(TransportError):
        sealed_memfd(unique(), nbytes)
    with pytest.raises(NoMemoryError):
        create_arena(nbytes, unique())


def test_a_sealed_file_is_not_mapped_beyond_its_end() -> None:
    fd = sealed_memfd(unique(), 10)
    with pytest.raises(TransportError):
        map_shared(fd, 11)
    os.close(fd)


def budget(limit: int | None = None, *, total: int = 1 << 40, available: int = 1 << 40) -> MemoryBudget:
    return MemoryBudget(limit, probe=lambda: MemoryView(total, available))


def test_a_budget_counts() -> None:
    mine = budget(100)
    assert (mine.total, mine.free, mine.held) == (100, 100, 0)
    mine.reserve(60)
    with pytest.raises(NoMemoryError) as caught:
        mine.reserve(41)
    assert caught.value.details == {"required_bytes": 41, "available_bytes": 40}
    assert (mine.free, mine.held) == (40, 60)
    mine.adopt(50)
    assert (mine.free, mine.held) == (0, 110)
    mine.release(110)
    assert (mine.free, mine.held) == (100, 0)


def test_the_machine_is_tighter_than_the_limit() -> None:
    mine = budget(1 << 39, total=1 << 38, available=HEADROOM_BYTES + 5)
    assert mine.total == 1 << 38
    assert mine.free == 5
    assert budget(available=HEADROOM_BYTES - 1).free == 0
    with pytest.raises(NoMemoryError):
        mine.reserve(6)


def test_many_reservations_at_once_share_a_look_and_none_is_refused_without_one() -> None:
    looks = 0
    available = HEADROOM_BYTES + 100

    def probe() -> MemoryView:
        nonlocal looks
        looks += 1
        return MemoryView(1 << 40, available)

    mine = MemoryBudget(None, probe=probe)
    mine.reserve(60)
    seen = looks
    mine.reserve(40)
    assert looks <= seen + 1
    available = HEADROOM_BYTES + 7
    mine.reserve(7)
    with pytest.raises(NoMemoryError) as caught:
        mine.reserve(8)
    assert caught.value.details == {"required_bytes": 8, "available_bytes": 7}


@given(st.lists(st.integers(0, 120)))
def test_a_budget_never_promises_more_than_its_limit(sizes: list[int]) -> None:
    mine = budget(200)
    granted: list[int] = []
    for size in sizes:
        if size <= 200 - sum(granted):
            mine.reserve(size)
            granted.append(size)
        else:
            with pytest.raises(NoMemoryError):
                mine.reserve(size)
        assert mine.held == sum(granted) <= 200
        if len(granted) > 3:
            mine.release(granted.pop(0))


async def test_arenas_are_made_all_or_none() -> None:
    mine = MemoryBudget(10 * MB)
    before = open_descriptors()
    name = unique()
    fds = await mine.allocate([MB, 1, 2 * MB], name)
    assert [os.fstat(fd).st_size for fd in fds] == [MB, 1, 2 * MB]
    assert mine.held == 3 * MB + 1
    with pytest.raises(NoMemoryError):
        await mine.allocate([4 * MB, 4 * MB], name)
    assert mine.held == 3 * MB + 1
    assert len(open_descriptors() - before) == 3
    mine.release(3 * MB + 1)
    await free_arenas(fds)
    assert open_descriptors() <= before
    assert holders(name) == set()
    assert mine.free == 10 * MB


async def test_one_that_cannot_be_made_takes_the_others_with_it() -> None:
    mine = budget()
    name = unique()
    with pytest.raises(NoMemoryError):
        await mine.allocate([MB, 1 << 39], name)
    assert mine.held == 0
    assert mine.free == free_bytes(MemoryView(1 << 40, 1 << 40))
    assert holders(name) == set()


async def test_a_cancelled_allocation_leaves_nothing() -> None:
    mine = MemoryBudget()
    name = unique()
    before = open_descriptors()
    for _ in range(5):
        task = asyncio.create_task(mine.allocate([48 * MB, 16 * MB], name))
        while not holders(name):
            await asyncio.sleep(0)
            assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert mine.held == 64 * MB
        await asyncio.gather(*mine._undoing)
        assert mine.held == 0
        assert holders(name) == set()
    assert open_descriptors() <= before


async def test_what_is_being_made_counts_already() -> None:
    mine = budget(available=HEADROOM_BYTES + 10 * MB)
    task = asyncio.create_task(mine.allocate([8 * MB], unique()))
    await asyncio.sleep(0)
    assert mine.free == 2 * MB
    with pytest.raises(NoMemoryError):
        await mine.allocate([3 * MB], unique())
    fds = await task
    assert mine.free == 10 * MB
    await free_arenas(fds)


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n", "proc/self/cgroup": cgroup, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_cgroup_leaves_what_the_machine_has(tmp_path: Path) -> None:
    assert machine_memory(tree(tmp_path, "0::/\n", {})) == MemoryView(1000 * 1024, 800 * 1024)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {
        f"{group}/a/b/memory.max": "max\n",
        f"{group}/a/b/memory.current": "5\n",
        f"{group}/a/memory.max": "500000\n",
        f"{group}/a/memory.current": "400000\n",
        f"{group}/a/memory.stat": "anon 1\ninactive_file 50000\n",
    }
    assert machine_memory(tree(tmp_path, "0::/a/b\n", files)) == MemoryView(500000, 150000)


def test_a_container_sees_its_limit_at_the_mount(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        f"{group}/memory.limit_in_bytes": "300000\n",
        f"{group}/memory.usage_in_bytes": "310000\n",
        f"{group}/memory.stat": "total_inactive_file 5000\n",
    }
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n"
    assert machine_memory(tree(tmp_path, cgroup, files)) == MemoryView(300000, 0)


def test_this_machine_has_memory() -> None:
    memory = machine_memory()
    assert 0 < memory.available <= memory.total
