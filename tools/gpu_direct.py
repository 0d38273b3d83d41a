"""Moves a session between two GPUs by the direct path, checks every byte, and says what it costs.

    python tools/gpu_direct.py [--moves N] [--seconds N] [--only STEPS] [--options O] [--out DIR]

Needs one or two GPUs and CuPy. Two real nodes run beside each other, one for each GPU (with
one GPU, both on that one), and a worker and a standby pass a session there and back. The standby's memory is
poisoned before each move; what has arrived is compared byte for byte, on the GPU, with a copy that never
travelled. In turn with the moves, two processes that do nothing else carry as many bytes between the same
GPUs, in the same messages, as many at once, by the same UCX with the same options, from plain memory to plain
memory.

The lanes tell where the time goes, and so does the report. `--only sweep` has lanes alone carry the session
in messages of many sizes, so many at once, landed in their ring or straight; `--options` gives the nodes what
was found to be good.

Then nodes that share no folder choose the path by themselves; and faults: a byte flips in a ring, a lane is
killed or stopped, at either side. No move begins after SECONDS, and no step that no time is left for.
Everything goes to gpu_direct-STEPS.json in DIR (default: $OUT, or here), after each step. Exit code 0: steps
were made, and every byte was right; whether moves were fast stands in the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import uvloop
from gpu_report import Report, Time, about, duration, settled, tried, used, write

from worldmove.bench.moves import Moved, Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.cuda.probe import probe
from worldmove.errors import MoveAbortedError, NoWorkerError, ProcessLostError
from worldmove.executor.serving import end_with_parent
from worldmove.faults.door import order
from worldmove.transport import ucx
from worldmove.transport.account import lines
from worldmove.transport.base import Connection
from worldmove.transport.device import LaneGpu
from worldmove.transport.lane import ALERT_S
from worldmove.transport.packing import Shape
from worldmove.transport.ucx_transport import UcxTransport
from worldmove.views import PathChoice

BAR = 0.9
WARM_UP = 2
SLOTS = 4
CHUNK, AT_ONCE = Shape()
SWEEP_S = 150.0
TIMES = ("pause_ms", "data_ms", "commit_ms", "resume_ms", "total_ms")
FAULTS = ("source.finishing.lane-kill", "destination.finishing.lane-kill",
          "source.finishing.lane-stop", "destination.finishing.lane-stop")  # fmt: skip
STEPS = ("timed", "chosen", "flips", "faults", "sweep")
GO, BYTES = 1, 2
LEAST_S = 10.0
LONG = ("moves", "bares_ms", "accounts", "rows")


async def serve_bare(device: str, nbytes: int) -> None:
    """The sending end of a bare transfer, in a process of its own: once for every word from the other end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its log to stdout
    gpu = LaneGpu(device, SLOTS)
    listener = await UcxTransport(ucx.DEVICE_OPTIONS, ALERT_S).listen()
    print(listener.port, file=answers, flush=True)
    connection = await listener.accept()
    while (incoming := await connection.receive()) is not None:
        await incoming.into(memoryview(bytearray(incoming.nbytes)))
        free, left = asyncio.Semaphore(AT_ONCE), nbytes
        for number in range(-(-nbytes // CHUNK)):
            await free.acquire()
            data = gpu.ring(number % SLOTS * CHUNK, min(CHUNK, left))
            connection.send(BYTES, data).add_done_callback(partial(_release, free))
            left -= data.nbytes


def _release(free: asyncio.Semaphore, _: asyncio.Future[None]) -> None:
    free.release()


class Bare:
    """The receiving end."""

    def __init__(self, gpu: LaneGpu, connection: Connection, nbytes: int) -> None:
        self._gpu = gpu
        self._connection = connection
        self._nbytes = nbytes

    async def run(self) -> float:
        """Milliseconds from asking until the last byte is there."""
        begin = time.perf_counter()
        self._connection.send(GO, memoryview(b"go"))
        left, number = self._nbytes, 0
        landing: list[asyncio.Future[None]] = []
        while left:
            incoming = await self._connection.receive()
            if incoming is None:
                raise ProcessLostError("the other end has ended")
            if len(landing) >= SLOTS:
                await landing[-SLOTS]
            landing.append(incoming.into(self._gpu.ring(number % SLOTS * CHUNK, incoming.nbytes)))
            left, number = left - incoming.nbytes, number + 1
        for future in landing:
            await future
        return (time.perf_counter() - begin) * 1000


@contextlib.asynccontextmanager
async def bare(devices: list[str], nbytes: int) -> AsyncIterator[Bare]:
    """Two ends, connected, each with a ring on its GPU."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--bare", devices[0], str(nbytes), str(os.getpid())),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        gpu = LaneGpu(devices[1], SLOTS)
        line = await process.stdout.readline() if process.stdout is not None else b""
        transport = UcxTransport(ucx.DEVICE_OPTIONS, ALERT_S)
        yield Bare(gpu, await transport.connect("127.0.0.1", int(line), 20.0), nbytes)
    finally:
        process.kill()
        await process.wait()


async def moved(way: Shuttle, path: PathChoice = "direct") -> Moved:
    """A move; where the standby is still being wiped after the last one, it is asked for again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await way.move(path)
            except NoWorkerError as error:
                await asyncio.sleep(error.details.get("retry_after_ms", 100) / 1000)


def run_dir(node: RunningNode) -> Path:
    """Where a node's sockets are."""
    words = Path(f"/proc/{node.pid}/cmdline").read_bytes().decode().split("\0")
    return Path(words[words.index("--run-dir") + 1])


class Case:
    """Both GPUs with their nodes and workers."""

    def __init__(self, given: argparse.Namespace, devices: list[str], time: Time) -> None:
        self.given = given
        self.time = time
        self.devices = devices
        shape = [int(each) for each in given.shape.split(",")]
        self.nbytes = given.regions * math.prod(shape) * 2
        self.programs = [
            ("worldmove.bench.gpu_actor", device, str(given.regions), given.shape) for device in devices
        ]

    @contextlib.asynccontextmanager
    async def nodes(self, *more: str, faulty: str = "") -> AsyncIterator[tuple[list[RunningNode], Shuttle]]:
        """Two nodes and a session at the first one, which has this fault."""
        each = {name: ["--gpus", device] for name, device in zip("AB", self.devices, strict=True)}
        each["A"] += ["--faults", faulty] if faulty else []
        options = ["--path", "auto", "--log-level", "info", *self.given.options.split(), *more]
        async with (
            running_nodes(("A", "B"), options, each, self.given.out) as nodes,
            shuttle(nodes, 0, self.programs) as way,
        ):
            yield nodes, way

    async def timed(self) -> Report:
        """Moves and bare transfers in turn."""
        moves: list[Report] = []
        bares: list[float] = []
        asked = self.given.moves + WARM_UP
        async with self.nodes() as (_, way), bare(self.devices, self.nbytes) as other:
            self.time.anew()
            for number in range(asked):
                if not self.time.another():
                    break
                await way.turn()
                bares.append(await other.run())
                done = await moved(way)
                receipt = done.receipt
                times = {name: float(getattr(receipt, name) or 0.0) for name in TIMES}
                moves.append(
                    {
                        "path": receipt.path,
                        "path_gbps": receipt.path_gbps,
                        "source": receipt.source,
                        "damaged": len(receipt.damaged),
                        "prepare_ms": done.prepare_ms,
                        **times,
                    }
                )
                bares.append(await other.run())
                print(number, round(bares[-1], 2), json.dumps(moves[-1]), flush=True)
        timed, alone = moves[WARM_UP:], bares[2 * WARM_UP :]
        told = {"held": bool(moves), "asked": asked, "made": len(moves), "moves": moves, "bares_ms": bares}
        if not timed:
            return told
        data_ms, bare_ms = statistics.median(one["data_ms"] for one in timed), statistics.median(alone)
        return told | {
            "bytes": self.nbytes,
            "bare_ms": bare_ms,
            "data_ms": data_ms,
            "verified_of_bare": bare_ms / data_ms,
            "bar_held": bare_ms / data_ms >= BAR,
            "gb_per_s": self.nbytes / data_ms / 1e6,
            "median": {name: statistics.median(one[name] for one in timed) for name in TIMES},
            "accounts": accounts(self.given.out)[-4:],
        }

    async def sweep(self) -> Report:
        """Lanes alone."""
        from gpu_sweep import Sweep, shown  # noqa: PLC0415 - brings kernels along, which the others don't need

        one = Sweep(self.devices, self.given.regions, self.nbytes // self.given.regions, self.given.repeats)
        found = await one.run(time.monotonic() + min(SWEEP_S, self.time.left()))
        print(shown(found["rows"]), flush=True)
        return found | {"held": bool(found["rows"])}

    async def chosen(self) -> Report:
        """What nodes that share no folder take; fast enough or not, they move."""
        async with self.nodes() as (nodes, way):
            for node in nodes:
                (run_dir(node) / "peer.sock").unlink()
            found = []
            for _ in range(3):
                receipt = (await moved(way, "auto")).receipt
                found.append({"path": receipt.path, "gbps": receipt.path_gbps, "why": receipt.path_reason})
        return {"held": True, "paths": [one["path"] for one in found], "each": found}

    async def flips(self) -> Report:
        """Leaves that were found damaged and sent again: a byte flips once in the ring of A, the source."""
        async with self.nodes(faulty="ring-flip-once") as (_, way):
            damaged = [len((await moved(way)).receipt.damaged) for _ in range(2)]
        return {"held": damaged[0] > 0 and damaged[1] == 0, "damaged": damaged}

    async def faults(self) -> Report:
        """What lanes that die or stop do to a move, and to the one after it."""
        found = []
        async with self.nodes("--faults", "arm", "--stall-ms", "1000") as (nodes, way):
            at = 0
            for _ in range(2):
                await moved(way)
            self.time.anew()
            for fault in FAULTS:
                if not self.time.another():
                    break
                side = at if fault.startswith("source") else 1 - at
                before = used(self.devices)
                await order(run_dir(nodes[side]), arm=fault)
                begin = time.perf_counter()
                try:
                    await moved(way)
                except MoveAbortedError as error:
                    reason = str(error)
                else:
                    reason, at = "", 1 - at
                took = time.perf_counter() - begin
                fired = len((await order(run_dir(nodes[side]))).fired)
                damaged = len((await moved(way)).receipt.damaged)
                at = 1 - at
                found.append(
                    {"fault": fault, "aborted": bool(reason), "reason": reason, "seconds": round(took, 2),
                     "fired": fired, "next_move_equal": True, "next_damaged": damaged,
                     "device_bytes": [before, used(self.devices)]}
                )  # fmt: skip
                print(json.dumps(found[-1]), flush=True)
        held = all(one["fired"] and not one["next_damaged"] for one in found)
        return {"held": held and bool(found), "asked": len(FAULTS), "made": len(found), "each": found}


def accounts(folder: Path) -> list[dict[str, Any]]:
    """What lanes have told of their leases, in the nodes' logs, in the order of their end."""
    found = []
    for log in (folder / "A.log", folder / "B.log"):
        for line in log.read_text().splitlines():
            if '"lane-released"' in line and '"account"' in line:
                said = json.loads(line)
                found.append({name: said[name] for name in ("timestamp", "node", "account")})
    return sorted(found, key=lambda one: str(one["timestamp"]))


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    time, found = Time(given.seconds), await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    before = used(devices)
    report: Report = {
        **about([device.name for device in found]),
        "chunk_bytes": CHUNK,
        "slots": SLOTS,
        "at_once": AT_ONCE,
        "device_bytes_before": before,
        "not_begun": [],
        "figures": {},
    }
    case = Case(given, devices, time)
    names = given.only.split(",")
    out = given.out / f"gpu_direct-{'-'.join(names)}.json"
    for name in names:
        if time.left() < LEAST_S:
            report["not_begun"].append(name)
            continue
        result = report[name] = await tried(getattr(case, name)())
        after = report[f"device_bytes_after_{name}"] = await settled(devices, before)
        report["figures"][name] = figures(result)
        write(out, report)
        for one in result.get("accounts", []):
            print(one["node"], *lines(one["account"]), sep="\n  ", flush=True)
        print(
            name, json.dumps({key: one for key, one in result.items() if key not in LONG}), after, flush=True
        )
    write(out, report)
    made = [report[name] for name in names if name in report]
    return 0 if made and all(result["held"] for result in made) else 1


def figures(result: Report) -> str:
    """A few words."""
    words = ["held" if result["held"] else "NOT HELD"]
    words += [f"{result['made']} of {result['asked']}"] if "made" in result else []
    if "verified_of_bare" in result:
        bar = "bar held" if result["bar_held"] else "bar missed"
        words.append(f"{result['data_ms']:.2f} ms, bare {result['bare_ms']:.2f}, {bar}")
    words += [f"{name} {result[name]}" for name in ("paths", "damaged", "error") if name in result]
    return ", ".join(words)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--regions", type=int, default=60)
    parser.add_argument("--shape", default="1,32760,12,128")
    parser.add_argument("--only", default="faults,flips,chosen,timed")
    parser.add_argument("--options", default="", help="more options of both nodes, in one word")
    parser.add_argument("--repeats", type=int, default=3, help="of each combination of a sweep")
    parser.add_argument(
        "--seconds", type=duration, default=3600.0, help="no move begins after so long (3600)"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [name for name in given.only.split(",") if name not in STEPS]:
        parser.error(f"no step {unknown[0]!r}; allowed: {', '.join(STEPS)}")
    if given.bare:
        device, nbytes, parent = given.bare
        end_with_parent(int(parent))
        uvloop.run(serve_bare(device, int(nbytes)))
        return 0
    return int(uvloop.run(run(given)))


if __name__ == "__main__":
    sys.exit(main())
