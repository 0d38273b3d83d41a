"""What one round took, bytes, leaves and times, as the receiving end sees them; and what was damaged."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from worldmove.hosting.memory import Holding
from worldmove.manifest import LeafMap
from worldmove.messages import DamagedLeaf
from worldmove.protocol import RoundComplete

MOST_NAMED = 10_000


@dataclass(slots=True)
class RoundCount:
    """What a round took so far.

    Attributes:
        leaves, bytes: of what was asked for. copied_bytes: of what lay elsewhere here.
        again_bytes: of `bytes`, what came at another stop of the world first.
        share: of the time in which bytes may come.
        started: when it began; earlier than it was `told`, where bytes came by themselves as the world stood.
        asked_at, landed_at: when the first bytes were asked for, and the last ones landed; monotonic seconds.
    """

    number: int
    final: bool
    started: float
    leaves: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    again_bytes: int = 0
    share: float = 1.0
    asked_at: float | None = None
    landed_at: float | None = None
    told: float = field(init=False)

    def __post_init__(self) -> None:
        self.told = self.started

    @property
    def ms(self) -> float:
        """Since the round began."""
        return (time.monotonic() - self.started) * 1000

    @property
    def wire_ms(self) -> float:
        """From the first request to the last landing, had nothing waited; 0 where nothing was asked for."""
        if self.asked_at is None or self.landed_at is None:
            return 0.0
        return (self.landed_at - self.asked_at) * 1000 * self.share

    def again(self, leaves: int, nbytes: int) -> None:
        """What has come is asked for once more: where it began was at another stop, and in no pause."""
        self.started = self.told
        self.leaves += leaves
        self.bytes += nbytes
        self.again_bytes += nbytes

    def complete(self, number: int) -> RoundComplete:
        """What the machine hears of round `number`."""
        return RoundComplete(
            number=number,
            leaves=self.leaves,
            bytes=self.bytes,
            ms=self.ms,
            copied_bytes=self.copied_bytes,
            wire_ms=self.wire_ms,
        )


def bytes_before(leaf_map: LeafMap, leaf: int) -> int:
    """Bytes of all regions together that stand before a leaf (or before the end), in manifest order."""
    region = int(np.searchsorted(leaf_map.first, leaf, side="right")) - 1
    before = int(leaf_map.nbytes[:region].sum())
    if region < len(leaf_map.nbytes):
        before += int((leaf - leaf_map.first[region]) * leaf_map.leaf_bytes[region])
    return before


def damages(attempts: Mapping[int, int], memory: Holding) -> tuple[DamagedLeaf, ...]:
    """Leaves that had to be sent again, and how often, by region and leaf of the region; the first 10,000."""
    leaf_map, regions = memory.leaf_map, memory.manifest.regions
    found = []
    for leaf, times in sorted(attempts.items())[:MOST_NAMED]:
        region = int(np.searchsorted(leaf_map.first, leaf, side="right")) - 1
        index = leaf - int(leaf_map.first[region])
        found.append(DamagedLeaf(regions[region].name, index, times))
    return tuple(found)
