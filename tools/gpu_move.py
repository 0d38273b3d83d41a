"""Moves sessions between the GPUs of one host, checks every byte, and times it against a bare copy.

    python tools/gpu_move.py [--moves N] [--only full|small] [--seconds N] [--out DIR]

Needs one or two GPUs and CuPy. Two real nodes run beside each other, one for each GPU (with
one GPU, both on that one), and a worker and a standby pass a session there and back. The standby's memory is
poisoned before each move; what has arrived is compared byte for byte, on the GPU, with a copy that never
travelled. No move begins after SECONDS, of which the sessions have equal shares. The last lines are a
summary; everything goes to gpu_move.json in DIR (default: $OUT, or here), after each session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from gpu_report import Report, Time, about, duration, settled, tried, used, write

from worldmove.bench.gpu_raw import raw_copies
from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.cuda.probe import probe

REGION = "1,32760,12,128"
CASES = {"full": (60, REGION), "small": (100, "5120")}
"""The session of the bars (6.04 GB: 30 layers' K and V), and one of 1 MB in 100 regions."""
ITEM = 2
WARM_UP = 2
LEAST_S = 20.0
COPIES_S = 8.0
"""What bare copies and the end of nodes take of a session's time."""
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")


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


async def move_case(case: str, devices: list[str], moves: int, out: Path, time: Time) -> Report:
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
            time.anew()
            for number in range(moves + WARM_UP):
                if not time.another():
                    break
                moved.append(await one_move(way))
                if number % 2:
                    await way.turn()
                    memory.append(used(devices))
                    handles.append(descriptors(nodes))
                print(case, number, json.dumps({k: round(v, 3) for k, v in moved[-1].items()}), flush=True)
        ended = used(devices)
    after = await settled(devices, before)
    timed = moved[WARM_UP:]
    middle = {name: statistics.median(one[name] for one in timed) for name in TIMES} if timed else None
    best = {name: min(one[name] for one in timed) for name in TIMES} if timed else None
    return {
        "held": bool(moved),
        "regions": count,
        "bytes": count * bytes_of(shape),
        "asked": moves + WARM_UP,
        "made": len(moved),
        **({"median": middle, "best": best} if timed else {}),
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


async def beside_copies(case: str, devices: list[str], moves: int, out: Path, time: Time) -> Report:
    """A session's moves, with bare copies of as many bytes before and after."""
    regions, shape = CASES[case]
    bare = await raw_copies(devices, regions, bytes_of(shape))
    result = await move_case(case, devices, moves, out, time)
    again = await raw_copies(devices, regions, bytes_of(shape))
    result["raw_ms"] = {
        "whole": statistics.median(bare.whole + again.whole),
        "regions": statistics.median(bare.regions + again.regions),
    }
    if "median" in result:
        result["data_over_raw"] = result["median"]["data_ms"] / result["raw_ms"]["whole"]
    return result


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    left, found = Time(given.seconds), await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    report: Report = {
        **about([device.name for device in found]), "cases": {}, "not_begun": [], "figures": {}
    }  # fmt: skip
    cases = list(CASES) if given.only is None else [given.only]
    for number, case in enumerate(cases):
        share = left.left() / (len(cases) - number)
        if share < LEAST_S:
            report["not_begun"].append(case)
            continue
        result = await tried(beside_copies(case, devices, given.moves, given.out, Time(share - COPIES_S)))
        report["cases"][case] = result
        report["figures"][case] = figures(result)
        write(given.out / "gpu_move.json", report)
    write(given.out / "gpu_move.json", report)
    for case, result in report["cases"].items():
        print(case, report["figures"][case], {name: result.get(name) for name in ("median", "raw_ms")})
        print(case, result.get("device_bytes"), "descriptors", result.get("descriptors_each_pair"))
    return 0 if report["cases"] and all(result["held"] for result in report["cases"].values()) else 1


def figures(result: Report) -> str:
    """A few words."""
    words = ["held" if result["held"] else f"NOT HELD: {result.get('error')}"]
    words += [f"{result['made']} of {result['asked']} moves"] if "made" in result else []
    if "data_over_raw" in result:
        middle = result["median"]
        handover = middle["commit_ms"] + middle["resume_ms"]
        words.append(f"pause {middle['pause_ms']:.2f}, data {middle['data_ms']:.2f} ms")
        words.append(f"{result['data_over_raw']:.3f} of a bare copy, handover {handover:.2f} ms")
    return ", ".join(words)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument(
        "--seconds", type=duration, default=3600.0, help="no move begins after so long (3600)"
    )
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
