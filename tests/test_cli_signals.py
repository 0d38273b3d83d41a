"""Ctrl-C and SIGTERM while a command has hardly begun: no traceback, and an exit code that says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from fleet_node import until

DELAYS_S = (0.0, 0.3, 0.9)
"""After the first moment in which a command sees to signals."""


def started(command: Sequence[str], run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "worldmove", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=run_dir,
        env=os.environ | {"TMPDIR": str(run_dir)},
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def minds(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether it catches a signal, or has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return process.poll() is not None or bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_at_its_start_says_nothing(run_dir: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        serve = ("serve", "--name", "A", "--http", "127.0.0.1:0", "--run-dir", str(run_dir / "A"))
        commands = (
            ("nodes", "--url", url),
            ("watch", "--url", url),
            ("bench", "boundary", "--calls", "10000000"),
            ("demo", "--out", str(run_dir / "out")),
            (*serve, "--ledger", f"sqlite:///{run_dir}/ledger.db", "--memory-limit", "64MB"),
        )
        for delay_s in DELAYS_S:
            running = [started(command, run_dir) for command in commands]
            for process in running:
                # SIGTERM is caught by us alone, so nothing is left to the interpreter by then.
                until(partial(minds, process, signal.SIGTERM), "the command sees to signals")
            time.sleep(delay_s)
            for process in running:
                process.send_signal(number)
            for command, process in zip(commands, running, strict=True):
                said, errors = process.communicate(timeout=60)
                up = command[0] == "serve" and "node is up" in errors
                assert process.returncode == (0 if up else 128 + number), (command, delay_s, errors)
                assert "Traceback" not in errors, (command, delay_s, errors)
                assert said == "", (command, delay_s)


def test_an_interrupt_within_code_made_of_text_ends_as_any_other(tmp_path: Path) -> None:
    """As Ctrl-C does while a module that makes named tuples is loaded: the interpreter takes note of it."""
    (tmp_path / "interrupted.py").write_text(
        "import sys, types\n"
        "commands = types.ModuleType('worldmove.cli.commands')\n"
        "commands.app = lambda: exec('raise KeyboardInterrupt')\n"
        "sys.modules[commands.__name__] = commands\n"
        "from worldmove.cli.start import main\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


def test_what_ignores_ctrl_c_goes_on_to_do_so(run_dir: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "worldmove",
                "nodes",
                "--url",
                f"http://127.0.0.1:{silent.getsockname()[1]}",
            ],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509
        ) as process,
    ):
        until(partial(minds, process, signal.SIGTERM), "the command sees to signals")
        process.send_signal(signal.SIGINT)
        silent.accept()[0].close()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
