"""What must hold when things go wrong with sessions on GPUs: flipped bits, deaths, many moves, other hosts.

    python tools/gpu_faults.py [--moves 200] [--seconds 120] [--only STAGE,…] [--out DIR]

Needs one or two GPUs and CuPy. Stages, each of which says what held:

    fingerprint  a session whose fingerprint differs in one field is refused before a byte moves
    flips        a bit that flips on a lane, in a staging ring, or in the destination's memory after landing
                 is found, sent again, and stated in the receipt; the worker compares every byte
    moves        MOVES moves there and back: no growth of device memory, descriptors or mappings
    deaths       `worldmove soak` with worlds that kernels write in place, live and not, for SECONDS: nodes,
                 workers, executors and lanes are killed in every phase; one owner, every block right, nothing
                 left on a device

Everything goes to gpu_faults.json in DIR (default: $OUT, or here). With PYTHONPATH=tests/fake_gpu it runs on
imagined GPUs, which proves nothing about CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.bench.processes import descendants
from worldmove.client import AsyncClient
from worldmove.cuda.probe import probe
from worldmove.errors import FingerprintMismatchError, WorldMoveError
from worldmove.views import MigrationRequest
from worldmove.worker import Region, Worker

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("100", "5120")
MIDDLE = ("60", "1,3000,12,128")
FLIPS = {
    "on a lane": ("lane-flip-once", "A", "staged"),
    "in the source's ring": ("ring-flip-once", "A", "staged"),
    "in the destination's ring": ("ring-flip-once", "B", "staged"),
    "in memory after landing": ("land-flip-once", "B", "local"),
}
LANES = 2
"""Each of them flips once."""
WARM_UP = 4
KILLS = "kill,worker-kill,executor-kill,lane-kill"
Report = dict[str, Any]


def programs(devices: list[str], shape: tuple[str, str]) -> list[tuple[str, ...]]:
    """The serving stacks of both nodes."""
    return [("worldmove.bench.gpu_actor", device, *shape) for device in devices]


def options(devices: list[str], faults: tuple[str, str] = ("", "")) -> dict[str, list[str]]:
    """Of each node; `faults` befall the node of that name."""
    each = {name: ["--gpus", device] for name, device in zip("AB", devices, strict=True)}
    if faults[0]:
        each[faults[1]] += ["--faults", faults[0]]
    return each


async def fingerprint(devices: list[str], given: argparse.Namespace) -> Report:
    """A worker and a standby whose stacks differ in one field."""
    del given

    def region(device: str) -> list[Region]:
        return [Region("r", "uint8", (1 << 20,), device=device)]

    async with running_nodes(("A", "B"), (), options(devices)) as nodes:
        with Worker(nodes[0].url) as here, Worker(nodes[1].url) as there:
            world = await asyncio.to_thread(
                here.register, "w", regions=region(devices[0]), model="m", block_ms=20, horizon_ms=100,
                fingerprint={"weights": "a1"},
            )  # fmt: skip
            standby = await asyncio.to_thread(
                there.standby, regions=region(devices[1]), model="m", block_ms=20, horizon_ms=100,
                fingerprint={"weights": "a2"},
            )  # fmt: skip
            waiting = threading.Thread(target=standby.wait, args=(10.0,), daemon=True)
            waiting.start()
            request = MigrationRequest(session_id="w", destination="B", live=False)
            said = ""
            async with AsyncClient(nodes[0].url) as client:
                try:
                    await client.migrate(request)
                except FingerprintMismatchError as error:
                    said = error.message
                owner = (await client.session("w")).owner
            world.close()
            await asyncio.to_thread(waiting.join)
            standby.close()
    return {"held": bool(said) and "weights" in said and owner == "A", "said": said, "owner": owner}


async def flips(devices: list[str], given: argparse.Namespace) -> Report:
    """One damaged move for each place where a bit can flip, and a good one after it."""
    found: Report = {"held": True}
    for where, (fault, node, path) in FLIPS.items():
        each = options(devices, (fault, node))
        async with (
            running_nodes(("A", "B"), ("--path", path, "--lanes", str(LANES)), each, given.out) as nodes,
            shuttle(nodes, 0, programs(devices, MIDDLE)) as way,
        ):
            receipt = (await way.move(path)).receipt
            damage = [(one.region, one.leaf, one.attempts) for one in receipt.damaged]
            held = 1 <= len(damage) <= LANES and receipt.repair_bytes > 0
            found[where] = {
                "held": held,
                "damaged": damage,
                "repair_bytes": receipt.repair_bytes,
                "path": receipt.path,
                "roots_equal": receipt.source_root == receipt.destination_root,
            }
            found["held"] = found["held"] and held
            print("flip", where, found[where], flush=True)
    return found


async def usage(nodes: list[RunningNode], clients: list[AsyncClient]) -> dict[str, list[int]]:
    """Of each node: bytes in use on its GPU, and descriptors and mappings of all of its processes."""
    views = [await client.node() for client in clients]
    pids = [descendants([node.pid]) for node in nodes]
    return {
        "device_bytes": [
            sum(one.total_bytes - one.free_bytes for one in view.devices if one.kind == "cuda")
            for view in views
        ],
        "descriptors": [sum(_entries(pid, "fd") for pid in some) for some in pids],
        "mappings": [sum(_lines(pid) for pid in some) for some in pids],
    }


def _entries(pid: int, what: str) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/{what}").iterdir())
    except OSError:
        return 0


def _lines(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


async def moves(devices: list[str], given: argparse.Namespace) -> Report:
    """Many moves of one session; usage after the first ones and after the last."""
    seen: list[dict[str, list[int]]] = []
    pauses: list[float] = []
    async with (
        running_nodes(("A", "B"), ("--path", "local"), options(devices), given.out) as nodes,
        shuttle(nodes, 0, programs(devices, SMALL)) as way,
        AsyncClient(nodes[0].url) as one,
        AsyncClient(nodes[1].url) as other,
    ):
        for number in range(1, given.moves + 1):
            pauses.append((await way.move("local")).receipt.pause_ms or 0.0)
            if number % 2 == 0 and (number == WARM_UP or number % 20 == 0 or number == given.moves):
                await way.turn()
                seen.append(await usage(nodes, [one, other]))
    grown = {name: [b - a for a, b in zip(seen[0][name], seen[-1][name], strict=True)] for name in seen[0]}
    held = all(by <= 0 for by in grown["device_bytes"]) and all(by <= 4 for by in grown["descriptors"])
    return {
        "held": held and all(by <= 40 for by in grown["mappings"]),
        "moves": len(pauses),
        "grown": grown,
        "first": seen[0],
        "last": seen[-1],
        "pause_ms_median_best": [sorted(pauses)[len(pauses) // 2], min(pauses)],
    }


async def deaths(devices: list[str], given: argparse.Namespace) -> Report:
    """The soak, in a process of its own."""
    del devices
    command = ("soak", "--gpus", "auto", "--nodes", "2", "--worlds", "2", "--state-mb", str(given.state_mb))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worldmove", *command, "--moves", "100000", "--only", KILLS, "--json"),
        *("--seconds", str(given.seconds), "--seed", str(given.seed)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    answer, errors = await process.communicate()
    troubles = errors.decode(errors="replace")
    (given.out / "soak.log").write_text(troubles)
    document = json.loads(answer) if answer else {}
    return {"held": process.returncode == 0, "soak": document, "troubles": troubles.splitlines()[:40]}


STAGES: dict[str, Callable[[list[str], argparse.Namespace], Awaitable[Report]]] = {
    "fingerprint": fingerprint,
    "flips": flips,
    "moves": moves,
    "deaths": deaths,
}


async def run(given: argparse.Namespace) -> int:
    """The stages, one after another; returns the exit code."""
    found = await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    report: Report = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "devices": [device.name for device in found],
        "stages": {},
    }
    for name in given.only.split(","):
        try:
            result = await STAGES[name](devices, given)
        except (WorldMoveError, OSError, RuntimeError, ValueError) as error:
            result = {"held": False, "error": f"{type(error).__name__}: {error}"}
        report["stages"][name] = result
        (given.out / "gpu_faults.json").write_text(json.dumps(report, indent=1) + "\n")
        shown = {key: value for key, value in result.items() if key not in ("first", "last", "troubles")}
        print(name, json.dumps(shown)[:1500], flush=True)
    failed = [name for name, result in report["stages"].items() if not result["held"]]
    print(f"did not hold: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--state-mb", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    if unknown := [name for name in given.only.split(",") if name not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return asyncio.run(run(given))


if __name__ == "__main__":
    sys.exit(main())
