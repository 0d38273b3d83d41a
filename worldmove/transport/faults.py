"""Faults of lanes, for tests: reachable only when the node was started with them.

What is damaged is always a copy; the arena is never touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worldmove.errors import ConfigError

FLIP_ONCE = "lane-flip-once"
FLIP_ALWAYS = "lane-flip-always"
SHORT_ONCE = "lane-short-once"
OVER_ONCE = "lane-over-once"
STALL = "lane-stall"
UNASKED_ONCE = "lane-unasked-once"
DRIP = "lane-drip"
RING_FLIP_ONCE = "ring-flip-once"
ALL = (FLIP_ONCE, FLIP_ALWAYS, SHORT_ONCE, OVER_ONCE, STALL, UNASKED_ONCE, DRIP, RING_FLIP_ONCE)
PREFIXES = ("lane-", "ring-")
"""What these names, and no others, begin with."""
UNASKED = bytes(4096)
"""What is sent that nobody asked for: no length that a pull of whole leaves is cut into."""
DRIP_SHARE = 0.5
"""Of the stall deadline, between two chunks: never so long that the lane's own watch notices anything."""
ARM = "arm"
"""Does nothing by itself; a lease may then bring a fault of its own."""


def lane_faults(option: str) -> tuple[str, ...]:
    """The lanes' part of the comma-separated option `faults`; other parts' names pass by.

    Raises:
        ConfigError: a name that begins with `lane-` or `ring-` is unknown.
    """
    names = tuple(name for name in (part.strip() for part in option.split(",")) if name.startswith(PREFIXES))
    for name in names:
        if name not in ALL:
            raise ConfigError(f"faults: {name!r} is unknown; allowed are {', '.join(ALL)}")
    return names


class Faults:
    """Damages chunks on their way out.

    `lane-flip-once` flips the middle byte of the process's first chunk, `lane-flip-always` that of
    every chunk; `lane-short-once` drops the last byte of the first chunk, `lane-over-once` adds one;
    `lane-stall` sends nothing after the first chunk, while beats go on; `lane-unasked-once` has bytes
    follow the first chunk that nobody pulled; `lane-drip` sends each chunk just soon enough for the lane's
    own watch, so that pulls of several chunks take many times as long as their grants may. `ring-flip-once`
    flips a byte of the first slot that is filled, at whichever side.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = set(names)
        self._sent = 0
        self._spoiled = False

    def of_lease(self, fault: str) -> Faults:
        """What befalls one lease: the fault that it brought, if faults are allowed, else these."""
        return Faults([fault]) if fault and self._names else self

    async def pause(self, stall_s: float) -> None:
        """Returns when the next chunk may be sent, which may be never; `stall_s`: of the lane, in seconds."""
        if STALL in self._names and self._sent:
            await asyncio.get_running_loop().create_future()
        if DRIP in self._names:
            await asyncio.sleep(DRIP_SHARE * stall_s)

    def unasked(self) -> bytes:
        """What follows the chunk that was just sent, though nobody pulled it; mostly nothing (empty)."""
        return UNASKED if UNASKED_ONCE in self._names and self._sent == 1 else b""

    def wound(self) -> str:
        """What is done to the next chunk: `flip` a byte, one `short`, one `over`, or nothing (empty)."""
        self._sent += 1
        first = self._sent == 1
        if FLIP_ALWAYS in self._names or (FLIP_ONCE in self._names and first):
            return "flip"
        if SHORT_ONCE in self._names and first:
            return "short"
        return "over" if OVER_ONCE in self._names and first else ""

    def damage(self, data: memoryview) -> memoryview:
        """The chunk as it is to be sent."""
        match self.wound():
            case "flip":
                copy = bytearray(data)
                copy[len(copy) // 2] ^= 0xFF
                return memoryview(copy)
            case "short":
                return memoryview(bytes(data[:-1]))
            case "over":
                return memoryview(bytes(data) + b"\x5a")
        return data

    def spoils(self) -> bool:
        """Whether what has just been filled of a slot is to be damaged; once."""
        now = RING_FLIP_ONCE in self._names and not self._spoiled
        self._spoiled |= now
        return now

    def spoil(self, slot: memoryview) -> None:
        """Damages what has just been filled of a slot."""
        if self.spoils():
            slot[len(slot) // 2] ^= 0xFF
