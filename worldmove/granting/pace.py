"""How much may be under way at once: as many senders and bytes as goodput is gained by, found by trying.

It starts with one sender. Now and then one of four steps is tried for a few epochs: one sender more, one
fewer, the window doubled, the window halved. A step up stays where goodput gains by `GAIN`; a step down stays
where it loses less than half of that. A step that does not stay is tried again after twice the time. Goodput
that breaks down with several senders is a collapse (incast): their number is halved at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

from worldmove.granting.meter import Epoch

Step = Literal["more-senders", "wider", "narrower", "fewer-senders"]
STEPS: tuple[Step, ...] = ("more-senders", "wider", "narrower", "fewer-senders")
UP = frozenset({"more-senders", "wider"})
GAIN = 0.05
COLLAPSE = 0.7
STRIKES = 2
TRIAL_EPOCHS = 3
SMOOTHING = 0.3
REST_S = 0.5
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 120.0
WINDOW_S = 0.02
"""The first window is what this many seconds bring, or two round trips."""
UNKNOWN_S = 0.2
"""Two round trips where nobody has measured one, as long as that is no more than the first, cold window."""
NARROWEST_S = 0.01
"""No narrower than what this many seconds bring: a paused world may wait so long for what is out already."""
LEAST_WINDOW = 1 << 20
COLD_WINDOW = 8 << 20
PROBE_WINDOW = 256 << 20
"""While a path is probed that nobody uses: its rate is to be found, not that of a narrow window."""
MOST_WINDOW = 1 << 30
MOST_SENDERS = 64


class _Trial(NamedTuple):
    step: Step
    senders: int
    window: int
    samples: list[float]


class Pace:
    """The number of senders and the window, from one epoch to the next.

    Args:
        most_senders: never more at once.
        most_bytes: never a larger window.
        still: always as many senders and bytes as that, whatever comes of it.

    Attributes:
        still: as given. senders: answer at once at most.
        window: bytes that may be under way from all of them together.
        collapses: breakdowns of goodput that were met by fewer senders.
    """

    def __init__(
        self, most_senders: int = MOST_SENDERS, most_bytes: int = MOST_WINDOW, *, still: bool = False
    ) -> None:
        self.still = still
        self._most_senders = most_senders
        self._most_bytes = most_bytes
        self.senders = most_senders if still else 1
        self.window = most_bytes if still else min(COLD_WINDOW, most_bytes)
        self.collapses = 0
        self.goodput: float | None = None
        self._cold = not still
        self._probed = False
        self._strikes = 0
        self._trial: _Trial | None = None
        self._turn = 0
        self._rest_until = 0.0
        self._due: dict[Step, float] = {}
        self._waits: dict[Step, float] = dict.fromkeys(STEPS, FIRST_WAIT_S)

    def now_allowed(self, *, calm: bool) -> tuple[int, int]:
        """Senders and window now; `calm`: no paused world waits for bytes, so that a trial may go on."""
        if calm and self._trial is not None:
            return self._trial.senders, self._trial.window
        return self.senders, self.window

    @property
    def reach(self) -> tuple[int, int]:
        """Senders and window at most, until the next step has been judged: one more, or twice as wide."""
        if self.still:
            return self.senders, self.window
        return self._after("more-senders")[0], self._after("wider")[1]

    def warm(self, goodput: float, delay_s: float | None = None) -> None:
        """A first idea of the goodput (bytes per second), and of the round trip where a probe has told it."""
        if not self._cold:
            return
        self._cold = False
        long_s = UNKNOWN_S if delay_s is None else max(WINDOW_S, 2 * delay_s)
        most = self._most_bytes if delay_s is not None else max(self.window, int(goodput * WINDOW_S))
        self.window = min(max(int(goodput * long_s), LEAST_WINDOW), most, self._most_bytes)

    @contextlib.contextmanager
    def probed(self) -> Iterator[None]:
        """A path is probed, and nobody else uses it: until something is known the window is wide meanwhile.

        What is heard of such a time teaches nothing; `warm` is told what the probe has found.
        """
        if not self._cold or self._probed:
            yield
            return
        narrow, self.window = self.window, min(PROBE_WINDOW, self._most_bytes)
        self._probed = True
        try:
            yield
        finally:
            self.window, self._probed = narrow, False

    def heard(self, epoch: Epoch, *, crowded: bool, tight: bool, now: float, calm: bool = True) -> None:
        """Learns from an epoch.

        Args:
            epoch: what was measured.
            crowded: more senders wanted to answer than may.
            tight: the window held a request back.
            now: seconds of any clock that never goes back.
            calm: no world stood meanwhile. Otherwise no trial was in force, and nothing is learned of it: a
                narrower window that nobody had to live with loses nothing, and would always stay.
        """
        if self._probed:
            return
        if self.still:
            return
        self.warm(epoch.goodput)
        if calm and self._trial is not None:
            self._judge(self._trial, epoch, now)
            return
        if epoch.senders < self.senders:
            return  # it says nothing about so many
        if self._collapsed(epoch, now):
            return
        before = epoch.goodput if self.goodput is None else self.goodput
        self.goodput = before + SMOOTHING * (epoch.goodput - before)
        if calm and now >= self._rest_until:
            self._try(crowded, tight, now)

    def _collapsed(self, epoch: Epoch, now: float) -> bool:
        low = self.goodput is not None and epoch.goodput < COLLAPSE * self.goodput
        if not low or self.senders == 1:
            self._strikes = 0
            return False
        self._strikes += 1
        if self._strikes >= STRIKES:
            self.collapses += 1
            self._strikes = 0
            self.senders = max(1, self.senders // 2)
            self.goodput = None
            self._postpone("more-senders", now)
        return True

    def _try(self, crowded: bool, tight: bool, now: float) -> None:
        for _ in STEPS:
            step = STEPS[self._turn]
            self._turn = (self._turn + 1) % len(STEPS)
            senders, window = self._after(step)
            wanted = {"more-senders": crowded, "wider": tight}.get(step, True)
            if (
                wanted
                and (senders, window) != (self.senders, self.window)
                and now >= self._due.get(step, now)
            ):
                self._trial = _Trial(step, senders, window, [])
                return

    def _after(self, step: Step) -> tuple[int, int]:
        least = min(max(LEAST_WINDOW, int((self.goodput or 0.0) * NARROWEST_S)), self._most_bytes)
        if step == "more-senders":
            return min(self.senders + 1, self._most_senders), self.window
        if step == "fewer-senders":
            return max(self.senders - 1, 1), self.window
        window = self.window * 2 if step == "wider" else self.window // 2
        return self.senders, min(max(window, least), self._most_bytes)

    def _judge(self, trial: _Trial, epoch: Epoch, now: float) -> None:
        if epoch.senders < min(trial.senders, self.senders) or (
            trial.step == "more-senders" and epoch.senders < trial.senders
        ):
            return
        base = self.goodput or epoch.goodput
        trial.samples.append(epoch.goodput)
        low = epoch.goodput < COLLAPSE * base
        if low and trial.step == "more-senders":
            self.collapses += 1
        if not low and len(trial.samples) < TRIAL_EPOCHS:
            return
        mean = sum(trial.samples) / len(trial.samples)
        enough = base * (1 + GAIN) if trial.step in UP else base * (1 - GAIN / 2)
        self._trial = None
        self._rest_until = now + REST_S
        if not low and mean >= enough:
            self.senders, self.window, self.goodput = trial.senders, trial.window, mean
            self._waits[trial.step] = FIRST_WAIT_S
        else:
            self._postpone(trial.step, now)

    def _postpone(self, step: Step, now: float) -> None:
        self._due[step] = now + self._waits[step]
        self._waits[step] = min(2 * self._waits[step], LONGEST_WAIT_S)
