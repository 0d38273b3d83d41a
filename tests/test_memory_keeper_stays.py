"""A keeper in a container of its own: in the foreground, there before its node, and after it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from worldmove.ipc import sealed_memfd
from worldmove.memory.keeper import GRACE_S
from worldmove.memory.keeping import OTHER_KEEPER, Keeper


def appears(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def start(path: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worldmove.memory.keeper", "--stay", str(path)
    )


async def connected(path: Path) -> Keeper:
    """The client of a keeper that stays; one that a client would start itself would be another."""
    await asyncio.to_thread(appears, path)
    return await Keeper.start(path)


async def test_a_keeper_that_stays_outlives_every_node_and_ends_by_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "A" / "keeper.sock"
    process = await start(path)
    try:
        keeper = await connected(path)
        assert keeper.pid == process.pid
        assert path.parent.stat().st_mode & 0o777 == 0o700
        await keeper.close()
        await asyncio.sleep(2 * GRACE_S)  # an empty keeper of the other kind would have gone

        fd = sealed_memfd("test-stays", 4096)
        keeper = await Keeper.start(path, claim=True)
        await keeper.put("world", b"meta", [fd])
        await keeper.close()
        os.close(fd)
        later = await Keeper.start(path, claim=True)
        assert later.pid == process.pid
        meta, (back,) = await later.get("world")
        assert (meta, os.fstat(back).st_size) == (b"meta", 4096)
        os.close(back)
        await later.close()
        second = await start(path)
        assert await second.wait() == OTHER_KEEPER
    finally:
        process.terminate()
        await process.wait()


async def test_a_keeper_whose_socket_was_removed_ends_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    process = await start(path)
    keeper = await connected(path)
    path.unlink()
    await keeper.close()
    async with asyncio.timeout(20):
        assert await process.wait() == 0
