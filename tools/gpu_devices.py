"""Worlds on several devices: moved between nodes and within one, revised, imported, refused; bytes compared.

    python tools/gpu_devices.py [--only NAME,…] [--mib N] [--seconds N] [--out DIR]

Needs two GPUs and CuPy; with one, what needs another is left out, by name. Two real nodes run beside each
other, both with both GPUs, and worlds of tools/gpu_worlds.py move between their devices. The standby's memory
is poisoned before each move; what has arrived is compared, byte for byte and where it lies, with what has to
be there. Each scenario goes on from nothing, and none begins after SECONDS; all of it is written to
gpu_devices.json in DIR (default: $OUT, or here). Exit code 0 only if every scenario that began ended well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from gpu_hands import Regions, Trial, need
from gpu_report import Report, Time, about, duration, tried, write

from worldmove.bench.nodes import running_nodes
from worldmove.cuda.ipc import pid_namespace
from worldmove.cuda.probe import probe
from worldmove.errors import WorldMoveError
from worldmove.views import MigrationRequest

LEAST_S = 15.0
Scenario = Callable[[Trial], Awaitable[dict[str, Any]]]


async def mixed(trial: Trial) -> dict[str, Any]:
    """One session in host memory and on two GPUs, between two nodes, its GPUs exchanged; over both paths."""
    first, second = trial.gpus
    there = trial.regions(cache="host", k=second, v=first)
    back = trial.regions(cache="host", k=first, v=second)
    a, b = await trial.hand(0), await trial.hand(1)
    await a.ask("register", id="mixed", regions=back)
    moves = [await trial.handover("mixed", a, b, there, path="local")]
    need(sorted(moves[0]["devices"]) == sorted([[first, second], [second, first]]), "devices", moves)
    moves.append(await trial.handover("mixed", b, a, back, path="staged", live=False))
    moves.append(await trial.handover("mixed", a, b, there, path="local", live=False))
    moves.append(await trial.handover("mixed", b, a, there, path="staged"))
    need([move["path"] for move in moves] == ["local", "staged"] * 2, "paths", moves)
    return {"moves": moves}


async def ranks(trial: Trial) -> dict[str, Any]:
    """Two ranks, each a process with a GPU of its own, between nodes, GPUs exchanged; over both paths."""
    first, second = trial.gpus

    def regions(*gpus: str) -> Regions:
        return [{**trial.region(f"k{rank}", gpu), "rank": rank} for rank, gpu in enumerate(gpus)]

    here, there = [[await trial.hand(node) for _ in range(2)] for node in (0, 1)]
    away, home = regions(second, first), regions(first, second)
    (ticket,) = (await here[0].ask("register", id="ranks", regions=home))["tickets"]
    await here[1].ask("join", ticket=ticket, regions=home[1:])
    moves, pairs = [], ((here, there, away), (there, here, home))
    for number, (path, live) in enumerate(
        [("local", True), ("staged", False), ("local", False), ("staged", True)]
    ):
        source, destination, wanted = pairs[number % 2]
        (ticket,) = (await destination[0].ask("standby", regions=wanted))["tickets"]
        await destination[1].ask("join_standby", ticket=ticket, regions=wanted[1:])
        for leaves, comes in zip(source, destination, strict=True):
            comes.begin("wait")
            leaves.begin("go")
        view = await trial.migrate("ranks", number % 2, 1 - number % 2, path=path, live=live)
        need(view.state == "released", "a move", view.state, view.code, view.reason)
        for leaves, comes in zip(source, destination, strict=True):
            one = await trial.arrived(leaves, comes, view.receipt)
        moves.append(one)
        need(len(one["devices"]) == 2, "devices", one)
    return {"moves": moves}


async def within(trial: Trial) -> dict[str, Any]:
    """From one GPU to the other of the same node: by a map, by the command line, and by the standby alone."""
    first, second = trial.gpus
    here, there = (
        trial.regions(cache="host", k=first, v=first),
        trial.regions(cache="host", k=second, v=second),
    )
    a, b = await trial.hand(0), await trial.hand(0)
    await a.ask("register", id="within", regions=here)
    codes = {
        "nobody waits": await refusal(trial, "within", 0),
        "to where it is": await refusal(trial, "within", 0, devices={first: "0"}),
        "no such source": await refusal(trial, "within", 0, devices={"7": "0"}),
        "no such destination": await refusal(trial, "within", 1, devices={"0": "GPU-none"}),
        "a GPU as host": await refusal(trial, "within", 0, devices={"0": "host"}),
        "not its device": await refusal(trial, "within", 1, devices={"1": "0"}),
    }
    wanted = ("no-worker", "same-place", "validation", "validation", "validation", "validation")
    need(tuple(codes.values()) == wanted, "codes", codes)
    await b.ask("standby", regions=here)
    codes["standby on the same GPU"] = await refusal(trial, "within", 0)
    need(codes["standby on the same GPU"] == "same-place", "code", codes)
    await b.ask("forget")
    moves = [await trial.handover("within", a, b, there, devices={first: second})]
    moves.append(await trial.handover("within", b, a, here))
    moves.append(await trial.handover("within", a, b, there, devices={"0": "1"}, live=False))
    await a.ask("standby", regions=here)
    a.begin("wait")
    b.begin("go")
    options = (
        "--to",
        trial.nodes[0].name,
        "--device",
        "1=0",
        "--wait",
        "--json",
        "--url",
        trial.nodes[0].url,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worldmove", "move", "within", *options), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    need(process.returncode == 0, "the command", said)
    async with trial.client(0) as client:
        view = await client.migration(json.loads(said)["id"])
        shown = await client.session("within")
    moves.append(await trial.arrived(b, a, view.receipt))
    need((shown.owner, shown.state, shown.epoch) == (trial.nodes[0].name, "live", 5), "shown", shown)
    last = await a.ask("go", blocks=3)
    need(last.get("wrong") == {}, "goes on", last)
    return {"moves": moves, "codes": codes}


async def refusal(trial: Trial, session: str, destination: int, **more: Any) -> str:
    """With what a move from the first node is refused."""
    request = MigrationRequest(session_id=session, destination=trial.nodes[destination].name, **more)
    async with trial.client(0) as client:
        try:
            return (await client.dry_run(request)).code or "admissible"
        except WorldMoveError as error:
            return error.code


async def revised(trial: Trial) -> dict[str, Any]:
    """Regions on GPUs are added, dropped and resized; the world moves on; a move in between aborts."""
    first, second = trial.gpus
    a, b = await trial.hand(0), await trial.hand(1)
    regions = trial.regions(k=first, v=second, gone=first)
    await a.ask("register", id="revised", regions=regions)
    await a.ask("go", blocks=2)
    tokens = regions[0]["shape"][1]
    change = await a.ask(
        "revise",
        add=trial.regions(late=second),
        drop=["gone"],
        resize={"k": [1, tokens + tokens // 2, 4, 128], "v": [1, tokens // 2, 4, 64]},
    )
    need(all(change["kept"].values()) and all(change["zero"].values()), "contents", change)
    swap = {first: second, second: first}
    there = [{**region, "device": swap[region["device"]]} for region in change["regions"]]
    moves = [await trial.handover("revised", a, b, there)]
    after = await b.ask("go", blocks=1)
    need(after["wrong"] == {}, "goes on", after)
    await a.ask("standby", regions=change["regions"])
    a.begin("wait")
    async with trial.client(1) as client:
        name = trial.nodes[0].name
        view = await client.migrate(MigrationRequest(session_id="revised", destination=name, live=False))
        again = await b.ask("revise", resize={"k": [1, tokens, 4, 128]})
        async for last in client.migration_events(view.id):
            view = last
    need((view.state, view.code) == ("aborted", "revised"), "a move that can't follow", view)
    going = await b.ask("go", blocks=2)
    need(going.get("wrong") == {}, "goes on after the move was given up", going)
    wrong = await b.refused("revise", add=[trial.region("x", "GPU-00000000-0000-0000-0000-000000000000")])
    need(wrong.get("error") == "manifest", "a device of nobody", wrong)
    return {"moves": moves, "revise_ms": [change["ms"], again["ms"]], "refused": wrong["message"]}


async def own(trial: Trial) -> dict[str, Any]:
    """Memory that the stack has allocated itself, by handle and offset; after its first move in arenas."""
    first, second = trial.gpus
    moves = []
    for path, to in (("local", second), ("staged", first)):
        async with trial.turn():
            a, b = await trial.hand(0), await trial.hand(1)
            here, there = (
                trial.regions(cache="host", k=first, v=first),
                trial.regions(cache="host", k=to, v=to),
            )
            made = await a.ask("register", id="own", regions=here, own=first)
            need(made["offset"] > 0, "an offset", made)
            moves.append(await trial.handover("own", a, b, there, path=path))
            moves.append(await trial.handover("own", b, await trial.hand(0), here, path="local"))
    refusals = {}
    source = {"kind": "cuda-ipc", "handle": "A" * 86 + "==", "offset": 0}
    space = pid_namespace()
    for name, more in (("handle", {"pid_namespace": space}), ("namespace", {"pid_namespace": 1})):
        region = {**trial.region("r", first), "source": {**source, **more}}
        body = {"model": "m", "regions": [region], "block_ms": 5.0, "horizon_ms": 50.0}
        refusals[name] = await post(trial, "sessions", body)
    refusals["standby"] = await post(trial, "standbys", body)
    need([each["status"] for each in refusals.values()] == [422] * 3, "refusals", refusals)
    async with trial.turn():
        refusals["its worker died"] = await gone(trial)
    return {"moves": moves, "refusals": refusals}


async def gone(trial: Trial) -> dict[str, Any]:
    """Memory of a stack's own goes with its process: nobody takes the world up."""
    here = trial.regions(k=trial.gpus[0])
    a, late = await trial.hand(0), await trial.hand(0)
    await a.ask("register", id="gone", regions=here, own=trial.gpus[0])
    await a.ask("go", blocks=1)
    await a.end()
    async with trial.client(0) as client:
        while (await client.session("gone")).state != "unattended":  # noqa: ASYNC110 - a few looks
            await asyncio.sleep(0.05)
    taken = await late.refused("attach", id="gone", regions=here)
    need(taken.get("error") == "conflict" and "own" in taken["message"], "taken up", taken)
    return taken


