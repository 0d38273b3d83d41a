"""Moves sessions between the GPUs of one host, checks every byte, and times it against a bare copy.

    python tools/gpu_move.py [--moves N] [--only full|small] [--out DIR]

Needs one or two GPUs, CuPy and NVML's bindings. Two real nodes run beside each other, one for each GPU (with
one GPU, both on that one), and a worker and a standby pass a session there and back. The standby's memory is
poisoned before each move; what has arrived is compared byte for byte, on the GPU, with a copy that never
travelled. The last lines are a summary; everything goes to gpu_move.json in DIR (default: $OUT, or here).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pynvml

from worldmove.bench.gpu_raw import raw_copies
from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.cuda.probe import probe

REGION = "1,32760,12,128"
CASES = {"full": (60, REGION), "small": (100, "5120")}
"""The session of the bars (6.04 GB: 30 layers' K and V), and one of 1 MB in 100 regions."""
ITEM = 2
WARM_UP = 2
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")


def used(uuids: list[str]) -> list[int]:
    """Bytes in use on each GPU, by whatever process."""
    handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def descriptors(nodes: list[RunningNode]) -> int:
    """Open descriptors of the nodes and of the processes that they have started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    wanted = {node.pid for node in nodes}
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    count = 0
    for pid in wanted:
        try:
            count += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
    return count


def bytes_of(shape: str) -> int:
    """Size of one region."""
    size = ITEM
    for each in shape.split(","):
        size *= int(each)
    return size


async def move_case(case: str, devices: list[str], moves: int, out: Path) -> dict[str, Any]:
    """One session, moved there and back."""
    count, shape = CASES[case]
    before = used(devices)
    names = ("A", "B")
    each = {name: ["--gpus", device] for name, device in zip(names, devices, strict=True)}
    programs = [("worldmove.bench.gpu_actor", device, str(count), shape) for device in devices]
    options = ["--path", "local", "--log-level", "info"]
    moved: list[dict[str, float]] = []
    memory: list[list[int]] = []
    handles: list[int] = []
    async with running_nodes(names, options, each, out) as nodes:
        started = used(devices)
        async with shuttle(nodes, count * bytes_of(shape), programs) as way:
            for number in range(moves + WARM_UP):
                moved.append(await one_move(way))
                if number % 2:
                    await way.turn()
                    memory.append(used(devices))
                    handles.append(descriptors(nodes))
                print(case, number, json.dumps({k: round(v, 3) for k, v in moved[-1].items()}), flush=True)
        ended = used(devices)
    after = await settled(devices, before)
    timed = moved[WARM_UP:]
    return {
        "regions": count,
        "bytes": count * bytes_of(shape),
        "moves": len(moved),
        "compared_equal": len(moved),
        "median": {name: statistics.median(one[name] for one in timed) for name in TIMES},
        "best": {name: min(one[name] for one in timed) for name in TIMES},
        "each": moved,
        "device_bytes": {
            "before": before,
            "nodes_started": started,
            "each_pair": memory,
            "workers_ended": ended,
            "after": after,
        },
        "descriptors_each_pair": handles,
    }


async def one_move(way: Shuttle) -> dict[str, float]:
    """Times of one move."""
    done = await way.move("local")
    times = {name: float(getattr(done.receipt, name) or 0.0) for name in TIMES}
    return times | {"prepare_ms": done.prepare_ms}


async def settled(devices: list[str], before: list[int]) -> list[int]:
    """Bytes in use once the driver has taken everything back, within ten seconds."""
    for _ in range(100):
        if used(devices) <= before:
            break
        await asyncio.sleep(0.1)
    return used(devices)


async def run(moves: int, only: str | None, out: Path) -> int:
    """Everything; returns the exit code."""
    pynvml.nvmlInit()
    found = await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    report: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "cupy": version("cupy-cuda13x"),
        "devices": [device.name for device in found],
        "cases": {},
    }
    for case in CASES if only is None else (only,):
        regions, shape = CASES[case]
        bare = await raw_copies(devices, regions, bytes_of(shape))
        result = await move_case(case, devices, moves, out)
        again = await raw_copies(devices, regions, bytes_of(shape))
        result["raw_ms"] = {
            "whole": statistics.median(bare.whole + again.whole),
            "regions": statistics.median(bare.regions + again.regions),
        }
        result["data_over_raw"] = result["median"]["data_ms"] / result["raw_ms"]["whole"]
        report["cases"][case] = result
        (out / "gpu_move.json").write_text(json.dumps(report, indent=1))
    for case, result in report["cases"].items():
        times = {name: round(value, 3) for name, value in result["median"].items()}
        raw_ms = {name: round(value, 3) for name, value in result["raw_ms"].items()}
        print(case, times, "raw", raw_ms, "ratio", round(result["data_over_raw"], 3))
        print(case, "device bytes", result["device_bytes"], "descriptors", result["descriptors_each_pair"])
    return 0


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    return asyncio.run(run(given.moves, given.only, given.out))


if __name__ == "__main__":
    sys.exit(main())
