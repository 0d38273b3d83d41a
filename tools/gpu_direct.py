"""Moves a session between two GPUs by the direct path, checks every byte, and says what it costs.

    python tools/gpu_direct.py [--moves N] [--regions N] [--shape S] [--only STEPS] [--options O] [--out DIR]

Needs one or two GPUs, CuPy and NVML's bindings. Two real nodes run beside each other, one for each GPU (with
one GPU, both on that one), and a worker and a standby pass a session there and back. The standby's memory is
poisoned before each move; what has arrived is compared byte for byte, on the GPU, with a copy that never
travelled. In turn with the moves, two processes that do nothing else carry as many bytes between the same
GPUs, in the same messages, as many at once, by the same UCX with the same options, from plain memory to plain
memory.

The lanes tell where the time goes, and so does the report. `--only sweep` has lanes alone carry the session
in messages of many sizes, so many at once, landed in their ring or straight; `--options` gives the nodes what
was found to be good.

Then nodes that share no folder choose the path by themselves; and faults: a byte flips in a ring, a lane is
killed or stopped, at either side. Everything goes to gpu_direct-STEPS.json in DIR (default: $OUT, or here).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pynvml
import uvloop

from worldmove.bench.moves import Moved, Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.cuda.probe import probe
from worldmove.errors import MoveAbortedError, NoWorkerError
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
GO, BYTES = 1, 2
LONG = ("moves", "bares_ms", "accounts", "rows")


def nvml() -> bool:
    """Whether NVIDIA's management library is there."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def used(uuids: list[str]) -> list[int]:
    """Bytes in use on each GPU, by whatever process; none are told of GPUs that are imagined."""
    if not nvml():
        return []
    handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


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
                raise SystemExit("the other end has ended")
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

    def __init__(self, given: argparse.Namespace, devices: list[str]) -> None:
        self.given = given
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

    async def timed(self) -> dict[str, Any]:
        """Moves and bare transfers in turn."""
        moves: list[dict[str, Any]] = []
        bares: list[float] = []
        async with self.nodes() as (_, way), bare(self.devices, self.nbytes) as other:
            for number in range(self.given.moves + WARM_UP):
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
        data_ms, bare_ms = statistics.median(one["data_ms"] for one in timed), statistics.median(alone)
        return {
            "bytes": self.nbytes,
            "bare_ms": bare_ms,
            "data_ms": data_ms,
            "verified_of_bare": bare_ms / data_ms,
            "bar_held": bare_ms / data_ms >= BAR,
            "compared_equal": len(moves),
            "gb_per_s": self.nbytes / data_ms / 1e6,
            "median": {name: statistics.median(one[name] for one in timed) for name in TIMES},
            "moves": moves,
            "bares_ms": bares,
            "accounts": accounts(self.given.out)[-4:],
        }

    async def sweep(self) -> dict[str, Any]:
        """Lanes alone."""
        from gpu_sweep import Sweep, shown  # noqa: PLC0415 - brings kernels along, which the others don't need

        one = Sweep(self.devices, self.given.regions, self.nbytes // self.given.regions, self.given.repeats)
        found = await one.run(time.monotonic() + SWEEP_S)
        print(shown(found["rows"]), flush=True)
        return found

    async def chosen(self) -> list[dict[str, Any]]:
        """What nodes that share no folder take."""
        async with self.nodes() as (nodes, way):
            for node in nodes:
                (run_dir(node) / "peer.sock").unlink()
            found = []
            for _ in range(3):
                receipt = (await moved(way, "auto")).receipt
                found.append({"path": receipt.path, "gbps": receipt.path_gbps, "why": receipt.path_reason})
        return found

    async def flips(self) -> list[int]:
        """Leaves that were found damaged and sent again: a byte flips once in the ring of A, the source."""
        async with self.nodes(faulty="ring-flip-once") as (_, way):
            return [len((await moved(way)).receipt.damaged) for _ in range(2)]

    async def faults(self) -> list[dict[str, Any]]:
        """What lanes that die or stop do to a move, and to the one after it."""
        found = []
        async with self.nodes("--faults", "arm", "--stall-ms", "1000") as (nodes, way):
            at = 0
            for _ in range(2):
                await moved(way)
            for fault in FAULTS:
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
        return found


def accounts(folder: Path) -> list[dict[str, Any]]:
    """What lanes have told of their leases, in the nodes' logs, in the order of their end."""
    found = []
    for log in (folder / "A.log", folder / "B.log"):
        for line in log.read_text().splitlines():
            if '"lane-released"' in line and '"account"' in line:
                said = json.loads(line)
                found.append({name: said[name] for name in ("timestamp", "node", "account")})
    return sorted(found, key=lambda one: str(one["timestamp"]))


async def settled(devices: list[str], before: list[int]) -> list[int]:
    """Bytes in use once the driver has taken everything back, within ten seconds."""
    for _ in range(100):
        if used(devices) <= before:
            break
        await asyncio.sleep(0.1)
    return used(devices)


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


async def run(given: argparse.Namespace) -> int:
    """Everything; returns the exit code."""
    found = await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    before = used(devices)
    report: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python tools/gpu_direct.py --only {given.only} --moves {given.moves}",
        "python": platform.python_version(),
        "driver": pynvml.nvmlSystemGetDriverVersion() if nvml() else None,
        "versions": versions("cupy-cuda13x", "ucxx-cu13", "libucx-cu13"),
        "devices": [device.name for device in found],
        "chunk_bytes": CHUNK,
        "slots": SLOTS,
        "at_once": AT_ONCE,
        "device_bytes_before": before,
    }
    case = Case(given, devices)
    steps = {
        "timed": case.timed,
        "chosen": case.chosen,
        "flips": case.flips,
        "faults": case.faults,
        "sweep": case.sweep,
    }
    for name in given.only.split(","):
        result = report[name] = await steps[name]()
        report[f"device_bytes_after_{name}"] = await settled(devices, before)
        (given.out / f"gpu_direct-{given.only.replace(',', '-')}.json").write_text(
            json.dumps(report, indent=1)
        )
        if isinstance(result, dict):
            for one in result.get("accounts", []):
                print(one["node"], *lines(one["account"]), sep="\n  ", flush=True)
            result = {key: one for key, one in result.items() if key not in LONG}
        print(name, json.dumps(result), report[f"device_bytes_after_{name}"], flush=True)
    return 0


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--regions", type=int, default=60)
    parser.add_argument("--shape", default="1,32760,12,128")
    parser.add_argument("--only", default="faults,flips,chosen,timed")
    parser.add_argument("--options", default="", help="more options of both nodes, in one word")
    parser.add_argument("--repeats", type=int, default=3, help="of each combination of a sweep")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        device, nbytes, parent = given.bare
        end_with_parent(int(parent))
        uvloop.run(serve_bare(device, int(nbytes)))
        return 0
    return int(uvloop.run(run(given)))


if __name__ == "__main__":
    sys.exit(main())
