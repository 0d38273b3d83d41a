"""What must hold when things go wrong with sessions on GPUs: flipped bits, deaths, many moves, other hosts.

    python tools/gpu_faults.py [--moves 200] [--seconds 300] [--only STAGE,…] [--first N] [--out DIR]

Needs one or two GPUs and CuPy. Stages, each of which says what held:

    fingerprint  a session whose fingerprint differs in one field is refused before a byte moves
    flips        a bit that flips on a lane, in a staging ring, or in the destination's memory after landing
                 is found, sent again, and stated in the receipt; the worker compares every byte
    moves        MOVES moves there and back: no growth of device memory, descriptors or mappings
    deaths       `worldmove soak` with worlds that kernels write in place, live and not: nodes, workers,
                 executors and lanes are killed in every phase; one owner, every block right, nothing left on
                 a device. There are a hundred such deaths, in some 130 moves: `--first` goes on with the deck
                 of the same `--seed` where an earlier run stopped

No move begins after SECONDS; a stage that no time is left for is not begun. Everything goes to
gpu_faults.json in DIR (default: $OUT, or here), after every stage. With one GPU both nodes are on it. With
PYTHONPATH=tests/fake_gpu it runs on imagined GPUs, which proves nothing about CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_report import ROOT, Report, Time, about, duration, tried, write

from worldmove.bench.moves import shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.bench.processes import descendants
from worldmove.client import AsyncClient
from worldmove.cuda.probe import probe
from worldmove.errors import FingerprintMismatchError
from worldmove.views import MigrationRequest
from worldmove.worker import Region, Worker

SMALL = ("100", "5120")
UNPROBED = ("60", "1,5000,3")
"""1.8 MB: for a state this small no path is probed; what flips in a probe's bytes nobody would notice."""
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
LEAST_S = 5.0
END_S = 15.0
"""What a soak may take to begin and to end, beside its moves."""
LOST_S = 120.0
"""After this much more than its time it is lost."""


def programs(devices: list[str], shape: tuple[str, str]) -> list[tuple[str, ...]]:
    """The serving stacks of both nodes."""
    return [("worldmove.bench.gpu_actor", device, *shape) for device in devices]


def options(devices: list[str], faults: tuple[str, str] = ("", "")) -> dict[str, list[str]]:
    """Of each node; `faults` befall the node of that name."""
    each = {name: ["--gpus", device] for name, device in zip("AB", devices, strict=True)}
    if faults[0]:
        each[faults[1]] += ["--faults", faults[0]]
    return each


async def fingerprint(devices: list[str], given: argparse.Namespace, time: Time) -> Report:
    """A worker and a standby whose stacks differ in one field."""
    del given, time

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


