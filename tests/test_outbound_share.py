"""A live round digests the world's memory for no more than its share of the time; a standing one at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worldmove import outbound
from worldmove.outbound import Outbound
from worldmove.pacing import Duty


class Clock:
    """Time passes only while somebody sleeps, or reads a part, which takes a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.began: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def perform(self, _part: object, **_how: object) -> None:
        self.began.append(self.now)
        self.now += 1.0


@pytest.mark.parametrize(
    ("share", "began"), [(1.0, [0, 1, 2, 3]), (0.5, [0, 2, 4, 6]), (0.25, [0, 4, 8, 12])]
)
async def test_parts_are_spaced(monkeypatch: pytest.MonkeyPatch, share: float, began: list[float]) -> None:
    """The wait is no part of the rate at which memory is digested: a pause is judged by that."""
    clock = Clock()
    monkeypatch.setattr(outbound, "time", clock)
    monkeypatch.setattr(outbound.asyncio, "sleep", clock.sleep)
    reading: Any = SimpleNamespace(_reader=clock)
    parts: list[Any] = [object()] * 4
    busy = await Outbound._read_parts(reading, parts, Duty(share), lambda *_: None, urgent=False)
    assert [at - 100.0 for at in clock.began] == began
    assert busy == 4.0
