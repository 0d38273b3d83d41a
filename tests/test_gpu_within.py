"""A node dies while a session moves between its own (imagined) GPUs: one world goes on, every byte right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import Fleet, until
from gpu_kit import GPUS, IMAGINED, ROOT

from worldmove.faults.door import order
from worldmove.views import MigrationRequest

ACTOR = ROOT / "tools" / "gpu_worlds.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Stack:
    """A tools/gpu_worlds.py process."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ACTOR), url, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def begin(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self.begin(do, **more)
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", IMAGINED)
        options = (
            "--gpus",
            ",".join(GPUS),
            "--faults",
            "arm",
            "--path",
            "local",
            "--peer-timeout-ms",
            "2000",
        )
        with Fleet("A", options=options) as fleet:
            yield fleet


def regions(gpu: str) -> list[dict[str, Any]]:
    shape = [1, 512, 64]
    return [{"name": name, "dtype": "bfloat16", "shape": shape, "device": gpu} for name in ("k", "v")]


@pytest.mark.parametrize("phase", ["source.copying", "destination.committed", "destination.adopted"])
async def test_a_node_that_dies_leaves_one_world(fleet: Fleet, tmp_path: Path, phase: str) -> None:
    node, session = fleet["A"], fleet.unique("w")
    world, standby = Stack(node.url), Stack(node.url)
    try:
        assert "epoch" in world.ask("register", id=session, regions=regions(GPUS[0]))
        assert "id" in standby.ask("standby", regions=regions(GPUS[1]))
        world.begin("go")
        standby.begin("wait")
        await order(node.run_dir, arm=f"{phase}.kill")
        request = MigrationRequest(session_id=session, destination="A", devices={"0": "1"})
        node.client.migrate(request)
        process = node.process
        until(lambda: process is not None and process.poll() is not None, "the node dies")
        node.kill()
        node.start()
        if phase == "source.copying":
            world.begin("still")
            assert [world.read()["wrong"], world.read()] == [{}, {}]
            standby.begin("still")
            assert [standby.read(), standby.read()] == [{"waiting": True}, {}]
            holder, epoch = world, 1
        else:
            assert world.read() == {"moved": "A"}
            arrived = standby.read()
            assert (arrived["wrong"], arrived["epoch"]) == ({}, 2)
            holder, epoch = standby, 2
        holder.begin("go")
        until(lambda: node.client.session(session).state == "live", "the session lives")
        holder.begin("still")
        assert [holder.read()["wrong"], holder.read()] == [{}, {}]
        assert node.client.session(session).epoch == epoch
        until(lambda: node.view().sessions == 1, "one session is left")
        assert [view.id for view in node.client.sessions().sessions] == [session]
        node.client.end_session(session)
    finally:
        world.end()
        standby.end()
