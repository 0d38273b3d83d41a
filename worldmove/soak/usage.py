"""What a node uses while no move is under way, and whether that has grown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from worldmove.rings import SHAPE
from worldmove.views import NodeView

SPARE_SOCKETS = 10
"""REST connections that clients keep open for a while."""
SPARE_FILES = 3
KEPT_RINGS = 8
"""Rings that a node with GPUs keeps for later moves, at most: it has none before its first one."""
DEVICE_SPARE_BYTES = 24 << 20
"""Device memory by which contexts of the same processes differ."""
LANE_DEVICE_BYTES = (512 << 20) + (528 << 20)
"""What a direct lane takes of its device: its ring in a soak, and a context (520 to 526 MiB on H200)."""
GROWTH_BYTES = 96 << 20
"""Private memory that a node may gain over its life: allocators keep what they once had."""


class Usage(NamedTuple):
    """Of one node's own process and what it has started."""

    memory_files: int
    sockets: int
    other_files: int
    threads: int
    children: int
    mappings: int
    lanes: int
    leased: int
    executors: int
    keeper_files: int
    free_bytes: int
    outstanding_bytes: int
    own_bytes: int
    on_gpus: bool = False

    @classmethod
    def of(cls, pid: int, view: NodeView) -> Usage:
        """As it is now. The node has a memory limit, so that its free bytes are nobody else's affair."""
        proc = Path(f"/proc/{pid}")
        links = _links(pid)
        memory = sum(link.startswith("/memfd:") for link in links)
        sockets = sum(link.startswith("socket:") for link in links)
        maps = (proc / "maps").read_text()
        return cls(
            memory_files=memory,
            sockets=sockets,
            other_files=len(links) - memory - sockets,
            threads=len(list((proc / "task").iterdir())),
            children=len((proc / "task" / str(pid) / "children").read_text().split()),
            mappings=maps.count("memfd:"),
            lanes=len(view.lanes),
            leased=sum(lane.migration_id is not None for lane in view.lanes),
            executors=len(view.executors),
            keeper_files=sum(not link.startswith("socket:") for link in _links(view.keeper)),
            free_bytes=view.devices[0].free_bytes,
            outstanding_bytes=view.gate.outstanding_bytes,
            own_bytes=_own_bytes(pid),
            on_gpus=len(view.devices) > 1,
        )

    def grown(self, before: Usage) -> list[str]:
        """What is there more than `before`, in words; empty if nothing is."""
        lanes = max(self.lanes - before.lanes, 0)
        rings = KEPT_RINGS if self.on_gpus else 0
        room = {
            "sockets": SPARE_SOCKETS + 2 * lanes,
            "other_files": SPARE_FILES + 2 * lanes,
            "memory_files": 2 * rings,
            "mappings": 2 * rings,
            "threads": 2,
            "children": lanes,
            "lanes": 2,
            "own_bytes": GROWTH_BYTES,
        }
        found = [
            f"{name}: {now}, before {was}"
            for name, now, was in zip(self._fields, self, before, strict=True)
            if name not in ("free_bytes", "on_gpus") and now > was + room.get(name, 0)
        ]
        if self.free_bytes < before.free_bytes - rings * SHAPE.slots * SHAPE.slot_bytes:
            found.append(f"free_bytes: {self.free_bytes}, before {before.free_bytes}")
        return found


def device_bytes(view: NodeView, beside: Iterable[NodeView] = ()) -> int:
    """Memory in use on a node's GPUs, by whatever process, less what direct lanes may take.

    Args:
        view: of the node.
        beside: of others that use the same GPUs.
    """
    lanes = sum(lane.kind == "direct" for one in (view, *beside) for lane in one.lanes)
    used = sum(device.total_bytes - device.free_bytes for device in view.devices if device.kind == "cuda")
    return used - lanes * LANE_DEVICE_BYTES


def _links(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(entry.readlink()))
    return found


def _own_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
