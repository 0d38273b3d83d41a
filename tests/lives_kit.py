"""What tests of nodes that die have in common: the fleet's options, faults to arm, worlds that go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from fleet_kit import Actor, Fleet, Node, Twin, assert_world, until

from worldmove.faults.door import order
from worldmove.manifest import Region

REGIONS = (Region("k", "uint8", (1 << 20,)), Region("odd", "uint8", (777,)))
OPTIONS = ("--peer-timeout-ms", "2500", "--stall-ms", "1500", "--faults", "arm", "--memory-limit", "64MB")


def begins(fleet: Fleet, name: str, node: str = "A", **spec: Any) -> tuple[str, Actor, Twin]:
    """A world that generates freely."""
    session, actor = fleet.unique(name), fleet.actor(node)
    actor.register(session, REGIONS, **spec)
    actor.run(work_ms=3.0)
    return session, actor, Twin(REGIONS)


def stands_by(fleet: Fleet, node: str) -> tuple[Actor, Future[Any]]:
    """A worker that waits for a world."""
    actor = fleet.actor(node)
    return actor, actor.wait_for(REGIONS)


def goes_on(twin: Twin, *actors: Actor) -> None:
    """All ranks generate, and no block is missing or wrong."""
    block = max(actor.block for actor in actors)
    for actor in actors:
        until(partial(_past, actor, block + 2), "the world generates on")
    for actor in actors:
        actor.ask("halt")
    last = max(actor.block for actor in actors)
    for actor in actors:
        actor.step(last - actor.block)
    assert_world(actors, twin, host_state=False)
    for actor in actors:
        actor.ask("run")


def _past(actor: Actor, block: int) -> bool:
    return actor.block > block


def state(node: Node, session: str) -> str:
    return node.client.session(session).state


def becomes(node: Node, session: str, wanted: str) -> None:
    until(lambda: state(node, session) == wanted, f"{session} is {wanted} at {node.name}")


def is_live(node: Node, session: str) -> None:
    becomes(node, session, "live")


def arm(node: Node, fault: str) -> None:
    asyncio.run(order(node.run_dir, arm=fault))


def has_stopped(node: Node) -> None:
    """Waits for a fault that stops the node's process."""
    stat = Path(f"/proc/{node.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"node {node.name} has stopped")


def gone(pids: Sequence[int]) -> None:
    """Waits until no such process runs; one may be left to the system to reap."""
    until(lambda: not any(_runs(pid) for pid in pids), "its processes are gone")


def _runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def replaced(node: Node) -> subprocess.Popen[bytes]:
    """Starts another process of a node beside the one that is there, which is returned."""
    former = node.process
    assert former is not None
    node.client.close()
    node.start()
    return former


def killed_with_its_keeper(node: Node) -> None:
    """Nothing of the node is left but its workers. It may have been stopped before."""
    keeper = _keeper(node)
    node.freeze()  # else it would start another one
    os.kill(keeper, signal.SIGKILL)
    node.kill()
    gone([keeper])


def _keeper(node: Node) -> int:
    """Seen from outside: a stopped node does not answer."""
    wanted = str(node.run_dir / "keeper.sock").encode()
    for entry in Path("/proc").glob("[0-9]*"):
        command = (entry / "cmdline").read_bytes() if (entry / "cmdline").exists() else b""
        if wanted in command and b"keeper" in command and b"serve" not in command:
            return int(entry.name)
    raise AssertionError(f"node {node.name} has no keeper")
