"""What a source of the same host hands over to be read: its table and its page are memory files, or refused.

A descriptor of anything else might keep the node's event loop waiting for whoever answers for it, or be
shorter by the time it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from inbound_kit import Memory, manifest
from machine_kit import HELLO
from memory_kit import open_descriptors

from worldmove.arming import Sign
from worldmove.descriptors import DescriptorDoor
from worldmove.digest import LeafTable
from worldmove.errors import FramingError, ManifestError, WorldMoveError
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.memory import take
from worldmove.hosting.slots import check_sealed
from worldmove.ipc import sealed_memfd
from worldmove.memory.arena import MemoryBudget
from worldmove.messages import Begin
from worldmove.offering import descriptors_of
from worldmove.opening import Opening
from worldmove.paths import LocalPath, ShownTable
from worldmove.reaching import Reaches
from worldmove.reading import Reader

ROOM = 1 << 16
"""More than the table needs, or a page's header."""


def file() -> int:
    """It may lie on any file system, also on one whose owner answers when it pleases."""
    return os.open(__file__, os.O_RDONLY)


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROOM)
    return fd


def short() -> int:
    return sealed_memfd("short", 16)


def opened(flags: int) -> int:
    fd = sealed_memfd("sealed", ROOM)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


def written_only() -> int:
    return opened(os.O_WRONLY)


def named_only() -> int:
    return opened(os.O_PATH)


Make = Callable[[], int]
LIES = pytest.mark.parametrize("lie", [file, pipe, unsealed, short, written_only, named_only])


class Host:
    """A source's memory and its door, and a destination's beside it, with real executors."""

    def __init__(self, pool: ExecutorPool, memory: Memory, target: Memory, door: DescriptorDoor) -> None:
        self.pool = pool
        self.memory = memory
        self.target = Reader(target.holding, pool, HELLO.seed)
        self.door = door
        self.table = LeafTable(self.target.memory.leaf_map.count)

    def begin(self, *behind: int, page: bool = False) -> Begin:
        """Offers the memory, and these descriptors behind it."""
        token = os.urandom(32)
        self.door.offer(token, [*self.memory.holding.fds, *behind])
        return descriptors_of(self.memory.holding, str(self.door.path), token, page=page)

    async def open(self, begin: Begin) -> LocalPath:
        settings = SimpleNamespace(peer_timeout_ms=5000.0)
        services: Any = SimpleNamespace(settings=settings, executors=self.pool, reaches=Reaches({}))
        hello = msgspec.structs.replace(HELLO, manifest=self.memory.holding.manifest)
        path = await Opening(services, hello, begin).local(self.target)
        assert isinstance(path, LocalPath)
        return path


@pytest_asyncio.fixture
async def host(run_dir: Path) -> AsyncIterator[Host]:
    pool, door, budget = ExecutorPool(1, nice=0), DescriptorDoor(run_dir / "door.sock", 5000), MemoryBudget()
    await pool.start()
    await door.start()
    memories = [Memory(await take(manifest(), budget, name)) for name in ("from", "to")]
    made = Host(pool, *memories, door)
    await made.target.open()
    yield made
    await made.target.close()
    made.table.close()
    await door.close()
    await pool.close()
    for memory in memories:
        memory.close()


@contextlib.contextmanager
def made(lie: Make) -> Any:
    fd = lie()
    try:
        yield fd
    finally:
        os.close(fd)


def untouched(*_args: object) -> bytes:
    raise AssertionError("it was read before it was known to be a memory file")


@LIES
async def test_what_is_no_table_ends_the_move_before_anything_is_read_or_mapped(
    host: Host, lie: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mapped(*_args: object, **_how: object) -> int:
        raise AssertionError("memory of a source that lies was mapped")

    with made(lie) as fd:
        begin = host.begin(fd)
        before = open_descriptors()
        monkeypatch.setattr(os, "pread", untouched)
        monkeypatch.setattr(host.pool, "attach", mapped)
        with pytest.raises(FramingError, match="the source's table of"):
            await host.open(begin)
        assert open_descriptors() <= before
        monkeypatch.undo()


async def test_a_table_as_nodes_make_it_is_read(host: Host) -> None:
    before = open_descriptors()
    host.table.store(0, bytes(range(16)))
    path = await host.open(host.begin(host.table.fd))
    assert path.shown is not None
    assert path.shown.rows(0, 1) == bytes(range(16))
    await path.release()
    assert open_descriptors() <= before


async def test_a_table_that_the_path_behind_it_fails_is_closed(host: Host) -> None:
    """The extents are looked at after it: one that is too small to be mapped leaves nothing open."""
    begin = host.begin(host.table.fd)
    before = open_descriptors()
    larger = tuple(nbytes + (1 << 20) for nbytes in begin.extent_bytes)
    with pytest.raises(WorldMoveError, match="bytes"):
        await host.open(msgspec.structs.replace(begin, extent_bytes=larger))
    async with asyncio.timeout(20):
        while open_descriptors() - before:  # noqa: ASYNC110 - executors give up what they could not map, a little later
            await asyncio.sleep(0.01)


@LIES
async def test_what_is_no_page_is_not_looked_at(lie: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", untouched)
    with made(lie) as fd, pytest.raises(FramingError, match="the control page"):
        await Sign.open(fd, [])


@LIES
def test_what_a_worker_hands_over_has_to_be_such_a_file_too(lie: Make) -> None:
    with made(lie) as fd, pytest.raises(ManifestError, match="an extent of 4096 bytes"):
        check_sealed([fd], [4096])


@pytest.mark.parametrize("count", [0, 1, ROOM // 16])
def test_a_table_may_be_as_long_as_its_file(count: int) -> None:
    ShownTable(sealed_memfd("table", ROOM), count).close()
    with made(lambda: sealed_memfd("table", ROOM)) as fd, pytest.raises(FramingError, match="too small"):
        ShownTable(fd, ROOM // 16 + 1)