async def post(trial: Trial, what: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a node answers to a registration of a session or a standby."""
    import httpx  # noqa: PLC0415 - here alone

    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{trial.nodes[0].url}/v1/{what}", json=body)
    found = answer.json()
    return {"status": answer.status_code, "code": found.get("code"), "detail": found.get("detail")}


async def kinds(trial: Trial) -> dict[str, Any]:
    """Memory that has no handle is refused by name."""
    hand = await trial.hand(0, PYTORCH_ALLOC_CONF="expandable_segments:True")
    words = {"managed": "managed memory", "pool": "cudaMallocAsync", "virtual": "expandable_segments"}
    said = {}
    if (await hand.ask("torch"))["sees_gpus"]:
        words["expandable"] = "expandable_segments"
    else:
        said["expandable"] = "not tried: there is no PyTorch, or it sees no GPU"
    for kind, word in words.items():
        answer = await hand.refused("refused", device=trial.gpus[0], kind=kind)
        need(answer.get("error") == "manifest" and word in answer["message"], kind, answer)
        said[kind] = answer["message"]
    plain = await hand.ask("refused", device=trial.gpus[0], kind="plain")
    need(plain == {"accepted": 0}, "plain memory", plain)
    return {"said": said}


async def memory(trial: Trial) -> dict[str, Any]:
    """A GPU that is full: refused with what is needed and free, everything undone, and later it works."""
    first, second = trial.gpus
    a, hog, late, other = [await trial.hand(node) for node in (0, 1, 1, 0)]
    for hand in (late, other):
        await hand.ask("still")  # their contexts are there before anything is measured
    regions = trial.regions(cache="host", k=first)
    await a.ask("register", id="full", regions=regions)
    await a.ask("go", blocks=2)
    await hog.ask("hog", device=second, leave=1 << 60)  # its context is there before anything is measured
    before = await trial.free(0)
    took = await hog.ask("hog", device=second, leave=trial.mib << 19)
    full = await trial.free(0)
    request = MigrationRequest(
        session_id="full",
        destination=trial.nodes[1].name,
        devices={first: second},
        allow_unattended=True,
        live=False,
    )
    said: dict[str, Any] = {}
    async with trial.client(0) as client:
        try:
            await client.migrate(request)
        except WorldMoveError as error:
            said["move"] = {"code": error.code, "message": error.message, **error.details}
        view = await client.session("full")
    need(said.get("move", {}).get("code") == "no-memory", "a move to a full GPU", said)
    need((view.state, view.migration_id) == ("live", None), "the session", view)
    spread = trial.regions(x="host", y=first, z=second)
    said["register"] = await other.refused("register", id="spread", regions=spread)
    need(said["register"].get("error") == "no-memory", "a registration", said)
    undone = await trial.settles(full)
    await hog.ask("unhog")
    await trial.settles(before)
    a.begin("go")
    moved = await trial.migrate("full", 0, 1, devices={first: second}, allow_unattended=True)
    need(moved.state == "released", "a later move", moved)
    left = await a.read()
    there = [{**region, "device": {first: second}.get(region["device"], "host")} for region in regions]
    taken = await late.ask("attach", id="full", regions=there)
    need(taken["wrong"] == {} and left.get("moved") == trial.nodes[1].name, "arrived", taken, left)
    need((await other.ask("register", id="spread", regions=spread))["epoch"] == 1, "a later registration")
    return {"took": took, "free": {"before": before, "full": full, "undone": undone}, "said": said}


SCENARIOS: dict[str, Scenario] = {
    "mixed": mixed,
    "ranks": ranks,
    "within": within,
    "revised": revised,
    "own": own,
    "kinds": kinds,
    "memory": memory,
}


WITH_ONE = ("own", "kinds")
"""What one GPU is enough for."""


async def run(given: argparse.Namespace, chosen: list[str]) -> int:
    """Everything; returns the exit code."""
    left, found = Time(given.seconds), (await probe())[:2]
    report: Report = {
        **about([device.name for device in found]),
        "scenarios": {},
        "left_out": {},
        "figures": {},
    }
    gpus = [device.uuid for device in found]
    options = ["--gpus", ",".join(gpus), "--executors", "1", "--lanes", "2", "--log-level", "info"]
    async with running_nodes(["A", "B"], options, None, given.out) as nodes:
        trial = Trial(nodes, [gpus[0], gpus[-1]], given.mib)
        for name in chosen:
            if len(found) < 2 and name not in WITH_ONE:
                report["left_out"][name] = "needs 2 GPUs, there is 1"
                continue
            if left.left() < LEAST_S:
                report["left_out"][name] = "no time is left"
                continue
            began = time.monotonic()
            result: Report = {"held": True, **await tried(one(trial, name))}
            result["seconds"] = round(time.monotonic() - began, 1)
            report["scenarios"][name] = result
            words = "held" if result["held"] else f"NOT HELD: {result.get('error')}"
            report["figures"][name] = f"{words}, {result['seconds']} s"
            write(given.out / "gpu_devices.json", report)
            print(f"{name:<8} {report['figures'][name]}", flush=True)
    write(given.out / "gpu_devices.json", report)
    print("left out:", json.dumps(report["left_out"]))
    results = report["scenarios"].values()
    return 0 if results and all(result["held"] for result in results) else 1


async def one(trial: Trial, name: str) -> Report:
    """One scenario, from nothing to nothing."""
    async with trial.turn():
        return await SCENARIOS[name](trial)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="names of scenarios, separated by commas")
    parser.add_argument("--mib", type=int, default=1024, help="size of a region on a GPU (1024)")
    parser.add_argument("--seconds", type=duration, default=3600.0, help="no scenario begins after so long")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name] or list(SCENARIOS)
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    return asyncio.run(run(given, names))


if __name__ == "__main__":
    sys.exit(main())
