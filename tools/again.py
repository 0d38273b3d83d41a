"""The few tests that failed beside others, once more and alone: `again.py CODE [pytest's arguments]`.

Ends with CODE, which the first run ended with, where that means more than failed tests, or there are more
than a few; else with what the second run ends with. A test that passes here only is no better for it: it is
named, and waits for somebody who finds out why.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = 1
"""Pytest's exit code for failed tests."""
FEW = 3
CACHE = Path(".pytest_cache/v/cache/lastfailed")


def failed() -> list[str]:
    """The tests that failed when they were run last."""
    try:
        return sorted(json.loads(CACHE.read_text()))
    except FileNotFoundError:
        return []


def main(code: int, arguments: list[str]) -> int:
    """The exit code of both runs together."""
    names = failed()
    if code != FAILED or not 0 < len(names) <= FEW:
        return code
    sys.stdout.write("once more, alone:\n" + "".join(f"  {name}\n" for name in names))
    sys.stdout.flush()
    only = ("--last-failed", "--last-failed-no-failures", "none")
    second = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *only, *arguments], check=False
    ).returncode
    if second == 0:
        sys.stdout.write("unsteady, each passed alone:\n" + "".join(f"  {name}\n" for name in names))
    return second


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
