"""Parts of what a node shows of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from worldmove.hosting.host import Host
from worldmove.hosting.slots import Slot
from worldmove.views import StandbyView


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


def _standby_state(slot: Slot) -> Literal["waiting", "attached", "bound", "silent"]:
    if slot.bound:
        return "bound"
    if slot.ranks.roll.silent:
        return "silent"
    return "attached" if slot.ranks.attended else "waiting"


def boot_id() -> str:
    """This boot of this host: equal for processes that can pass each other descriptors, if they meet."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}"
