"""The command line: output for people and programs, exit codes, options from the environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faces_kit import served
from typer.testing import CliRunner

from worldmove.cli.commands import app
from worldmove.client import Client
from worldmove.manifest import Manifest, Region
from worldmove.views import SessionSpec

runner = CliRunner()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    path = Path(tempfile.mkdtemp(prefix="wm-"))
    with served(path) as (found, _):
        with Client(found) as client:
            for name in ("w1", "w2", "w3"):
                client.register(spec(name))
        yield found
    shutil.rmtree(path)


def spec(name: str) -> SessionSpec:
    manifest = Manifest("tiny", (Region("k", "float32", (4, 8)),), 750.0, 250.0)
    return SessionSpec(manifest=manifest, id=name)


def run(url: str, *arguments: str, code: int = 0, **environ: str) -> str:
    result = runner.invoke(app, arguments, env={"WORLDMOVE_URL": url} | environ)
    assert result.exit_code == code, result.output
    return result.stdout


def document(url: str, *arguments: str, code: int = 0, **environ: str) -> Any:
    return json.loads(run(url, *arguments, "--json", code=code, **environ))


def test_lists_for_people(url: str) -> None:
    assert url in run(url, "nodes")
    assert run(url, "sessions").count("live") == 3
    assert "w2" in run(url, "sessions", "show", "w2")
    text = run(url, "sessions", "--limit", "2")
    assert "w2" in text
    assert "w3" not in text
    assert "--limit" in text


def test_lists_for_programs(url: str) -> None:
    assert document(url, "nodes")["nodes"][0]["name"] == "A"
    page = document(url, "sessions", "--limit", "2")
    assert ([view["id"] for view in page["sessions"]], page["next"]) == (["w1", "w2"], "w2")
    assert document(url, "sessions", "show", "w3")["id"] == "w3"
    assert {"node", "nodes", "sessions", "migrations"} == document(url, "watch").keys()


def test_an_option_can_stand_in_the_environment(url: str) -> None:
    page = document(url, "sessions", WORLDMOVE_SESSIONS_LIMIT="1")
    assert len(page["sessions"]) == 1


def test_a_move_that_is_waited_for(url: str) -> None:
    view = document(url, "move", "w1", "--to", "B", "--wait")
    assert (view["state"], view["receipt"]["source_root"]) == ("released", "aa")
    text = run(url, "move", "w1", "--to", "B", "--wait", "--deadline-ms", "5000")
    assert "released" in text
    assert "pause_ms" in text
    assert document(url, "move", "w1", "--to", "nowhere", "--wait", code=1)["state"] == "aborted"
    assert (
        document(url, "move", "w1", "--to", "vanishes", "--wait", code=1)["error"]["code"]
        == "connection-lost"
    )


def test_a_move_that_is_only_asked_for_shown_and_cancelled(url: str) -> None:
    options = ("--path", "staged", "--no-live", "--device", "a=b", "--horizon-ms", "9")
    view = document(url, "move", "w2", "--to", "B", *options, "--idempotency-key", "k")
    assert (view["state"], view["live"]) == ("admitted", False)
    assert document(url, "move", "w2", "--to", "B", "--idempotency-key", "k")["id"] == view["id"]
    assert document(url, "moves", "show", view["id"])["session_id"] == "w2"
    assert view["id"] in run(url, "moves")
    assert view["id"] in [move["id"] for move in document(url, "moves")["migrations"]]
    assert "aborted" in run(url, "moves", "cancel", view["id"])


def test_a_session_is_ended(url: str) -> None:
    with Client(url) as client:
        for name in ("e1", "e2", "e3"):
            client.register(spec(name))
    told = runner.invoke(app, ["sessions", "end", "e1", "--url", url], input="n\n")
    assert told.exit_code == 1
    assert "ended" not in told.output
    assert "e1" in told.stderr
    assert "live" in told.stderr
    assert runner.invoke(app, ["sessions", "end", "e1", "--url", url], input="").exit_code == 1
    assert document(url, "sessions", "show", "e1")["state"] == "live"
    told = runner.invoke(app, ["sessions", "end", "e1", "--url", url], input="y\n")
    assert told.exit_code == 0
    assert told.stdout.endswith("e1 has ended\n")
    assert run(url, "sessions", "end", "e2", "--yes") == "e2 has ended\n"
    assert document(url, "sessions", "end", "e3", "--yes") == {"id": "e3", "ended": True}
    for again in (("--yes",), ()):
        error = document(url, "sessions", "end", "e3", *again, code=1)["error"]
        assert (error["code"], error["session_id"]) == ("not-found", "e3")
    assert document(url, "sessions", "end", "raise-conflict", "--yes", code=1)["error"]["code"] == "conflict"
    assert document("http://127.0.0.1:9", "sessions", "end", "e3", "--yes", code=3)["error"]["code"] == "peer"


def test_a_dry_run(url: str) -> None:
    assert "would be taken on" in run(url, "move", "w1", "--to", "B", "--dry-run")
    assert document(url, "move", "w1", "--to", "full", "--dry-run", code=1)["code"] == "no-memory"
    refused = run(url, "move", "w1", "--to", "full", "--dry-run", code=1)
    assert re.search(r"term +required +available\nbytes +5 B +3 B\n", refused)


def test_refusals_have_a_code_and_their_facts(url: str) -> None:
    result = runner.invoke(app, ["move", "w1", "--to", "raise-no-memory", "--url", url])
    assert result.exit_code == 1
    assert "(no-memory)" in result.stderr
    assert "required_bytes: 5" in result.stderr
    error = document(url, "move", "none", "--to", "B", code=1)["error"]
    assert (error["code"], error["session_id"]) == ("not-found", "none")
    assert document(url, "move", "w1", "--to", "B", "--device", "a", code=2)["error"]["option"] == "device"


def test_a_node_that_is_not_there_has_a_code_of_its_own() -> None:
    assert document("http://127.0.0.1:9", "nodes", code=3)["error"]["code"] == "peer"


def test_wrong_use_is_told(url: str) -> None:
    assert runner.invoke(app, ["move", "w1"]).exit_code == 2
    assert runner.invoke(app, ["fly"]).exit_code == 2
    result = runner.invoke(app, ["serve", "--lanes", "99", "--name", "A"])
    assert result.exit_code == 2
    assert "lanes is '99' (from command line); allowed: 1 to 16" in result.stderr
    result = runner.invoke(app, ["serve"], env={"WORLDMOVE_NAME": "A", "WORLDMOVE_PATH": "fast"})
    assert "path is 'fast' (from environment)" in result.stderr


@pytest.mark.parametrize(
    "command",
    ["", "serve", "demo", "nodes", "sessions", "moves", "move", "watch", "bench", "bench path", "doctor"],
)
def test_every_command_has_help(command: str) -> None:
    assert "Usage" in runner.invoke(app, [*command.split(), "--help"]).output


def test_doctor_runs(url: str) -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert "checks" in json.loads(result.stdout)


def test_the_version_is_shown() -> None:
    assert runner.invoke(app, ["--version"]).stdout.strip()


def started(run_dir: Path, name: str) -> tuple[subprocess.Popen[str], str]:
    """A real node through the real command line."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "worldmove", "serve", "--name", name, "--http", "127.0.0.1:0"),
            *("--ledger", f"sqlite:///{run_dir}/ledger.db", "--run-dir", str(run_dir / name)),
            *("--memory-limit", "64MB", "--ready-fd", str(write)),
        ],
        pass_fds=(write,),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        return process, pipe.readline().strip()


def test_a_real_node_from_start_to_end(run_dir: Path) -> None:
    process, url = started(run_dir, "A")
    with process:
        try:
            with Client(url) as client:
                registration = client.register(spec("real"))
                assert Path(registration.socket).is_socket()
                assert len(registration.tickets) == 1
            assert document(url, "sessions")["sessions"][0]["id"] == "real"
            assert [node["alive"] for node in document(url, "nodes")["nodes"]] == [True]
            assert "host" in run(url, "watch", "--json")
            unknown = document(url, "move", "real", "--to", "Z", code=1)["error"]
            assert unknown["status"] in (404, 409, 429)
            assert document(url, "sessions", "end", "real", "--yes")["ended"]
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert registration.tickets[0].token not in said
    assert all(json.loads(line) for line in said.splitlines() if not line.startswith("listening"))
