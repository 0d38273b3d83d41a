"""A node as a process, as far as hosting goes: a host with a keeper, told what to do by JSON lines.

Its keeper, and the workers, outlive it: that is what it is for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop
from hosting_kit import line, spec

from worldmove.hosting.host import Host
from worldmove.hosting.pausing import Pause
from worldmove.manifest import Region
from worldmove.memory.arena import MemoryBudget
from worldmove.memory.keeping import Keeper


class Node:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.pause: Pause | None = None

    async def do_session(self, regions: list[dict[str, Any]]) -> dict[str, Any]:
        made = spec(*(Region(**region) for region in regions))
        _, tickets = await self.host.open_session(made, "w", 3, seed=11)
        return {"tickets": [line("w", self.host, ticket) for ticket in tickets]}

    async def do_standby(self) -> dict[str, Any]:
        slot, tickets = await self.host.open_standby(spec())
        return {"id": slot.id, "tickets": [line(slot.id, self.host, ticket) for ticket in tickets]}

    async def do_load(self, standby: str, bind: str, block: int, adopt: bool) -> dict[str, Any]:
        slot = self.host.standby(standby)
        self.host.bind(slot, bind)
        await self.host.keep(slot)
        self.host.load(slot, block, [b"brought along"])
        if adopt:
            self.host.adopt(slot, "w", 9, slot.manifest, 12)
        return {}

    async def do_pause(self) -> dict[str, Any]:
        self.pause = await self.host.session("w").ranks.pause(10)
        return {"block": self.pause.block}

    async def do_resume(self) -> dict[str, Any]:
        assert self.pause is not None
        self.pause.resume()
        return {}


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    run_dir, incarnation = Path(sys.argv[1]), int(sys.argv[2])
    keeper = await Keeper.start(run_dir / "keeper.sock")
    host = Host(
        socket_path=run_dir / "node.sock",
        incarnation=incarnation,
        arenas=MemoryBudget(),
        keeper=keeper,
        on_change=lambda _slot, _change: None,
    )
    host.start()
    node = Node(host)
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(text)
        answer = await getattr(node, f"do_{command.pop('do')}")(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
