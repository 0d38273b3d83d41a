"""Processors near to a device, in a made-up machine; and memory made near to them."""

from __future__ import annotations

import os
from pathlib import Path

from worldmove.ipc import close_all
from worldmove.memory.arena import MemoryBudget
from worldmove.memory.near import near, running_on

BUS = "00000000:4A:00.0"


def machine(root: Path, *, nodes: str, node: int, cpus: str) -> Path:
    device = root / "sys/bus/pci/devices/0000:4a:00.0"
    system = root / "sys/devices/system/node"
    (system / f"node{max(node, 0)}").mkdir(parents=True)
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (system / "online").write_text(f"{nodes}\n")
    (system / f"node{max(node, 0)}" / "cpulist").write_text(f"{cpus}\n")
    return root


def test_the_processors_of_the_devices_node_that_may_be_used(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    root = machine(tmp_path, nodes="0-1", node=1, cpus=f"{mine[0]},4000-4003")
    assert near(BUS, root) == (mine[0],)


def test_on_one_node_or_where_nothing_is_known_nothing_is_near(tmp_path: Path) -> None:
    assert near(BUS, machine(tmp_path / "one", nodes="0", node=0, cpus="0-63")) == ()
    assert near(BUS, machine(tmp_path / "unknown", nodes="0-1", node=-1, cpus="0-63")) == ()
    assert near(BUS, tmp_path / "nowhere") == ()
    assert near("", tmp_path) == ()


async def test_memory_is_made_on_the_processors_that_are_named() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with running_on(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    budget = MemoryBudget()
    close_all(await budget.allocate([4096], "near", cpus=tuple(one)))
    assert os.sched_getaffinity(0) == before
