"""`tools/gpu_delta.py` on imagined GPUs: plans are right there, and its report says what was done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_kit import IMAGINED, ROOT


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_plans_are_compared_before_anything_is_timed(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": IMAGINED}
    words = ("--only", "ordered,speed", "--mib", "6", "--mb", "60", "--out", str(tmp_path))
    command = [sys.executable, str(ROOT / "tools" / "gpu_delta.py"), *words]
    answer = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    report = json.loads((tmp_path / "gpu_delta.json").read_text())
    assert len(report["ordered"]) == 11
    assert all(row["moves"] > 0 and row["wrong_bytes"] == 0 for row in report["ordered"])
    assert report["speed"]["bytes"] == 60 * 18 * 65536  # frames are whole leaves, at least one
