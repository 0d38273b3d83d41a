"""`worldmove bench scale` in small: every question is answered while worlds generate and moves run."""

from __future__ import annotations

import msgspec
import pytest

from worldmove.bench.scale import ScaleResult, run


def test_a_small_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sessions=150, workers=4, moves=4, calls=14, json=True) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=ScaleResult)
    assert (result.sessions, result.workers) == (150, 4)
    assert (result.moved, result.failures) == (4 * result.rounds, {})
    assert result.rest_calls >= 14
    assert result.restart_sessions == 150 + 4 + 4 * (result.rounds % 2 == 0)
    assert 0 < result.restart_silent_s <= result.restart_s
    # Series do not grow with sessions: two hundred are more than all there are.
    assert result.metrics_series < 200
    assert 0 < result.rest_ms_p50 <= result.rest_ms_p99 <= result.rest_ms_max
