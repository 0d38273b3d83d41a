"""The README's program, as it stands there: registered on one node, taken over on the other."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fleet_kit import Fleet
from structure_kit import ROOT

PATIENCE_S = 60.0
SAID = re.compile(r"step (\d+) k (\d+)\.0")


def program(folder: Path) -> Path:
    """`play.py`, cut out of the README; its pause stands for a model and is shorter here."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    file = folder / "play.py"
    file.write_text(text.replace("time.sleep(0.5)", "time.sleep(0.02)"))
    return file


@contextlib.contextmanager
def playing(*command: str) -> Iterator[subprocess.Popen[str]]:
    """The program as a process, ended afterwards."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """What it says next; empty once it has ended."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE_S)[0]
    return process.stdout.readline()


def step(text: str) -> int:
    """Which step a line tells of; the tensor has to be as old."""
    match = SAID.match(text)
    assert match, text
    assert match[1] == match[2]
    return int(match[1])


def test_the_program_of_the_readme_runs_and_its_world_moves(tmp_path: Path) -> None:
    play = str(program(tmp_path))
    with Fleet("A", "B") as fleet, fleet.turn():
        source, target = fleet.nodes["A"], fleet.nodes["B"]
        with playing(play, source.url) as first, playing(play, target.url, "wait") as second:
            assert step(line(first)) == 1
            give_up = time.monotonic() + PATIENCE_S
            while not any(standby.state == "attached" for standby in target.view().standbys):
                assert time.monotonic() < give_up
                line(first)
            receipt = fleet.moved("world-7", "B")
            *_, last, farewell = iter(lambda: line(first), "")
            assert farewell == "the world lives on at B\n"
            assert step(last) == receipt.block
            assert step(line(second)) == step(last) + 1
            assert first.wait(PATIENCE_S) == 0
            target.client.end_session("world-7")
