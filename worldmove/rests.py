"""How long a receiver rests between worlds that stop one after another; pure.

A world stops at its next boundary, up to a block after it may. The next ones may while the receiver has work
for those before (`granting.pauses`), as early as is in time for all: so it rests only where a world has
no time to wait for others once it stands.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

LEAST_WORK_S = 1e-9
"""A pause that keeps the receiver for less keeps nobody waiting."""


class Stops(NamedTuple):
    """Worlds of one kind that stop, all in seconds.

    Attributes:
        block_s: until a world stands, once it may, at most.
        work_s: of the receiver for each of them.
        room_s: how long one that stands may take for that, and wait for others.
        late_s: how late it may be heard that there is time for another.
        aside_s: from the last byte of one to the first of another that stands already.
        span_s: for which they stop one after another.
    """

    block_s: float
    work_s: float
    room_s: float
    late_s: float
    aside_s: float
    span_s: float

    @property
    def together(self) -> int:
        """How many may stand at once: their work keeps the receiver for about a block, all are in time."""
        if self.work_s < LEAST_WORK_S:
            return 1
        room_s = max(self.room_s, self.work_s)
        return max(int(min(room_s, self.block_s + self.work_s) / self.work_s), 1)

    @property
    def lead_s(self) -> float:
        """How much work others may have left for the receiver when one more may stop, at least."""
        return max(min(self.block_s, self.room_s - self.work_s - self.late_s), 0.0)

    @property
    def flows(self) -> bool:
        """Whether one stands always before the receiver is done with others."""
        return self.lead_s >= self.block_s

    def rests(self) -> float:
        """How long the receiver rests, by how long it works.

        Never longer than for worlds that may stop only once others are done. With work for `lead_s` at any
        time, one alone lets it rest for what its boundary is later than that, and several together for no
        more than is missing in each block.
        """
        worlds, lead_s, missing_s = self.together, self.lead_s, self.block_s - self.lead_s
        longest = (self.rest_s(worlds) + self.aside_s) / (worlds * self.work_s)
        if lead_s <= 0:
            return longest
        if worlds > 1:
            rest_s = missing_s * self.work_s / lead_s
        else:
            deviation = sqrt(missing_s**3 / (3 * self.block_s))
            mean = missing_s**2 / (2 * self.block_s)
            rest_s = min(mean + 3 * deviation / sqrt(self._turns(1, mean)), missing_s)
        return min(longest, (rest_s + self.aside_s) / self.work_s)

    def rest_s(self, worlds: int) -> float:
        """How long it rests until the first of so many is at its boundary, told once all others are done.

        That is `block / (n + 1)` on average of evenly spread boundaries, with no larger a deviation. But each
        of them takes half a block from when it is told, and only then the next one is: where the work of all
        is less than that, the receiver rests for what is missing. Counted are the average of all turns of the
        span and three deviations, at most a block for each.
        """
        mean = max(self.block_s / (worlds + 1), self.block_s / 2 - (worlds - 1) * self.work_s)
        return min(mean * (1 + 3 / sqrt(self._turns(worlds, mean))), self.block_s)

    def _turns(self, worlds: int, mean: float) -> float:
        return max(self.span_s / (worlds * self.work_s + mean), 1.0)
