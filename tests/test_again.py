"""`tools/again.py`: a few tests that failed get a second run, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from structure_kit import ROOT

TESTS = """
from pathlib import Path

def test_unsteady():
    mark = Path("mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError

def test_broken():
    raise AssertionError
"""


def again(where: Path, code: int, *names: str) -> subprocess.CompletedProcess[str]:
    cache = where / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({f"test_some.py::{name}": True for name in names}))
    (where / "test_some.py").write_text(TESTS)
    (where / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "again.py"), str(code), "-q"],
        check=False,
        capture_output=True,
        text=True,
        cwd=where,
        timeout=60,
    )


def test_what_passes_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    answer = again(tmp_path, 1, "test_unsteady")
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.endswith("unsteady, each passed alone:\n  test_some.py::test_unsteady\n")


def test_what_fails_again_has_failed(tmp_path: Path) -> None:
    answer = again(tmp_path, 1, "test_unsteady", "test_broken")
    assert answer.returncode == 1
    assert "2 failed" in answer.stdout


@pytest.mark.parametrize("code", [1, 2, 7, 124])
def test_anything_else_has_no_second_run(tmp_path: Path, code: int) -> None:
    """Many failures, a crashed worker, something left behind, too long."""
    names = [f"test_{number}" for number in range(4 if code == 1 else 1)]
    answer = again(tmp_path, code, *names)
    assert (answer.returncode, answer.stdout) == (code, "")
