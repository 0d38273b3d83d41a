"""What all paths over lanes have in common: batches pass the gate, and a lane that fails is their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worldmove.errors import DeadlineError, WorldMoveError
from worldmove.gate import Pass
from worldmove.rings import BATCH_BYTES
from worldmove.transport.pool import Lane


class GatedPath:
    """A `paths.Path` over leased lanes, as far as lanes and gate go.

    Args:
        lanes: connected.
        gate: the move's place at the gate, which grants the bytes of each batch.

    Attributes:
        lost: completes when a lane fails, or the gate has cut the move off.
    """

    name = "staged"
    rate: float | None = None

    def __init__(self, lanes: Sequence[Lane], gate: Pass) -> None:
        self._lanes = list(lanes)
        self._gate = gate
        gate.on_cut = self._on_cut
        self.lost: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
        for lane in self._lanes:
            lane.lost.add_done_callback(self._on_lost)

    def _on_lost(self, future: asyncio.Future[WorldMoveError]) -> None:
        if not future.cancelled() and not self.lost.done():
            self.lost.set_result(future.result())

    def _on_cut(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(DeadlineError(reason))

    @property
    def batch_bytes(self) -> int:
        """What a grant should have at this moment; it fits into a slot of a ring."""
        return self._gate.batch_bytes(BATCH_BYTES, len(self._lanes))

    def stand(self, seconds: float) -> None:
        """From now on it goes first at the gate."""
        self._gate.stand(seconds)

    def abort(self) -> None:
        """Ends the lanes' processes."""
        for lane in self._lanes:
            lane.abort()
