"""What a command needs and does not find is one clear line, and status 2, before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_kit import FAKE, GPUS, ROOT

WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from worldmove.cli import main
main()
"""
"""The command line in a Python that lacks some packages."""

TORCH = """
__version__ = "2.9.0+cpu"
class cuda:
    is_available = staticmethod(lambda: False)
class version:
    cuda = {cuda!r}
"""
"""PyTorch, as far as it is asked what it can do."""

ELSEWHERE = GPUS[0].replace("01", "0f")
ON_GPUS = ("demo --gpu", "bench path --gpu", "bench delta --gpu", "bench digest --gpu")


def said(*arguments: str, without: str = "nothing", gpus: bool = True, path: Path | None = None) -> str:
    """The one line of a command that is refused."""
    folders = [*([str(FAKE)] if gpus else []), *([str(path)] if path else []), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, without, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    line, *more = done.stderr.splitlines()
    assert (more, done.stdout) == ([], "")
    assert line.startswith("error: ")
    assert line.endswith(" (config)")
    return line


def demo(folder: Path, *arguments: str) -> tuple[str, ...]:
    return ("demo", *arguments, "--out", str(folder))


def test_a_video_world_without_pytorch(tmp_path: Path) -> None:
    line = said(*demo(tmp_path, "--video", "small"), without="torch")
    assert "pip install 'worldmove[torch]'" in line
    assert "worldmove[torch]" in said(*demo(tmp_path, "--gpu"), without="torch")


@pytest.mark.parametrize(
    ("cuda", "word"), [(None, "2.9.0+cpu computes on the CPU only"), ("13.2", "CUDA 13.2 may be newer")]
)
def test_a_demo_on_gpus_whose_pytorch_sees_none(tmp_path: Path, cuda: str | None, word: str) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
    assert word in said(*demo(tmp_path, "--gpu"), path=tmp_path)


@pytest.mark.parametrize("command", ON_GPUS)
def test_no_cupy(tmp_path: Path, command: str) -> None:
    words = command.split()
    given = demo(tmp_path, *words[1:]) if words[0] == "demo" else words
    assert "GPUs need CuPy, which is not installed: pip install 'worldmove[cu13]'" in said(
        *given, without="cupy"
    )


@pytest.mark.parametrize("command", ON_GPUS)
def test_no_gpu(tmp_path: Path, command: str) -> None:
    words = command.split()
    given = demo(tmp_path, *words[1:]) if words[0] == "demo" else words
    line = said(*given, gpus=False)
    assert "CUDA's driver cannot be used" in line
    assert "worldmove doctor" in line


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("bench delta --gate-rate 1x", "gate_rate is '1x' (from command line); allowed: a rate such as"),
        ("soak --gpus nonsense", "gpus is 'nonsense' (from command line); allowed: auto, none, or UUIDs"),
        (f"soak --gpus {ELSEWHERE}", f"gpus names {ELSEWHERE}, which is not here; allowed: {GPUS[0]}"),
    ],
)
def test_what_a_node_would_refuse_is_refused_before_one_is_started(command: str, word: str) -> None:
    assert word in said(*command.split())
