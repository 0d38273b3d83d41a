"""What was measured lately: moving windows of rates and times, read with a safety quantile; pure.

A rate counts as what it was at least in nine of ten samples, a time as what it took at most in nineteen of
twenty. What nobody has measured within the window is not known: then it is probed, not guessed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from worldmove.errors import ValidationError
from worldmove.manifest import Manifest

SPAN_S = 600.0
MOST_SAMPLES = 64
MOST_NAMES = 256
MOST_MARKS = 1024
LOW = 0.1
HIGH = 0.95
LINE = "line"
COMMIT = "commit"
RESUME = "resume"
OPEN = "open"
SETTLE = "settle"
STOP = "stop"
TIMES = frozenset({COMMIT, RESUME, OPEN, SETTLE, STOP})
"""Names of times in seconds; all others are rates in bytes per second."""


def path_name(path: str, peer: str) -> str:
    """The name of the rate at which one peer's bytes come by a path."""
    return f"path-{path}/{peer}"


def digest_name(role: str, manifest: Manifest) -> str:
    """The name of the rate at which one end of a move reads such a session."""
    kind = "gpu" if any(region.device != "host" for region in manifest.regions) else "host"
    return f"digest-{role}-{kind}"


class Window:
    """The latest samples of one quantity: those of `span_s` seconds, `most` of them."""

    def __init__(self, span_s: float = SPAN_S, most: int = MOST_SAMPLES) -> None:
        self._span = span_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=most)

    def note(self, value: float, now: float) -> None:
        """Adds a sample.

        Raises:
            ValidationError: it is no finite number above 0.
        """
        if not (math.isfinite(value) and value > 0):
            raise ValidationError(f"a sample is {value}; a finite number above 0 is allowed", field="sample")
        self._samples.append((now, value))

    def quantile(self, share: float, now: float, within_s: float = math.inf) -> float | None:
        """The sample below which `share` (0 to 1) of the others lie, rounded to the safe side for small ones.

        `None` where there is no sample; only those of the last `within_s` seconds count. The rank is
        `floor(share * count)` below one half, else `ceil(share * count) - 1`.
        """
        while self._samples and now - self._samples[0][0] > self._span:
            self._samples.popleft()
        ordered = sorted(value for at, value in self._samples if now - at <= within_s)
        if not ordered:
            return None
        count = len(ordered)
        rank = math.floor(share * count) if share < 0.5 else math.ceil(share * count) - 1
        return ordered[min(max(rank, 0), count - 1)]


class Flow:
    """What all moves of one path bring together: where several share it, one move's own rate is no word."""

    def __init__(self) -> None:
        self._total = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=MOST_MARKS)

    def landed(self, nbytes: int, now: float) -> None:
        """Some bytes are here."""
        self._marks.append((now, self._total))
        self._total += nbytes

    def since(self, began: float) -> int:
        """Bytes that have landed since then, as far as is remembered."""
        for at, before in self._marks:
            if at >= began:
                return self._total - before
        return 0


class Rates:
    """Windows by name; the name that was used longest ago goes when there are more than `MOST_NAMES`."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span = span_s
        self._windows: OrderedDict[str, Window] = OrderedDict()

    def note(self, name: str, value: float, now: float) -> None:
        """Adds a rate in bytes per second, or a time in seconds; raises as `Window.note`."""
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = Window(self._span)
        self._windows.move_to_end(name)
        window.note(value, now)
        while len(self._windows) > MOST_NAMES:
            self._windows.popitem(last=False)

    def note_bytes(self, name: str, nbytes: int, seconds: float, now: float) -> None:
        """Adds the rate at which `nbytes` went in `seconds`; none where either is 0."""
        if nbytes > 0 and seconds > 0:
            self.note(name, nbytes / seconds, now)

    def rate(self, name: str, now: float, within_s: float = math.inf) -> float | None:
        """Bytes per second that can be counted on, as far as was seen in the last `within_s` seconds."""
        return self._quantile(name, LOW, now, within_s)

    def tail(self, name: str, now: float, within_s: float = math.inf) -> float | None:
        """Seconds that it takes at most, as far as was seen."""
        return self._quantile(name, HIGH, now, within_s)

    def usual(self, name: str, now: float, within_s: float = math.inf) -> float | None:
        """Seconds that it takes in half of the cases: for what harms no world where it takes longer."""
        return self._quantile(name, 0.5, now, within_s)

    def _quantile(self, name: str, share: float, now: float, within_s: float) -> float | None:
        window = self._windows.get(name)
        return window.quantile(share, now, within_s) if window is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """What was measured at all."""
        return tuple(self._windows)

    def found(self, now: float) -> dict[str, float]:
        """What can be counted on, by name: of times the longest, of rates the lowest."""
        all_of_it = {
            name: self.tail(name, now) if name in TIMES else self.rate(name, now) for name in self.names
        }
        return {name: value for name, value in all_of_it.items() if value is not None}
