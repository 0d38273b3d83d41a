"""Worlds on several devices, through two real nodes; see tools/gpu_devices.py, which makes the comparisons.

On two real GPUs where there are two, else on imagined ones (tests/fake_gpu): then all but CUDA is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import IMAGINED, ROOT

from worldmove.cuda.driver import devices
from worldmove.errors import DeviceError

SECONDS = 400
SCENARIOS = ("mixed", "ranks", "within", "revised", "own", "kinds", "memory")

TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
uint8 = "uint8"
def empty(*_given, **_options):
    raise RuntimeError("Found no NVIDIA driver on your system")
"""
"""PyTorch where there is no GPU, as far as it is asked for anything."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


def environment() -> dict[str, str]:
    """With imagined GPUs in front, where there are less than two real ones."""
    try:
        real = len(devices()) >= 2
    except DeviceError:
        real = False
    if real:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": IMAGINED, "IMAGINED_ROOM": uuid.uuid4().hex[:8]}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tool has found; all scenarios share two nodes."""
    return found(tmp_path_factory.mktemp("devices"), environment())


def found(out: Path, env: dict[str, str], *more: str) -> dict[str, Any]:
    """What the tool has found."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_devices.py"), "--mib", "4", "--out", str(out), *more]
    answer = subprocess.run(
        command, env=env, cwd=ROOT, check=False, capture_output=True, text=True, timeout=SECONDS - 20
    )
    assert (out / "gpu_devices.json").exists(), answer.stderr
    scenarios: dict[str, Any] = json.loads((out / "gpu_devices.json").read_text())["scenarios"]
    return scenarios


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_byte_is_where_it_has_to_be(report: dict[str, Any], scenario: str) -> None:
    assert report[scenario]["held"], report[scenario]


def test_what_a_full_gpu_lacks_is_said(report: dict[str, Any]) -> None:
    for refused in (report["memory"]["said"]["move"], report["memory"]["said"]["register"]["details"]):
        assert refused["required_bytes"] > refused["available_bytes"] >= 0


def test_a_receipt_says_from_which_gpu_to_which(report: dict[str, Any]) -> None:
    there, back = (move["devices"] for move in report["within"]["moves"][:2])
    assert [list(reversed(pair)) for pair in there] == back
    assert all(pair[0] != pair[1] for pair in there)


def test_a_pytorch_that_sees_no_gpu_is_asked_for_nothing(tmp_path: Path) -> None:
    """It is installed on machines without one, too; GPUs that are imagined it does not see."""
    (tmp_path / "torch.py").write_text(TORCH)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(tmp_path)]))
    kinds = found(tmp_path, env, "--only", "kinds")["kinds"]
    assert kinds["held"], kinds
    assert kinds["said"]["expandable"].startswith("not tried")
