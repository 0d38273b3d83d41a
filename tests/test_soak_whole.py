"""The soak itself, short: on real nodes, with faults, and what it leaves behind: nothing."""

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

COMMAND = (sys.executable, "-m", "worldmove", "soak", "--nodes", "2", "--worlds", "1", "--state-mb", "2")

KILLS = "kill,worker-kill,executor-kill,lane-kill"


def environment(folder: Path, mark: str) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder), "PYTEST_RUN_MARK": mark}


def test_a_soak_finds_nothing_and_leaves_nothing(run_dir: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--moves", "6", "--seed", "11", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(run_dir, mark := "soak"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["moves"] == found["committed"] + found["aborted"] + found["rejected"] == 6
    assert found["torn"] == found["double_owned"] == found["leaked"] == found["lost"] == 0
    assert (found["seed"], found["good"]) == (11, found["good_committed"])
    assert sum(entry["moves"] for entry in found["by_fault"].values()) == 6 - found["good"] > 0
    assert found["blocks"] > 20
    assert found["duration_s"] > 0
    assert wait_until_gone(mark, 15) == {}
    assert list(run_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_soak_that_is_stopped_leaves_nothing(run_dir: Path, number: signal.Signals) -> None:
    mark = f"soak-{number.name}"
    with subprocess.Popen(
        [*COMMAND, "--moves", "500", "--seed", "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(run_dir, mark),
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as soak:
        assert soak.stderr is not None
        for line in soak.stderr:
            if line.startswith("2:"):
                break
        soak.send_signal(number)
        _, errors = soak.communicate(timeout=60)
    assert soak.returncode == 128 + number, errors
    assert wait_until_gone(mark, 15) == {}
    assert list(run_dir.iterdir()) == []


@pytest.mark.slow
def test_worlds_on_imagined_gpus_are_killed_too(run_dir: Path) -> None:
    """All but CUDA is tried (tests/fake_gpu); with real GPUs it is `tools/gpu_faults.py`.

    All on the direct path: node and worker together in the pause, a lane in the last round, executors in the
    pause, a standby's worker in the copy.
    """
    paths = (Path(__file__).with_name("fake_gpu"), Path(__file__).parent.parent)
    memory = {"IMAGINED_ROOM": f"soak-{os.getpid()}", "IMAGINED_BYTES": str(8 << 30)}
    done = subprocess.run(
        [*COMMAND, "--moves", "5", "--seed", "7267", "--json", "--gpus", "auto", "--only", KILLS],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(run_dir, "soak-gpu") | memory | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["moves"] == 5
    assert set(found["by_fault"]) == set(KILLS.split(","))
    assert found["by_path"]["direct"]["fired"] == 4
    assert wait_until_gone("soak-gpu", 15) == {}
