"""The whole demo on real nodes, and what it leaves behind when it is stopped: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import wait_until_gone
from PIL import Image

COMMAND = (sys.executable, "-m", "worldmove", "demo", "--state-mb", "16")


def environment(folder: Path, mark: str) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder), "PYTEST_RUN_MARK": mark}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["local", "staged"])
def test_a_world_moves_there_and_back_bit_for_bit(run_dir: Path, tmp_path: Path, path: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--moves", "2", "--path", path, "--json", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(run_dir, mark := f"demo-{path}"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["frames_equal"] == found["frames_compared"] >= 12 * 12
    assert [(move["from"], move["to"]) for move in found["moves"]] == [("A", "B"), ("B", "A")]
    for move in found["moves"]:
        assert (move["state"], move["path"]) == ("released", path)
        assert move["source_root"] == move["destination_root"] != None  # noqa: E711
        assert move["sent_bytes"] >= move["state_bytes"] > 16_000_000
        assert abs(move["data_ms"] + move["commit_ms"] + move["resume_ms"] - move["pause_ms"]) < 1
    with Image.open(tmp_path / "contact-sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > 1200
    assert wait_until_gone(mark, 15) == {}
    assert list(run_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing(run_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    mark = f"demo-{number.name}"
    with subprocess.Popen(
        [*COMMAND, "--moves", "50", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(run_dir, mark),
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as demo:
        assert demo.stderr is not None
        line = demo.stderr.readline()
        assert line.startswith("move 1: A to B: released"), line + demo.stderr.read()
        demo.send_signal(number)
        out, errors = demo.communicate(timeout=60)
    assert demo.returncode == 128 + number, errors
    assert "has been ended" in errors
    assert "Traceback" not in errors
    assert out == ""
    assert wait_until_gone(mark, 15) == {}
    assert list(run_dir.iterdir()) == []


def test_a_folder_that_takes_no_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = subprocess.run(
        [*COMMAND, "--json", "--out", str(tmp_path / "file" / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["option"] == "out"
