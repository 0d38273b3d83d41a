"""Writes the transcripts of whole moves that tests/test_machine_transcripts.py replays.

Run it after a change of the protocol that is meant: `.venv/bin/python tools/record_transcripts.py`. It plays
every scenario of tests/move_scenarios.py and rewrites tests/data/transcripts/; the difference is then read
and committed like code, since it shows what the change does to whole moves. With `--check` nothing is
written, and the exit status tells whether anything would be.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "data" / "transcripts"


def played() -> dict[str, str]:
    """Every scenario's transcript by name."""
    sys.path.insert(0, str(ROOT / "tests"))
    from move_scenarios import SCENARIOS, written  # noqa: PLC0415 - the tests' folder is no package

    return {name: written(scenario().lines) for name, scenario in SCENARIOS.items()}


def main() -> int:
    """Writes or checks; 1 if `--check` found a difference."""
    texts = played()
    there = {path.stem: path.read_text() for path in FOLDER.glob("*.jsonl")}
    changed = sorted(name for name in texts.keys() | there.keys() if texts.get(name) != there.get(name))
    for name in changed:
        print(name)
    if "--check" in sys.argv[1:]:
        return 1 if changed else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in changed:
        path = FOLDER / f"{name}.jsonl"
        if name in texts:
            path.write_text(texts[name])
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
