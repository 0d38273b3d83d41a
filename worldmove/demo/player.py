"""A scripted player: what the viewer presses is a pure function of the block number.

So a world that moves and a twin that never moves see the same player without talking to each other.
"""

from __future__ import annotations

import enum
import hashlib
from typing import NamedTuple

SEGMENT_BLOCKS = 3
"""For how many blocks one set of keys is held."""


class Key(enum.IntFlag):
    """Keys of the player; any number may be held at once."""

    NONE = 0
    FASTER = 1
    SLOWER = 2
    CLIMB = 4
    DIVE = 8


KEYS = (Key.FASTER, Key.SLOWER, Key.CLIMB, Key.DIVE)

_CHOICES = (
    Key.FASTER,
    Key.FASTER | Key.CLIMB,
    Key.FASTER | Key.DIVE,
    Key.CLIMB,
    Key.DIVE,
    Key.SLOWER,
    Key.NONE,
    Key.SLOWER | Key.CLIMB,
)


class Action(NamedTuple):
    """Keys held during one block."""

    block: int
    keys: Key


def action(block: int, seed: int = 0) -> Action:
    """What the player with `seed` does during `block` (counted from 1)."""
    segment = (block - 1) // SEGMENT_BLOCKS
    digest = hashlib.blake2b(f"{seed}/{segment}".encode(), digest_size=2).digest()
    return Action(block, _CHOICES[digest[0] % len(_CHOICES)])
