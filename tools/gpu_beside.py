"""What work of another process costs a world's blocks on the same GPU, one kind of work at a time.

    python tools/gpu_beside.py [--only KIND,…] [--blocks 5] [--seconds 80] [--out DIR]

The video world generates alone in this process (shape `--shape`), and a second process does what executors
do during a live copy: copies to and from pinned memory, digests, in pieces of one size at a steady rate. Per
kind: median block time, and by how much it is longer than with an idle second process (first and last).
`--rate` is that of all kinds, in 10⁹ bytes per second. Everything goes to gpu_beside.json in DIR.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from gpu_report import ROOT, Report, Time, about, duration, write

MIB = 1 << 20
LEAF = 64 << 10
ROOM = 1 << 30
FULL = 7
"""Blocks until the world's window is full."""
SIZES = {
    "idle": 0,
    "down-16": 16,
    "up-16": 16,
    "digest-16": 16,
    "digest-64": 64,
    "digest-256": 256,
    "digest-1024": 1024,
    "clear-16": 16,
    "copy-16": 16,
    "copy-256": 256,
    "busy": 0,
}
"""Mebibytes of one piece; `busy` keeps a dozen cores at copying in host memory and leaves the GPU alone."""
BUSY_CORES = 12


def steps() -> dict[str, Callable[[int], object]]:
    """What is done for one piece of so many bytes, by the first word of a kind; begun, not waited for."""
    import cupy  # noqa: PLC0415 - only in the second process
    import cupyx  # noqa: PLC0415

    from worldmove.kernels.leaf_digest_cuda import LeafDigest  # noqa: PLC0415
    from worldmove.kernels.pieces import make_pieces  # noqa: PLC0415

    stream = cupy.cuda.Stream(non_blocking=True)
    data, target = cupy.zeros(ROOM, cupy.uint8), cupy.zeros(256 * MIB, cupy.uint8)
    host = cupyx.empty_pinned(256 * MIB, "u1")
    table = cupy.zeros((ROOM // LEAF, 16), cupy.uint8)
    digests = LeafDigest()
    plans = {
        size * MIB: digests.plan(make_pieces([data.data.ptr], [size * MIB], LEAF, [0]))
        for size in (16, 64, 256, 1024)
    }
    cupy.cuda.runtime.deviceSynchronize()
    move = cupy.cuda.runtime.memcpyAsync

    def digest(size: int) -> None:
        with stream:
            digests.digest(plans[size], 7, table.data.ptr)

    return {
        "down": lambda size: move(host.ctypes.data, data.data.ptr, size, 2, stream.ptr),
        "up": lambda size: move(data.data.ptr, host.ctypes.data, size, 1, stream.ptr),
        "copy": lambda size: move(target.data.ptr, data.data.ptr, size, 3, stream.ptr),
        "clear": lambda size: cupy.cuda.runtime.memsetAsync(data.data.ptr, 0, size, stream.ptr),
        "digest": digest,
    }


def work(rate: float) -> None:
    """The second process: does the kind of work that the last line on stdin names."""
    known = steps()
    helpers: list[subprocess.Popen[bytes]] = []
    kind, due, text = "idle", 0.0, ""
    print("ready", flush=True)
    while True:
        if select.select([0], [], [], 0)[0]:
            read = os.read(0, 100).decode()
            if not read:
                return  # whoever has started this is gone
            text += read
        *lines, text = text.split("\n")
        for line in lines:
            for helper in helpers:
                helper.kill()
            helpers = []
            if line == "end":
                return
            kind, due = line, time.perf_counter()
            if kind == "busy":
                loop = f"import os\na=bytearray(1<<26)\nwhile os.getppid()=={os.getpid()}: a[:]=a"
                helpers = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(BUSY_CORES)]
        size = SIZES[kind] * MIB
        if not size:
            time.sleep(0.001)
            continue
        known[kind.split("-")[0]](size)
        due += size / (rate * 1e9)
        while time.perf_counter() < due:
            time.sleep(0.0001)


def run(given: argparse.Namespace) -> Report:
    """Every kind in turn, the world in this process."""
    import torch  # noqa: PLC0415 - not in the second process

    from worldmove.demo.player import action  # noqa: PLC0415
    from worldmove.demo.video.model import Network  # noqa: PLC0415
    from worldmove.demo.video.shape import SHAPES  # noqa: PLC0415
    from worldmove.demo.video.world import VideoWorld, deterministic, new_state  # noqa: PLC0415

    left = Time(given.seconds)
    deterministic()
    network = Network(SHAPES[given.shape], torch.device("cuda:0"))
    world = VideoWorld(network, new_state(network.shape, network.device, 1))

    def block() -> float:
        began = time.perf_counter()
        world.step(action(world.block + 1).keys)
        return (time.perf_counter() - began) * 1000

    command = [sys.executable, str(Path(__file__)), "--work", "--rate", str(given.rate)]
    beside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    told, says = beside.stdin, beside.stdout
    if told is None or says is None:
        raise RuntimeError("the second process has no pipes")
    says.readline()
    for _ in range(FULL):
        block()
    report: Report = {**about([torch.cuda.get_device_name(0)]), "rate_gb_per_s": given.rate, "rows": []}
    try:
        for kind in [*given.only.split(","), "idle"]:
            if not left.another():
                break
            told.write(f"{kind}\n")
            block()
            times = [block() for _ in range(given.blocks)]
            row = {"kind": kind, "median_ms": statistics.median(times), "ms": times}
            idle = [each["median_ms"] for each in report["rows"] if each["kind"] == "idle"]
            row["longer"] = row["median_ms"] / (idle or [row["median_ms"]])[0] - 1
            report["rows"].append(row)
            print(f"{kind:<12} {row['median_ms']:7.1f} ms  {100 * row['longer']:+.1f} %", flush=True)
            report["figures"] = {each["kind"]: each["longer"] for each in report["rows"]}
            write(given.out / "gpu_beside.json", report)
        told.write("end\n")
        beside.wait(10)
    finally:
        beside.kill()
    return report


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(SIZES))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=duration, default=80.0)
    parser.add_argument("--rate", type=float, default=18.0)
    parser.add_argument("--shape", default="self-forcing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [kind for kind in given.only.split(",") if kind not in SIZES]:
        parser.error(f"no kind {unknown[0]!r}; allowed: {', '.join(SIZES)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    if given.work:
        work(given.rate)
        return 0
    run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