async def flips(devices: list[str], given: argparse.Namespace, time: Time) -> Report:
    """One damaged move for each place where a bit can flip."""
    found: Report = {"held": True, "asked": len(FLIPS), "made": 0}
    for where, (fault, node, path) in FLIPS.items():
        if not time.another():
            break
        each = options(devices, (fault, node))
        async with (
            running_nodes(("A", "B"), ("--path", path, "--lanes", str(LANES)), each, given.out) as nodes,
            shuttle(nodes, 0, programs(devices, UNPROBED)) as way,
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
            found["made"] += 1
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


async def moves(devices: list[str], given: argparse.Namespace, time: Time) -> Report:
    """Many moves of one session; usage after the first ones and after the last."""
    seen: list[dict[str, list[int]]] = []
    pauses: list[float] = []
    async with (
        running_nodes(("A", "B"), ("--path", "local"), options(devices), given.out) as nodes,
        shuttle(nodes, 0, programs(devices, SMALL)) as way,
        AsyncClient(nodes[0].url) as one,
        AsyncClient(nodes[1].url) as other,
    ):
        time.anew()
        while not pauses or (len(pauses) < given.moves and time.another()):
            pauses += [(await way.move("local")).receipt.pause_ms or 0.0 for _ in ("there", "back")]
            if len(pauses) == WARM_UP or len(pauses) % 20 == 0 or len(pauses) >= given.moves:
                await way.turn()
                seen.append(await usage(nodes, [one, other]))
        await way.turn()
        seen.append(await usage(nodes, [one, other]))
    return grown(seen) | {
        "asked": given.moves,
        "made": len(pauses),
        "pause_ms_median_best": [sorted(pauses)[len(pauses) // 2], min(pauses)] if pauses else None,
    }


def grown(seen: list[dict[str, list[int]]]) -> Report:
    """By how much usage has grown from the first look to the last, and whether that is nothing."""
    first, last = seen[0], seen[-1]
    more = {name: [b - a for a, b in zip(first[name], last[name], strict=True)] for name in first}
    held = all(by <= 0 for by in more["device_bytes"]) and all(by <= 4 for by in more["descriptors"])
    held = held and all(by <= 40 for by in more["mappings"])
    return {"held": held, "grown": more, "first": first, "last": last}


async def deaths(devices: list[str], given: argparse.Namespace, time: Time) -> Report:
    """The soak, in a process of its own; its lines are in soak.log as they come."""
    del devices
    lasts = max(time.left() - END_S, 1.0)
    command = ("soak", "--gpus", "auto", "--nodes", "2", "--worlds", "2", "--state-mb", str(given.state_mb))
    log = given.out / "soak.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worldmove", *command, "--moves", "100000", "--only", KILLS, "--json"),
            *("--seconds", f"{lasts:g}", "--seed", str(given.seed), "--first", str(given.first)),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        try:
            async with asyncio.timeout(lasts + LOST_S):
                answer, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    document = json.loads(answer) if answer else {}
    return {
        "held": process.returncode == 0 and document.get("moves", 0) > 0,
        "made": document.get("moves"),
        "first": given.first,
        "next": given.first + document.get("moves", 0),
        "fired": sum(one["fired"] for one in document.get("by_fault", {}).values()),
        "soak": document,
        "lines": log.read_text(errors="replace").splitlines(),
    }


STAGES: dict[str, Callable[[list[str], argparse.Namespace, Time], Awaitable[Report]]] = {
    "fingerprint": fingerprint,
    "flips": flips,
    "moves": moves,
    "deaths": deaths,
}


async def run(given: argparse.Namespace) -> int:
    """The stages, one after another; returns the exit code."""
    time, found = Time(given.seconds), await probe()
    devices = [found[0].uuid, found[1 % len(found)].uuid]
    report: Report = {**about([device.name for device in found]), "stages": {}, "not_begun": []}
    for name in given.only.split(","):
        if time.left() < LEAST_S:
            report["not_begun"].append(name)
            continue
        time.anew()
        result = report["stages"][name] = await tried(STAGES[name](devices, given, time))
        report["figures"] = figures(report["stages"])
        write(given.out / "gpu_faults.json", report)
        shown = {key: value for key, value in result.items() if key not in ("first", "last", "lines")}
        print(name, json.dumps(shown)[:1500], flush=True)
    write(given.out / "gpu_faults.json", report)
    failed = [name for name, result in report["stages"].items() if not result["held"]]
    print(
        f"did not hold: {', '.join(failed) or 'none'}; not begun: {', '.join(report['not_begun']) or 'none'}"
    )
    return 1 if failed or not report["stages"] else 0


def figures(stages: dict[str, Report]) -> dict[str, str]:
    """A few words for each stage."""
    found = {}
    for name, result in stages.items():
        made = f"{result['made']} of {result['asked']}" if "asked" in result else str(result.get("made", ""))
        more = f", {result['fired']} died, next {result['next']}" if "fired" in result else ""
        found[name] = ("held" if result["held"] else "NOT HELD") + (f", {made}{more}" if made else "")
    return found


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--seconds", type=duration, default=300.0, help="no move begins after so long (300)")
    parser.add_argument("--state-mb", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="the move of the seed that `deaths` begins with")
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    if unknown := [name for name in given.only.split(",") if name not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return asyncio.run(run(given))


if __name__ == "__main__":
    sys.exit(main())
