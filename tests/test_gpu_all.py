"""`tools/gpu_all.py`, which runs what needs GPUs and ends in time: on imagined ones, with small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until_gone
from gpu_kit import IMAGINED, ROOT

TOOL = ROOT / "tools" / "gpu_all.py"
STEPS = """
import sys
sys.path[:0] = ["tools"]
import gpu_all
from gpu_all import Step, tool
gpu_all.GRACE_S = 0.5
MANY = ("--only", "moves", "--moves", "100000")
gpu_all.steps = lambda **_: [
    Step("moves", ("tools/gpu_faults.py", *MANY, "--seconds", "7", "--out", "{out}"), 45, 5),
    Step("fails", ("-c", "import sys; print('not so'); sys.exit(3)"), 20, 1),
    Step("hangs", ("-c", HANGS), 2, 1),
    Step("says", ("-c", SAYS, *tool("")), 40, 1, figures=("told",)),
    Step("two", ("-c", ""), 5, 1, gpus=3),
    Step("unknown", ("-c", ""), 5, 1, needs=("worldmove_nowhere",)),
    Step("late", ("-c", ""), 500, 400),
]
sys.exit(gpu_all.main())
"""
HANGS = """
import json, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(os.environ["OUT"], "so_far.json").write_text(json.dumps({"figures": {"so far": 7}}))
for name in (".so_far.json", "half.json"):
    pathlib.Path(os.environ["OUT"], name).write_text('{"figures"')
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
"""Does not end when it is told to; what it has started has a session of its own, as nodes have."""

SAYS = "import json, sys; print(json.dumps({'told': sys.argv[3], 'more': 1}))"


def run(program: tuple[str, ...], *arguments: str, **more: str) -> Any:
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": IMAGINED} | more,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What it made of all kinds of steps; the folder stands in it as `out`."""
    out = tmp_path_factory.mktemp("all")
    program = STEPS.replace("HANGS", repr(HANGS)).replace("SAYS", repr(SAYS))
    began = time.monotonic()
    mark = f"gpu-all-{os.getpid()}"  # several processes may run these tests
    answer = run(("-c", program), "--out", str(out), "--seconds", "100", PYTEST_RUN_MARK=mark)
    assert answer.returncode == 1, answer.stderr
    found: dict[str, Any] = json.loads((out / "gpu_all.json").read_text())
    assert wait_until_gone(mark, 5) == {}, "a step has left something"
    return found | {"out": out, "said": answer.stdout, "took": time.monotonic() - began}


def test_a_step_ends_by_itself_between_two_moves_and_says_how_many_it_made(report: dict[str, Any]) -> None:
    step = report["steps"]["moves"]
    assert step["outcome"] == "held", step
    document = step["documents"]["gpu_faults.json"]
    moves = document["stages"]["moves"]
    assert 0 < moves["made"] < moves["asked"] == 100_000
    assert f"{moves['made']} of 100000" in report["said"]
    assert step["processes_left"] == 0


def test_every_document_says_what_it_belongs_to(report: dict[str, Any]) -> None:
    out = report["out"]
    for path in (out / "moves" / "gpu_faults.json", out / "says" / "stdout.json"):
        document = json.loads(path.read_text())
        assert document["command"].startswith("python ")
        assert str(out) not in document["command"]
        assert len(document["code"]["sources"]) == 16
        assert len(document["devices"]) == 2
        assert {"when", "driver", "versions"} <= document.keys()
    assert report["steps"]["says"]["figures"] == {"told": "20"}
    assert "told: 20" in report["said"]


def test_a_step_that_fails_is_told_and_the_next_one_runs(report: dict[str, Any]) -> None:
    step = report["steps"]["fails"]
    assert (step["outcome"], step["exit"], step["last_words"]) == ("NOT HELD", 3, ["not so"])
    assert (report["out"] / "fails" / "log").read_text() == "not so\n"
    assert "did not hold: fails, hangs of 4" in report["said"]


def test_a_step_that_overruns_is_ended_with_all_that_it_started_and_keeps_its_results(
    report: dict[str, Any],
) -> None:
    step = report["steps"]["hangs"]
    assert (step["outcome"], step["exit"]) == ("overran", None)
    assert step["figures"] == {"so far": 7}
    assert step["documents"].keys() == {"half.json", "so_far.json"}
    assert step["processes_left"] == 1
    assert report["steps"]["says"]["outcome"] == "held"


def test_what_can_not_run_is_skipped_by_name(report: dict[str, Any]) -> None:
    steps = report["steps"]
    assert steps["two"] == {"outcome": "skipped", "why": "needs 3 GPU(s), there are 2"}
    assert steps["unknown"] == {"outcome": "skipped", "why": "not installed: worldmove_nowhere"}
    assert steps["late"]["outcome"] == "skipped"
    assert "s are left, it needs 400" in steps["late"]["why"]


def test_steps_are_named_with_their_time_or_without(tmp_path: Path) -> None:
    answer = run((str(TOOL),), "--only", "doctor=30,neighbour", "--out", str(tmp_path), IMAGINED_GPUS="1")
    steps = json.loads((tmp_path / "gpu_all.json").read_text())["steps"]
    assert list(steps) == ["doctor", "neighbour"]
    assert (steps["doctor"]["outcome"], steps["doctor"]["of"]) == ("held", 30), answer.stdout
    assert steps["neighbour"]["outcome"] == "skipped"
    assert answer.returncode == 0


@pytest.mark.parametrize(
    ("word", "said"), [("nonsense", "nonsense"), ("doctor=soon", "soon"), ("doctor=0", "0")]
)
def test_a_step_that_is_unknown_is_refused_by_name(word: str, said: str) -> None:
    answer = run((str(TOOL),), "--only", word)
    assert (answer.returncode, said in answer.stderr) == (2, True)
