"""Parts of what a node shows of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from worldmove.hosting.host import Host
from worldmove.hosting.slots import Slot
from worldmove.ledger.records import NodeInfo
from worldmove.transport.pool import LanePool
from worldmove.views import LaneView, PeerNode, StandbyView


def standby_views(host: Host | None) -> tuple[StandbyView, ...]:
    """The standbys of a node; none before it has a host."""
    return tuple(
        StandbyView(
            id=slot.id,
            model=slot.manifest.model,
            state=_standby_state(slot),
            bytes=slot.manifest.nbytes,
        )
        for slot in (host.standbys.values() if host is not None else ())
    )


def lane_views(tcp: LanePool, direct: Mapping[str, LanePool]) -> tuple[LaneView, ...]:
    """The lanes of a node: those of host memory, and those of each GPU."""
    pools = [("tcp", tcp), *(("direct", pool) for pool in direct.values())]
    return tuple(
        LaneView(pid=pid, kind=kind, port=port, migration_id=move)
        for kind, pool in pools
        for pid, port, move in pool.lanes
    )


def _standby_state(slot: Slot) -> Literal["waiting", "attached", "bound", "silent"]:
    if slot.bound:
        return "bound"
    if slot.ranks.roll.silent:
        return "silent"
    return "attached" if slot.ranks.attended else "waiting"


def peer_nodes(found: Sequence[NodeInfo], alive: Mapping[str, bool]) -> list[PeerNode]:
    """The nodes of a fleet, with what is known of their lives by name."""
    return [
        PeerNode(
            name=node.name,
            incarnation=node.incarnation,
            url=node.url,
            boot_id=node.boot_id,
            alive=alive[node.name],
        )
        for node in found
    ]


def boot_id() -> str:
    """This boot of this host: equal for processes that can pass each other descriptors, if they meet."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"
