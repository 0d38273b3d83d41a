"""Puts memory into a keeper and then waits to be killed: `memory_client.py SOCKET KEY COUNT`."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop
from memory_kit import pattern

from worldmove.memory.arena import create_arena
from worldmove.memory.keeping import Keeper


async def main(path: str, key: str, count: int) -> None:
    keeper = await Keeper.start(path)
    fds = []
    for number in range(count):
        fds.append(create_arena(100_000, f"test-{key}"))
        os.pwrite(fds[-1], pattern(100_000, number), 0)
    await keeper.put(key, b"meta of " + key.encode(), fds)
    sys.stdout.write(f"{keeper.pid}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
