"""schemathesis over the node's own OpenAPI document: no answer is a 5xx, and the node stays healthy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from fleet_node import Node

SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "12"))
"""For all runs together; `make soak` gives it more."""
OPTIONS = ("--memory-limit", "32MB", "--register-rate", "0", "--move-rate", "0")
RUNS = (
    # A boundary makes a worker of its caller, who never comes to another: then a digest waits, and answers
    # with its documented 504. So each of the two is tried without the other.
    ("--exclude-path-regex", "/(events|boundary)$"),
    ("--include-path-regex", "/(boundary|attach|sessions)$"),
)


def explore(node: Node, which: tuple[str, ...]) -> str:
    """Runs schemathesis; returns what it says if it finds something."""
    seconds = str(SECONDS // len(RUNS))
    answer = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{node.url}/v1/openapi.json"),
            *("--checks", "not_a_server_error", "--max-time", seconds, "--request-timeout", "40"),
            *("--suppress-health-check", "all", "--warnings", "off", "--no-color", *which),
        ],
        cwd=node.run_dir,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{answer.stdout[-6000:]}\n{answer.stderr[-2000:]}" if answer.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 120)
@pytest.mark.parametrize("which", RUNS, ids=["registering", "boundaries"])
def test_no_generated_request_breaks_a_node(which: tuple[str, ...]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="wm-o-", dir="/tmp"))
    node = Node("A", folder, OPTIONS, uuid.uuid4().hex).start()
    try:
        found = explore(node, which)
        logged = [json.loads(line) for line in node.news().splitlines() if line.startswith("{")]
        assert not found, f"{found}\n{logged[-20:]}"
        assert not [line for line in logged if "exception" in line]
        assert not [line for line in logged if line["event"] == "request failed"]
        for session in node.client.sessions(limit=1000).sessions:
            node.client.end_session(session.id)
        for standby in node.view().standbys:
            node.client.drop_standby(standby.id)
        assert node.view().devices[0].free_bytes == node.view().devices[0].total_bytes
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)
