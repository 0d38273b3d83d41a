"""Keeps the garbage collector from stopping the node: what lives long is not searched again and again.

A full collection looks at every container that Python tracks, some fifty for a session, while nothing else
runs: with thousands of sessions that is hundreds of milliseconds in which the node answers nobody. What has
survived is therefore set aside (`gc.freeze`), and full collections see only what came since. What is set
aside is still freed when nobody refers to it any more; only cycles of it stay, until sessions have become so
few that everything is searched again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

STEP = 250
"""Sessions by which a node grows until the next ones are set aside: a collection of some milliseconds."""


class Heap:
    """Decides when to set aside."""

    def __init__(self) -> None:
        self._aside = 0

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """While inside nothing is searched, for next to nothing of it is garbage; then all is set aside."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
            _set_aside()

    def holds(self, sessions: int, *, moving: bool) -> None:
        """Notes how many sessions there are now.

        Args:
            sessions: how many.
            moving: moves are under way: what belongs to them goes soon, and worlds may stand.
        """
        if sessions < self._aside // 2:
            gc.unfreeze()
            self._aside = 0
        elif not moving and sessions >= self._aside + STEP:
            _set_aside()
            self._aside = sessions


def _set_aside() -> None:
    gc.collect()
    gc.freeze()
