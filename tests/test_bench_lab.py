"""The incast laboratory on real namespaces: small, and gone without a trace when it is killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worldmove.bench.lab import enclosure
from worldmove.bench.lab.hosts import Port
from worldmove.bench.lab.load import Outcome, summary
from worldmove.errors import ConfigError


def unable() -> str:
    """Why the laboratory can't be built here; empty if it can."""
    missing = [name for name in ("ip", "tc", "ethtool", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    try:
        enclosure.check()
    except ConfigError as error:
        return str(error)
    return ""


needs_namespaces = pytest.mark.skipif(bool(unable()), reason=unable() or "can be built")


def test_a_port_is_told_to_tc_in_its_units() -> None:
    words = Port(1_000_000, 65536, 32768).arguments()
    assert words == ["tbf", "rate", "1000000bit", "burst", "65536", "limit", "32768"]


def test_bytes_count_in_the_window_in_which_they_landed() -> None:
    one = Outcome(0.0, 3.0, None, admitted=True, missed=False, nbytes=100, data_began=1.0, data_ended=3.0)
    assert [one.bytes_within(*window) for window in ((0, 1), (0, 2), (2, 9), (0, 9))] == [0, 50, 50, 100]


def test_a_row_says_what_became_of_every_move() -> None:
    outcomes = [
        Outcome(
            0.0, 1.0, None, admitted=True, missed=False, nbytes=100, pause_ms=7.0, data_began=0, data_ended=1
        ),
        Outcome(0.0, 0.1, "gate-full", admitted=False, missed=False),
        Outcome(0.0, 4.0, "deadline: late", admitted=True, missed=True),
    ]
    row = summary(outcomes, 2.0, (0.0, 1.0), alone=200.0, dropped=3)
    assert (row.asked, row.admitted, row.rejected, row.missed) == (3, 2, 1, 1)
    assert (row.goodput_ratio, row.p99_pause_ms, row.dropped_packets) == (0.5, 7.0, 3)
    assert row.rejected_by_code == {"gate-full": 1}
    assert row.aborted_by_reason == {"deadline: late": 1}


@needs_namespaces
@pytest.mark.slow
def test_a_small_laboratory_moves_worlds_through_a_narrow_port() -> None:
    command = (sys.executable, "-m", "worldmove", "bench", "gate", "--senders", "2", "--load", "0.5")
    done = subprocess.run(
        (*command, "--seconds", "2", "--json"), capture_output=True, text=True, check=False, timeout=110
    )
    document = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert document.get("rows"), done.stderr
    row = document["rows"][0]
    assert row["asked"] == row["admitted"] + row["rejected"] > 0
    assert 10 < document["alone_mbit_per_s"] < 50, "the port lets no more through"


@needs_namespaces
@pytest.mark.slow
def test_a_killed_laboratory_leaves_nothing() -> None:
    plan = json.dumps({"senders": 2})
    command = enclosure.command([sys.executable, "-m", "worldmove.bench.lab.gate", plan])
    before = devices()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (found := serving(process.pid)):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while any(Path(f"/proc/{pid}").exists() and not gone(pid) for pid in found):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert devices() == before


def devices() -> set[str]:
    """Network devices of this machine."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def serving(ancestor: int) -> list[int]:
    """Nodes of the laboratory below a process."""
    return [pid for pid in below(ancestor) if b"serve" in command_of(pid)]


def below(ancestor: int) -> list[int]:
    found, new = [], [ancestor]
    while new:
        parent = new.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
        new += map(int, children)
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
