"""Notes how long each file of tests takes, so that the suite begins with those that take long.

    make test ARGS="--junitxml suite.xml" && .venv/bin/python tools/test_seconds.py suite.xml

The files' order is all that matters: on another machine it is about the same.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

LEAST_S = 5.0
SECONDS = Path(__file__).resolve().parent.parent / "tests" / "data" / "seconds.json"


def seconds(report: Path) -> dict[str, int]:
    """Whole seconds of each file that takes `LEAST_S` or more, the longest first."""
    taken: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest has written it
        parts = case.get("classname", "").split(".")
        name = next((part for part in parts if part.startswith("test_")), "")
        taken[name] += float(case.get("time", 0))  # type: ignore[assignment]
    return {name: round(spent) for name, spent in taken.most_common() if spent >= LEAST_S and name}


def main() -> None:
    """Writes the table anew."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} REPORT.xml")
    found = seconds(Path(sys.argv[1]))
    SECONDS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} files in {SECONDS}")


if __name__ == "__main__":
    main()
