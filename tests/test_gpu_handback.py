"""A world on an imagined GPU (tests/fake_gpu) whose node and keeper died: its worker hands it back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fleet_kit import Fleet, Node, until
from gpu_kit import GPUS
from lives_kit import is_live, killed_with_its_keeper

from worldmove.bench.moves import SESSION
from worldmove.views import MigrationRequest


class GpuActor:
    """`worldmove.bench.gpu_actor`, which compares every byte that arrives."""

    def __init__(self, node: Node, role: str, gpu: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worldmove.bench.gpu_actor", node.url, role, SESSION, "0"),
                *(str(os.getpid()), gpu, "5", "1,3,44444"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def expect(self, word: str) -> None:
        """Its next word."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def fleet(imagined: None) -> Iterator[Fleet]:
    each = {"A": ("--gpus", GPUS[0]), "B": ("--gpus", GPUS[1])}
    with Fleet("A", "B", options=("--path", "local"), each=each) as fleet:
        yield fleet


def test_a_world_on_a_gpu_that_only_its_worker_holds_is_taken_back(fleet: Fleet) -> None:
    here = fleet["A"]
    with contextlib.ExitStack() as stack:
        world = GpuActor(here, "world", GPUS[0])
        stack.callback(world.end)
        world.expect("registered")
        before = here.client.digest(SESSION)
        killed_with_its_keeper(here)
        here.start()
        is_live(here, SESSION)
        assert here.client.session(SESSION).epoch == before.epoch
        after = here.client.digest(SESSION)
        assert [each.leaves for each in after.regions] == [each.leaves for each in before.regions]
        standby = GpuActor(fleet["B"], "standby", GPUS[1])
        stack.callback(standby.end)
        standby.expect("waiting")
        request = MigrationRequest(session_id=SESSION, destination="B", live=False)
        view = here.client.wait(here.client.migrate(request).id)
        assert view.state == "released", view
        # It has compared every byte.
        standby.expect("adopted")
        world.expect("moved")
        until(lambda: fleet.owner(SESSION) == "B", "the world is at B")
