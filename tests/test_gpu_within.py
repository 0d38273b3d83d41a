"""A node dies while a session moves between its own (imagined) GPUs: one world goes on, every byte right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import Fleet, until
from gpu_kit import GPUS, IMAGINED, ROOT

from worldmove.errors import NoWorkerError
from worldmove.faults.door import order
from worldmove.views import MigrationRequest, MigrationView

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


def moved(fleet: Fleet, session: str) -> MigrationView:
    """How a move to the other GPU ended; asked for again while the standby is wiped after the last one."""
    client = fleet["A"].client
    request = MigrationRequest(session_id=session, destination="A", devices={"0": "1"})
    for _ in range(100):
        try:
            ended = client.wait(client.migrate(request).id)
        except NoWorkerError as error:
            time.sleep(error.details.get("retry_after_ms", 100) / 1000)
            continue
        until(lambda: fleet["A"].view().migrations == 0, "both sides end")
        return ended
    raise AssertionError("the standby did not come back")


async def test_what_dies_in_a_move_within_a_node_leaves_one_world(fleet: Fleet) -> None:
    """The standby's worker, then the executors of both GPUs; in the end every byte has come over."""
    node, session = fleet["A"], fleet.unique("w")
    world, dying, standby = (Stack(node.url) for _ in range(3))
    try:
        assert "epoch" in world.ask("register", id=session, regions=regions(GPUS[0]))
        assert "id" in dying.ask("standby", regions=regions(GPUS[1]))
        world.begin("go")
        dying.begin("wait")
        await order(node.run_dir, arm="destination.copying.worker-kill")
        ended = moved(fleet, session)
        assert (ended.state, ended.code) == ("aborted", "worker-lost"), ended.reason
        assert dying.process.wait(20) < 0
        world.begin("still")
        assert [world.read()["wrong"], world.read()] == [{}, {}]
        for lost in node.view().standbys:
            node.client.drop_standby(lost.id)
        assert "id" in standby.ask("standby", regions=regions(GPUS[1]))
        world.begin("go")
        standby.begin("wait")
        await order(node.run_dir, arm=(fault := "destination.finishing.executor-kill"))
        ended = moved(fleet, session)
        assert fault in (await order(node.run_dir)).fired
        if ended.state == "aborted":  # else they had done what they owed, or others did it
            assert ended.code == "process-lost", ended.reason
            ended = moved(fleet, session)
        assert ended.state == "released", ended.reason
        assert world.read() == {"moved": "A"}
        arrived = standby.read()
        assert (arrived["wrong"], arrived["epoch"]) == ({}, 2)
        assert [view.id for view in node.client.sessions().sessions] == [session]
        node.client.end_session(session)
    finally:
        for stack in (world, dying, standby):
            stack.end()
