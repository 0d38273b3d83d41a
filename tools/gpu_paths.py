"""Moves a session between two GPUs over TCP, from node to node, checks every byte, and says what it costs.

    python tools/gpu_paths.py [--lanes 4,8] [--moves N] [--seconds N] [--regions N] [--shape S] [--out DIR]

Needs one or two GPUs and CuPy. For each number of lanes, two real nodes run beside each other, one for each
GPU (with one GPU, both on that one), and a worker and a standby pass a session there and back over the staged
path. The standby's memory is poisoned before each move; what has arrived is compared byte for byte, on the
GPU, with a copy that never travelled. In turn with the moves, the same number of lanes carries the same bytes
between the same GPUs without any digest, between two processes that do nothing else. No move begins after
SECONDS. The last lines are a summary; everything goes to gpu_paths.json in DIR (default: $OUT, or here),
after each move. Exit code 0: moves were made, and every byte was right; whether they were fast stands in the
report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import uvloop
from gpu_report import Report, Time, about, duration, tried, write

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.config import Settings
from worldmove.cuda.probe import probe
from worldmove.delta import batches
from worldmove.errors import ProcessLostError
from worldmove.executor.serving import end_with_parent
from worldmove.gate import Gate
from worldmove.hosting.memory import take
from worldmove.manifest import Manifest, Region
from worldmove.node.devices import Devices
from worldmove.offering import Serving
from worldmove.reading import Reader
from worldmove.rings import BATCH_BYTES, Ring
from worldmove.staging import RingPath, Stage, lease
from worldmove.transport.pool import LanePool, mint_token
from worldmove.transport.slots import Rows

BAR_GBPS = 92.0
BAR_OF_LANES = 0.97
WARM_UP = 1
LEAST_S = 15.0
SEED = 1
MOVE = "gpu-paths"
WARM_BYTES_PER_S = 1e12
CONNECT_MS = 20_000
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")
TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {
    "worldmove.transport.lane": "lanes",
    "worldmove.executor.cuda": "GPU executor",
    "worldmove.executor.host": "host executors",
    "worldmove.memory.keeper": "keeper",
}


class Watched(Stage):
    """Copies as they are in a move, and counts how long they take until the node knows that they are done."""

    seconds = 0.0
    copies = 0

    async def fill(self, ring: Ring, slot: int, rows: Rows) -> None:
        """As `Stage.fill`."""
        begin = time.perf_counter()
        await super().fill(ring, slot, rows)
        self._note(begin)

    async def empty(self, ring: Ring, slot: int, rows: Rows, *, urgent: bool) -> None:
        """As `Stage.empty`."""
        begin = time.perf_counter()
        await super().empty(ring, slot, rows, urgent=urgent)
        self._note(begin)

    def _note(self, begin: float) -> None:
        self.seconds += time.perf_counter() - begin
        self.copies += 1

    def mean_ms(self) -> float:
        """Of one copy, since the last call."""
        mean = self.seconds / max(self.copies, 1) * 1000
        self.seconds, self.copies = 0.0, 0
        return mean


class Half:
    """One end of the lanes without a node: its GPU, its memory, its lanes."""

    def __init__(self, device: str, regions: int, shape: str, lanes: int, folder: Path) -> None:
        settings = Settings(name="half", ledger="sqlite:///unused", run_dir=folder, gpus=device, lanes=lanes)
        self.devices = Devices(settings, lambda _event, _facts: None)
        self.lanes = LanePool(spare=lanes, limit=lanes, device="lo")
        sizes = tuple(int(each) for each in shape.split(","))
        self._regions = [Region(f"r{number}", "bfloat16", sizes, device=device) for number in range(regions)]
        self.reader: Reader
        self.stage: Watched

    async def open(self, *, writable: bool) -> None:
        """Starts executors and lanes, and makes the memory."""
        await self.devices.start()
        await self.lanes.start()
        manifest = Manifest(MOVE, tuple(self._regions), block_ms=50.0, horizon_ms=100.0)
        holding = await take(manifest, self.devices, MOVE)
        self.reader = Reader(holding, self.devices.executors, SEED)
        await self.reader.open(writable=writable)
        self.stage = Watched(self.reader, self.devices.executors)

    async def digest_ms(self) -> float:
        """What digesting all of it takes when nothing else is done."""
        table = await self.reader.table()
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            await self.reader.read(table, self.reader.all_spans(), urgent=True)
            took.append((time.perf_counter() - begin) * 1000)
        return min(took)

    async def close(self) -> None:
        """Ends everything."""
        await self.lanes.close()
        await self.reader.close()
        await self.devices.close()


async def serve_half(device: str, regions: int, shape: str, lanes: int) -> None:
    """The source's half, in a process of its own: a line with what the other needs, and one for each run."""
    with tempfile.TemporaryDirectory() as folder:
        half = Half(device, regions, shape, lanes, Path(folder))
        await half.open(writable=False)
        serving = Serving(half.lanes, half.devices.rings, half.stage)
        offers = []
        for _ in range(lanes):
            lane, token = await serving.lease(MOVE, half.reader.memory), mint_token()
            await lane.serve(token)
            offers.append((lane.port, token.hex()))
        print(json.dumps({"offers": offers, "digest_ms": await half.digest_ms()}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(half.stage.mean_ms()), flush=True)
        await serving.end()
        await half.close()


class Lanes:
    """Both halves, connected; `run` carries everything once."""

    def __init__(
        self, half: Half, path: RingPath, process: asyncio.subprocess.Process, digest_ms: float
    ) -> None:
        self.digest_ms = digest_ms
        self._half = half
        self._path = path
        self._process = process

    async def run(self) -> dict[str, float]:
        """Gb/s, and the mean time of a copy at both ends."""
        reader, slots = self._half.reader, asyncio.Semaphore(self._path.width)
        nbytes = reader.memory.manifest.nbytes

        async def pull(batch: Any) -> None:
            try:
                await self._path.pull(batch, urgent=True)
            finally:
                slots.release()

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for batch in batches(reader.all_spans(), reader.memory.leaf_map, self._path.batch_bytes):
                await slots.acquire()
                group.create_task(pull(batch))
        seconds = time.perf_counter() - begin
        return {
            "gbps": nbytes * 8 / seconds / 1e9,
            "to_ring_ms": float(await ask(self._process)),
            "from_ring_ms": self._half.stage.mean_ms(),
        }


async def ask(process: asyncio.subprocess.Process, question: bytes = b"\n") -> Any:
    """The next line of the other half."""
    if process.stdin is None or process.stdout is None:
        raise ProcessLostError("the other half has no pipes")
    process.stdin.write(question)
    line = await process.stdout.readline()
    if not line:
        raise ProcessLostError("the other half has ended")
    return json.loads(line)


@contextlib.asynccontextmanager
async def bare_lanes(
    devices: list[str], regions: int, shape: str, lanes: int, folder: Path
) -> AsyncIterator[Lanes]:
    """Lanes between the two GPUs, without nodes and digests."""
    arguments = [devices[0], str(regions), shape, str(lanes), str(os.getpid())]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--half", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    half = Half(devices[1], regions, shape, lanes, folder)
    try:
        await half.open(writable=True)
        there = await ask(process, b"")
        leased = []
        for port, token in there["offers"]:
            memory = half.reader.memory
            one = await lease(half.devices.rings, half.lanes, MOVE, memory, writable=True)
            await one.lane.connect("127.0.0.1", port, bytes.fromhex(token), CONNECT_MS)
            leased.append(one)
        gate = Gate(None, BATCH_BYTES)
        gate.pace.warm(WARM_BYTES_PER_S)
        path = RingPath(leased, half.stage, gate.join(MOVE, "source"), half.devices.rings)
        yield Lanes(half, path, process, there["digest_ms"])
        path.abort()
        await path.quiet()
    finally:
        process.kill()
        await process.communicate()
        await half.close()


def cpu_seconds(nodes: list[RunningNode]) -> dict[str, Counter[str]]:
    """CPU time so far of each node's processes, by what they do."""
    found: dict[str, Counter[str]] = {}
    stats = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rsplit(")", 1)[1].split()
            words = (entry.parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
            stats[int(entry.parent.name)] = (
                int(fields[1]),
                (int(fields[11]) + int(fields[12])) / TICKS,
                words,
            )
    for node in nodes:
        spent = found[node.name] = Counter({"node": stats[node.pid][1]})
        for parent, seconds, words in stats.values():
            if parent == node.pid:
                spent[next((ROLES[word] for word in words if word in ROLES), "others")] += seconds
    return found


async def one_move(way: Shuttle, nodes: list[RunningNode]) -> dict[str, Any]:
    """Times of one move, Gb/s until both tables were equal, and CPU seconds by process."""
    await way.turn()
    before = cpu_seconds(nodes)
    done = await way.move("staged")
    after = cpu_seconds(nodes)
    times = {name: float(getattr(done.receipt, name) or 0.0) for name in TIMES}
    spent = {
        node: {role: round(seconds - before[node][role], 2) for role, seconds in after[node].items()}
        for node in after
    }
    return {
        "gbps": done.receipt.state_bytes * 8 / times["data_ms"] / 1e6,
        "path": done.receipt.path,
        "source": done.receipt.source,
        "damaged": len(done.receipt.damaged),
        "prepare_ms": done.prepare_ms,
        "cpu_s": spent,
        **times,
    }


async def case(
    given: argparse.Namespace, devices: list[str], lanes: int, time: Time, note: Callable[[Report], None]
) -> Report:
    """One number of lanes: moves and bare lanes in turn; `note` is told after each what there is so far."""
    out, asked = given.out, given.moves + WARM_UP
    each = {name: ["--gpus", device] for name, device in zip("AB", devices, strict=True)}
    programs = [("worldmove.bench.gpu_actor", device, str(given.regions), given.shape) for device in devices]
    options = ["--path", "staged", "--lanes", str(lanes), "--log-level", "info"]
    moved: list[dict[str, Any]] = []
    bare: list[dict[str, float]] = []
    async with (
        running_nodes(("A", "B"), options, each, out) as nodes,
        shuttle(nodes, 0, programs) as way,
        bare_lanes(devices, given.regions, given.shape, lanes, out) as others,
    ):
        time.anew()
        for number in range(asked):
            if not time.another():
                break
            bare.append(await others.run())
            moved.append(await one_move(way, nodes))
            note({"held": False, "lanes": lanes, "asked": asked, "moves": moved, "bare": bare})
            print(lanes, number, json.dumps({"bare": bare[-1], "move": moved[-1]}), flush=True)
        digest_ms = others.digest_ms
    found = {"held": bool(moved), "lanes": lanes, "asked": asked, "made": len(moved)}
    return found | (summed_up(moved, bare) | {"digest_alone_ms": digest_ms} if len(moved) > WARM_UP else {})


def summed_up(moved: list[dict[str, Any]], bare: list[dict[str, float]]) -> dict[str, Any]:
    """Medians after the warm-up, and each run."""
    verified = statistics.median(one["gbps"] for one in moved[WARM_UP:])
    without = statistics.median(one["gbps"] for one in bare[WARM_UP:])
    return {
        "verified_gbps": verified,
        "lanes_gbps": without,
        "verified_of_lanes": verified / without,
        "bars_held": verified >= BAR_GBPS and verified >= BAR_OF_LANES * without,
        "compared_equal": len(moved),
        "median": {name: statistics.median(one[name] for one in moved[WARM_UP:]) for name in TIMES},
        "copy_ms": {
            name: statistics.median(one[name] for one in bare[WARM_UP:])
            for name in ("to_ring_ms", "from_ring_ms")
        },
        "moves": moved,
        "bare": bare,
    }


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    time, found = Time(given.seconds), await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    cases: list[Report] = []
    report: Report = {
        **about([device.name for device in found]),
        "regions": given.regions,
        "shape": given.shape,
        "cases": cases,
        "not_begun": [],
        "figures": {},
    }

    def note(one: Report) -> None:
        cases[:] = [case for case in cases if case["lanes"] != one["lanes"]] + [one]
        report["figures"][f"{one['lanes']} lanes"] = figures(one)
        write(given.out / "gpu_paths.json", report)

    for lanes in (int(each) for each in given.lanes.split(",")):
        if time.left() < LEAST_S:
            report["not_begun"].append(lanes)
            continue
        note({"held": False, "lanes": lanes} | await tried(case(given, devices, lanes, time, note)))
    write(given.out / "gpu_paths.json", report)
    for one in cases:
        print(json.dumps({name: value for name, value in one.items() if name not in ("moves", "bare")}))
        if one.get("moves"):
            print("CPU seconds of the last move:", json.dumps(one["moves"][-1]["cpu_s"]))
    return 0 if cases and all(one["held"] for one in cases) else 1


def figures(one: Report) -> str:
    """A few words."""
    held = "held" if one["held"] else "NOT HELD"
    words = [f"{held}, {one.get('made', len(one.get('moves', [])))} of {one.get('asked', '?')} moves"]
    if "verified_gbps" in one:
        bars = "bars held" if one["bars_held"] else "bars missed"
        words.append(f"{one['verified_gbps']:.1f} Gb/s, {one['verified_of_lanes']:.3f} of the lanes, {bars}")
    return ", ".join([*words, *filter(None, [one.get("error")])])


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", default="4,8")
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument("--regions", type=int, default=60)
    parser.add_argument("--shape", default="1,32760,12,128")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument(
        "--seconds", type=duration, default=3600.0, help="no move begins after so long (3600)"
    )
    parser.add_argument("--half", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.half:
        device, regions, shape, lanes, parent = given.half
        end_with_parent(int(parent))
        uvloop.run(serve_half(device, int(regions), shape, int(lanes)))
        return 0
    return int(uvloop.run(run(given)))


if __name__ == "__main__":
    sys.exit(main())
