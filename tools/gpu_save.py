"""What saving and loading a session costs: `torch.save` and `torch.load` through /dev/shm, from GPU to GPU.

    python tools/gpu_save.py [--repeats N] [--regions N] [--shape S]

Needs one or two GPUs and PyTorch with CUDA. One JSON document: seconds of each save and load after one of
both to warm the file's memory up, and whether what was loaded on the other GPU equals what was saved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOM = Path("/dev/shm")  # noqa: S108 - it is this folder that is measured


def once(state: dict[str, torch.Tensor], path: Path, target: str) -> tuple[float, float, bool]:
    """Seconds of a save and of a load, and whether all of it arrived."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.save(state, path)
    saved = time.perf_counter()
    loaded = torch.load(path, map_location=target, weights_only=True)
    torch.cuda.synchronize(target)
    ended = time.perf_counter()
    equal = all(torch.equal(loaded[name], tensor.to(target)) for name, tensor in state.items())
    return saved - begin, ended - saved, equal


def main() -> int:
    """Prints the document; exit code 1 if something differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--regions", type=int, default=60)
    parser.add_argument("--shape", default="1,32760,12,128")
    given = parser.parse_args()
    shape = [int(each) for each in given.shape.split(",")]
    target = f"cuda:{1 % torch.cuda.device_count()}"
    state = {
        f"r{number}": torch.randn(shape, device="cuda:0").to(torch.bfloat16)
        for number in range(given.regions)
    }
    nbytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.NamedTemporaryFile(dir=ROOM, suffix=".pt") as file:
        runs = [once(state, Path(file.name), target) for _ in range(given.repeats + 1)][1:]
    document = {
        "bytes": nbytes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "save_s": [run[0] for run in runs],
        "load_s": [run[1] for run in runs],
        "median_s": statistics.median(run[0] + run[1] for run in runs),
        "equal": all(run[2] for run in runs),
    }
    print(json.dumps(document, indent=1))
    return 0 if document["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
