"""WorldMove moves a live session from one device to another: bit-identical, or nothing is installed.

Serving stacks need only what stands here; it is loaded at first use, so that the node's own processes,
which are many and need none of it, start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldmove.errors import SessionMoved, WorldMoveError
    from worldmove.manifest import Region
    from worldmove.worker import Worker

__all__ = ["Region", "SessionMoved", "Worker", "WorldMoveError"]

_HOME = {
    "Region": "worldmove.manifest",
    "SessionMoved": "worldmove.errors",
    "Worker": "worldmove.worker",
    "WorldMoveError": "worldmove.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'worldmove' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only for those who ask

    return getattr(import_module(_HOME[name]), name)
