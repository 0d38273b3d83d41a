"""Which processes a direct lane watches, and what it does when they end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from worldmove.transport.acquaintances import Acquaintances, myself
from worldmove.transport.framing import ProcessId


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def child() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )


async def test_it_is_told_once_when_a_process_of_this_host_ends() -> None:
    gone = asyncio.Event()
    told: list[None] = []

    def tell() -> None:
        told.append(None)
        gone.set()

    met = Acquaintances(myself(), tell)
    first, second = await child(), await child()
    before = descriptors()
    for process in (first, second, first):
        met.meet(met.me._replace(pid=process.pid))
    assert descriptors() == before + 2
    assert not told
    first.kill()
    await asyncio.wait_for(gone.wait(), 10)
    second.kill()
    await asyncio.gather(first.wait(), second.wait())
    met.meet(met.me._replace(pid=second.pid))
    await asyncio.sleep(0)
    assert len(told) == 1
    met.close()


async def test_other_hosts_are_not_watched_and_what_cannot_be_watched_counts_as_gone() -> None:
    me = myself()
    assert me.pid == os.getpid()
    ended = await child()
    ended.kill()
    await ended.wait()
    for other, gone in (
        (ProcessId(1, me.host ^ 1, me.namespace), 0),
        (ProcessId(os.getpid(), me.host, me.namespace), 0),
        (ProcessId(1, me.host, me.namespace ^ 1), 1),
        (ProcessId(ended.pid, me.host, me.namespace), 1),
        (ProcessId(0, me.host, me.namespace), 1),
        (ProcessId((1 << 32) - 1, me.host, me.namespace), 1),
        (ProcessId(me.pid, me.host, me.namespace ^ 1), 1),  # watched already, were it of this namespace
    ):
        told: list[None] = []
        met = Acquaintances(me, lambda told=told: told.append(None))  # type: ignore[misc]
        met.meet(me)
        met.meet(other)
        assert len(told) == gone, other
        met.close()
