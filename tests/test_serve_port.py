"""A node whose port is taken says by whom, and what helps: also where its own frozen predecessor has it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_kit import Actor, Fleet, Node, Twin, assert_world, until

from api.binding import find_holder
from worldmove.manifest import Region

REGIONS = (Region("k", "uint8", (4096,)),)
LISTENER = """
import socket
with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def refused(node: Node, port: int) -> str:
    """What a second `serve` under the node's name says that can't have its port."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "worldmove", "serve", "--name", node.name, "--http", f"127.0.0.1:{port}"),
            *("--run-dir", str(node.run_dir), "--ledger", f"sqlite:///{node.run_dir.parent}/ledger.db"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_holder_of_a_port_is_found() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = find_holder(port)
        process.communicate("\n")
    assert found is not None
    assert (found.pid, found.stopped) == (process.pid, False)
    assert find_holder(port) is None


@pytest.mark.slow
def test_a_frozen_predecessor_keeps_the_port_and_is_named(run_dir: Path) -> None:
    port = free_port()
    with Fleet("A", options=("--http", f"127.0.0.1:{port}", "--memory-limit", "64MB")) as fleet:
        node, twin = fleet["A"], Twin(REGIONS)
        actor = fleet.actor("A")
        actor.register("w", REGIONS)
        actor.run(work_ms=3.0)
        said = refused(node, port)
        assert f"port {port} is taken: process {node.pid}" in said
        assert "stands still" not in said
        node.freeze()
        until(lambda: find_holder(port).stopped, "it stands still")  # type: ignore[union-attr]
        said = refused(node, port)
        assert f"port {port} is taken: process {node.pid}" in said
        assert f"kill -KILL {node.pid}" in said
        assert "another port" in said
        generates_on(actor)
        # One way out: another port. The frozen one is fenced, and ends when it wakes up.
        frozen, options = node.process, node.options
        assert frozen is not None
        node.options = ("--memory-limit", "64MB")
        node.start()
        until(lambda: node.client.session("w").state == "live", "the successor has the world")
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait(30) == 4
        # The other way out: the frozen one is killed.
        node.stop()
        node.options = options
        node.start()
        until(lambda: node.client.session("w").state == "live", "the node has the world again")
        node.freeze()
        node.kill()
        node.start()
        until(lambda: node.client.session("w").state == "live", "the next one has it, at the same port")
        assert node.url.endswith(f":{port}")
        generates_on(actor)
        actor.ask("halt")
        assert_world([actor], twin, host_state=False)


def generates_on(actor: Actor) -> None:
    block = actor.block
    until(lambda: actor.block > block + 1, "the world generates on")
