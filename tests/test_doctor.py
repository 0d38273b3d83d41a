"""The doctor: every check runs on this machine, and says what to do when something is in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worldmove.doctor import CHECKS, Check, Finding, container, examine, kernel, machine, run, ucx
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
    assert len(document["checks"]) > len(CHECKS)
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
    assert "tcp" in ucx.ucx_transports()


def test_the_wheels_ucx_is_the_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ucx.system_wanted()
    assert len(ucx.wheels_own(ucx.loaded())) >= 3
    monkeypatch.setenv(ucx.SWITCH, "true")
    if ucx.wheels_own(ucx.loaded()):
        finding = ucx.ucx()
        assert (finding.status, finding.advice) == ("warn", ucx.NO_SYSTEM_UCX)


def test_rdma_hardware_without_its_transports_is_named(tmp_path: Path) -> None:
    assert ucx.fabric(tmp_path, set()).status == "ok"
    (tmp_path / "mlx5_0").mkdir()
    without = ucx.fabric(tmp_path, {"tcp", "cuda_ipc"})
    assert (without.status, "mlx5_0" in without.found, ucx.SWITCH in without.advice) == ("warn", True, True)
    assert ucx.fabric(tmp_path, {"tcp", "rc_mlx5"}).status == "ok"


BOX = container.Box(True, 1, "tini", ("NET_RAW",), frozenset({Path("/"), Path("/run/worldmove")}))


def test_a_container_needs_somebody_who_reaps() -> None:
    assert "cuda-ipc" in container.surroundings(BOX).found
    finding = container.surroundings(BOX._replace(first="python"))
    assert (finding.status, "python" in finding.found) == ("warn", True)
    assert "no container" in container.surroundings(BOX._replace(container=False)).found


def test_a_run_folder_in_one_container_alone_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLDMOVE_RUN_DIR", str(tmp_path / "A"))
    assert container.run_folder(BOX).status == "warn"
    assert container.run_folder(BOX._replace(mounts=frozenset({tmp_path}))).status == "ok"
    monkeypatch.setenv("WORLDMOVE_RUN_DIR", "/proc/nowhere/A")
    assert container.run_folder(BOX).status in ("fail", "warn")
    monkeypatch.setenv("WORLDMOVE_RUN_DIR", "/run/" + 200 * "x")
    assert container.run_folder(BOX).status == "fail"


def test_what_surrounds_a_process_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").touch()
    (tmp_path / "proc/1/comm").write_text("tini\n")
    (tmp_path / "proc/1/environ").write_text("A=1\0container=podman\0")
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000002000\n")
    (tmp_path / "proc/self/mountinfo").write_text("22 27 0:21 / /run/worldmove rw - tmpfs tmpfs rw\n")
    box = container.look(tmp_path)
    assert (box.container, box.first, box.capabilities) == (True, "tini", ("NET_RAW",))
    assert box.mounts == {Path("/run/worldmove")}


def test_a_small_shm_is_warned_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert container.shared_memory(tmp_path / "none").status == "warn"
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 10, 10, 10, 0, 255))
    monkeypatch.setattr(container.os, "statvfs", lambda _path: small)
    assert "--shm-size" in container.shared_memory(tmp_path).advice


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
