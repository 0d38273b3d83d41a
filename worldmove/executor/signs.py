"""Signs that a world stands: an executor sees in its control page, by itself, when work may begin.

From the worker's stop to a copy three processes would have to wake one another; here the last one looks. The
page's layout is its owner's: a `Stop` names the words.
"""

from __future__ import annotations

import mmap
import time

from worldmove.errors import TransportError, ValidationError
from worldmove.executor.messages import Armed, Stop

ARMED_S = 5.0
"""How long armed work waits; then whoever armed it has to say when it begins."""
_WORD = 8


class Sign:
    """A control page, mapped to be read.

    Raises:
        TransportError: the descriptor is smaller than `nbytes`, or can't be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            # The mapping is refused where the file is smaller, and its owner has sealed its size.
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransportError(f"a page of {nbytes} bytes cannot be mapped: {error}") from error
        self._words = memoryview(self._map).cast("Q")

    def check(self, stop: Stop) -> None:
        """Raises ValidationError where a word lies outside the page."""
        last = max(stop.pause_at, *(word for rank in stop.ranks for word in rank))
        if not 0 <= last < len(self._words):
            raise ValidationError(f"word {last} lies outside a page of {len(self._words)}", field="stop")

    def block(self, stop: Stop) -> int | None:
        """The block at which every rank stands as it was told to; `None` while one does not."""
        words = self._words
        block = words[stop.pause_at]
        for progress, state in stop.ranks:
            # In this order: a rank publishes its block before it says that it stands.
            if words[state] != stop.stopped or words[progress] != block << 1:
                return None
        return block

    def close(self) -> None:
        """Unmaps."""
        self._words.release()
        self._map.close()


class Waiting:
    """Work that is armed: begun in the order of its arrival, once its world stands or its node says so."""

    def __init__(self) -> None:
        self._signs: dict[int, Sign] = {}
        self._armed: list[tuple[float, Armed]] = []

    def __bool__(self) -> bool:
        return bool(self._armed)

    def watch(self, key: int, fd: int, nbytes: int) -> None:
        """Looks at another page; raises as `Sign`."""
        self._signs[key] = Sign(fd, nbytes)

    def forget(self, key: int) -> bool:
        """Looks at a page no more; whether it was one."""
        sign = self._signs.pop(key, None)
        if sign is not None:
            sign.close()
        return sign is not None

    def arm(self, armed: Armed) -> None:
        """Keeps work until it may begin.

        Raises:
            ValidationError: nobody looks at its page, or a word lies outside that.
        """
        sign = self._signs.get(armed.stop.key)
        if sign is None:
            raise ValidationError(f"page {armed.stop.key} is not watched", field="key")
        sign.check(armed.stop)
        self._armed.append((time.monotonic() + ARMED_S, armed))

    def due(self) -> list[tuple[Armed, tuple[int, int]]]:
        """What may begin now, each with the block of the stop that was seen, and its time (monotonic, ns)."""
        blocks = {
            stop: self._signs[stop.key].block(stop) if stop.key in self._signs else None
            for stop in {armed.stop for _, armed in self._armed}
        }
        now = time.monotonic_ns()
        found = [
            (armed, (block, now)) for _, armed in self._armed if (block := blocks[armed.stop]) is not None
        ]
        if found:
            self._armed = [(end, armed) for end, armed in self._armed if blocks[armed.stop] is None]
        return found

    def take(self, key: int) -> list[Armed]:
        """What waits for a page's sign, and waits no more."""
        taken = [armed for _, armed in self._armed if armed.stop.key == key]
        self._armed = [(end, armed) for end, armed in self._armed if armed.stop.key != key]
        return taken

    def late(self) -> list[Armed]:
        """What has waited for too long, and waits no more."""
        now = time.monotonic()
        late = [armed for end, armed in self._armed if end <= now]
        if late:
            self._armed = [(end, armed) for end, armed in self._armed if end > now]
        return late
