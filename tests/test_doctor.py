"""The doctor: every check runs on this machine, and says what to do when something is in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from worldmove.doctor import CHECKS, Check, Finding, examine, kernel, machine, run
from worldmove.doctor.finding import fail, ok, warn


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_finds_something_and_leaves_nothing(check: Check) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    finding = check()
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert finding.found
    assert finding.status == "ok" or finding.advice, "what isn't well comes with advice"


def test_a_node_can_run_where_its_tests_run() -> None:
    assert [finding for finding in examine().checks if finding.status == "fail"] == []


def test_one_failed_check_fails_the_report() -> None:
    def broken() -> Finding:
        return fail("thing", "broken", "mend it")

    def slow() -> Finding:
        return warn("thing", "slow", "speed it up")

    assert examine([slow]).ok
    assert not examine([slow, broken]).ok


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(json=True)
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["ok"] else 1)
    assert len(document["checks"]) == len(CHECKS)
    assert document["checks"][0].keys() == {"name", "status", "found", "advice"}


def test_table_shows_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("UCX", "memory files", "Unix sockets", "ledger"))


def test_the_ledgers_folder_has_to_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDMOVE_LEDGER", "sqlite:////proc/ledger.db")
    finding = machine.ledger_folder()
    assert (finding.status, finding.name) == ("fail", "ledger")
    assert "--ledger" in finding.advice


def test_a_bad_option_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDMOVE_LEDGER", "mysql://nowhere")
    assert machine.ledger_folder().status == "fail"


def test_a_ledger_in_memory_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.filesystem(Path("/proc/sys")) == "proc"
    if machine.filesystem(Path("/dev/shm")) == "tmpfs":
        monkeypatch.setenv("WORLDMOVE_LEDGER", "sqlite:////dev/shm/ledger.db")
        assert machine.ledger_folder().status == "warn"


def test_transports_are_those_of_the_installed_library() -> None:
    assert "tcp" in machine.ucx_transports()


def test_a_limit_of_descriptors_is_seen_in_a_fresh_process() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from worldmove.doctor import kernel; print(kernel.open_files().status)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "warn"


def test_a_synced_write_takes_time_where_it_can_be_done(tmp_path: Path) -> None:
    took = kernel.folder_write_ms(tmp_path)
    assert took is not None
    assert took >= 0
    assert kernel.folder_write_ms(Path("/proc")) is None


def test_findings_that_are_well_need_no_advice() -> None:
    assert ok("thing", "fine").advice == ""
