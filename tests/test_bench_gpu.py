"""The GPU benchmarks on imagined GPUs (tests/fake_gpu): figures mean nothing here, but everything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).with_name("fake_gpu")
ROOT = FAKE.parent.parent
KINDS = ("sent", "copied", "kept")
SHIFT = """
import sys
from worldmove.bench import delta
from worldmove.cli.commands import app
delta.PATTERNS = ("shift+sink",)
app(["bench", "delta", "--json", *sys.argv[1:]])
"""
"""The command, with one of its patterns."""


def bench(*arguments: str, program: tuple[str, ...] = ("-m", "worldmove", "bench")) -> Any:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT)]),
        "WORLDMOVE_DIRECT_MIN_GBPS": "0",  # no NVLink: what UCX falls back to is all there is
    }
    return subprocess.run(
        [sys.executable, *program, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_every_leaf_size_is_digested_beside_a_read_and_compared_with_stock_xxhash() -> None:
    answer = bench("digest", "--gpu", "--mb", "20", "--repeats", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert [leaf["leaf_bytes"] // 1024 for leaf in document["leaves"]] == [8, 16, 32, 64, 72, 128, 256]
    assert all(leaf["equal"] for leaf in document["leaves"])
    assert (document["regions"], document["nbytes"] % 512) == (60, 0)


@pytest.mark.slow
def test_a_move_between_gpus_is_measured_beside_bare_copies() -> None:
    answer = bench("path", "--gpu", "--gb", "0.02", "--repeats", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert (document["path"], len(set(document["devices"]))) == ("local", 2)
    assert document["state_bytes"] == 60 * (20_000_000 // 480) * 8
    assert len(document["runs"]["data_ms"]) == document["repeats"] == 2
    assert document["data_ms"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["local", "direct", "staged"])
def test_what_a_cache_on_a_gpu_has_shifted_is_copied_there(path: str) -> None:
    """Every byte that arrives is compared by the worker, in memory that was poisoned."""
    answer = bench(
        "--gpu", "--mb", "41", "--repeats", "1", "--block-ms", "500", "--path", path, program=("-c", SHIFT)
    )
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert (document["path"], len(document["gpus"])) == (path, 2)
    kinds = {row["pattern"]: [row[f"{kind}_fraction"] for kind in KINDS] for row in document["rows"]}
    sent, copied, kept = kinds["shift+sink"]
    assert sent + copied + kept == pytest.approx(1)
    assert sent < 18 / 21  # all but the sink, if nothing were taken from where it lies


def test_a_gpu_that_has_not_the_memory_says_what_is_needed_and_what_is_free() -> None:
    answer = bench("path", "--gpu", "--gb", "2", "--json")
    assert answer.returncode == 1
    error = json.loads(answer.stdout)["error"]
    assert error["code"] == "no-memory"
    assert error["required_bytes"] > 2_000_000_000 - 480
    assert 0 < error["available_bytes"] < error["required_bytes"]
    assert f"{error['required_bytes']} bytes of GPU-" in error["message"]


def test_options_of_one_kind_of_memory_are_refused_for_the_other() -> None:
    assert bench("path", "--path", "local").returncode == 2
    assert bench("digest", "--gpu", "--executors", "2").returncode == 2
    assert bench("delta", "--path", "direct").returncode == 2
