"""Faults of executors, for tests: reachable only on nodes that were started with them."""

from __future__ import annotations

from worldmove.errors import ConfigError

PREFIX = "land-"
"""What these names, and no others, begin with."""
LAND_FLIP_ONCE = "land-flip-once"
"""A GPU's executor flips one bit of the first bytes that it has copied, in the memory where they lie."""
ALL = (LAND_FLIP_ONCE,)


def executor_faults(option: str) -> tuple[str, ...]:
    """The executors' part of the comma-separated option `faults`; other parts' names pass by.

    Raises:
        ConfigError: a name that begins with `land-` is unknown.
    """
    names = tuple(name for name in (part.strip() for part in option.split(",")) if name.startswith(PREFIX))
    for name in names:
        if name not in ALL:
            raise ConfigError(f"faults: {name!r} is unknown; allowed are {', '.join(ALL)}", option="faults")
    return names
