"""What a move says of itself while its world stands: nothing, until it goes on or that lasts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from test_driver_core import side

from worldmove import driver
from worldmove.protocol import State


@pytest.fixture
def lines() -> Any:
    with structlog.testing.capture_logs() as found:
        yield found


def said(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["before"], line["state"]) for line in lines if line["event"] == "state"]


async def test_states_are_told_in_order_once_the_world_goes_on(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LOG_AFTER_S", 0.02)
    move = side("source").at(State.COPYING)
    move.machine.state = State.VERIFYING
    move._note_state(State.COPYING)
    await asyncio.sleep(0.05)
    move.machine.state = State.ADOPTED
    move._note_state(State.VERIFYING)
    assert said(lines) == []
    await asyncio.sleep(0.05)
    assert said(lines) == [("copying", "verifying"), ("verifying", "adopted")]


async def test_a_pause_that_lasts_is_told_all_the_same(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LOG_AFTER_S", 0.005)
    move = side("destination").at(State.FINISHING)
    move._note_state(State.COPYING)
    await asyncio.sleep(0.3)
    assert said(lines) == [("copying", "finishing")]
