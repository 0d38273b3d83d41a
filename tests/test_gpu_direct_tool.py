"""`tools/gpu_direct.py` on imagined GPUs: what it will do on real ones, and what its report says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_kit import IMAGINED, ROOT

SECONDS = 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


def test_lanes_are_swept_and_moves_say_where_their_time_goes(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": IMAGINED}
    options = "--direct-min-gbps 0 --direct-landing straight --direct-chunk 16MiB --peer-timeout-ms 20000"
    command = [
        *(sys.executable, str(ROOT / "tools" / "gpu_direct.py"), "--only", "sweep,timed", "--moves", "1"),
        *("--regions", "2", "--shape", "1,10930,12,128", "--repeats", "1", "--options", options),
        *("--out", str(tmp_path)),
    ]
    answer = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert answer.returncode == 0, answer.stderr
    report = json.loads((tmp_path / "gpu_direct-sweep-timed.json").read_text())
    rows = report["sweep"]["rows"]
    assert len(rows) == 24
    assert not report["sweep"]["left_out"]
    for row in rows:
        steps = row["account"]["destination"]
        landed = steps["straight" if row["landing"] == "straight" else "receive"]
        assert landed["bytes"] == report["sweep"]["bytes"]
    told = [one["account"] for one in report["timed"]["accounts"]]
    assert len(told) == 4
    assert any("straight" in one for one in told)
    assert any("gather" in one for one in told)
    assert "straight" in answer.stdout
