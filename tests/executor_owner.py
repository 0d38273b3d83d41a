"""A process that owns a pool of executors, says who they are, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from worldmove.executor.pool import ExecutorPool


async def main() -> None:
    pool = ExecutorPool(2)
    await pool.start()
    sys.stdout.write(" ".join(map(str, pool.pids)) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(main())
