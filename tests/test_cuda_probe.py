"""What is asked of the driver, or of PyTorch, in a process of its own: it ends in time, with one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import wait_until_gone

from worldmove.cuda import probe
from worldmove.errors import ConfigError, DeviceError

STUCK = "import time\ntime.sleep(600)\n"
"""As a driver whose device has fallen off the bus."""


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark of the one process that is stuck, in place of the driver's bindings and of PyTorch."""
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_RUN_MARK", mark := f"probe-{tmp_path.name}")
    return mark


async def test_a_driver_that_is_stuck_is_one_clear_line(stuck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.3)
    with pytest.raises(DeviceError, match="GPUs cannot be listed: no answer within"):
        await probe.probe()
    with pytest.raises(ConfigError, match="no answer within"):
        await probe.usable()
    assert wait_until_gone(stuck, 5) == {}


async def test_who_stops_waiting_leaves_no_process_behind(stuck: str) -> None:
    asking = asyncio.ensure_future(probe.ask("worldmove.cuda.probe"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asking, 0.3)
    assert wait_until_gone(stuck, 5) == {}


async def test_last_words_are_told() -> None:
    with pytest.raises(DeviceError, match="No module named worldmove"):
        await probe.ask("worldmove.nowhere")
