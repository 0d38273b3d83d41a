"""Everything that needs a GPU, in one call that ends in time: what must hold first, then what is timed.

    python tools/gpu_all.py [--out DIR] [--seconds 570] [--only NAME[=SECONDS],…] [--first N] [--quick]

Runs each step in a process of its own, one after another, and goes on when one fails. A step is told how long
it has and ends by itself, between two moves; when it does not, it is ended with all that it started. One that
too little time is left for is not begun. Without `--only` they come in the order of what is most wanted, with
it as they are named: so three calls of ten minutes share the work, see docs/benchmarks.md.

A line for each step: name, seconds, whether it held, its figures. In DIR (default: $OUT, or here) a folder
for each step with its documents and its log, and gpu_all.json, with all documents, renewed after every step.
Exit code 0 only if every step that ran held. Steps that ask for more GPUs or packages than there are are
skipped, by name; with one GPU the others have both nodes on it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_report import ROOT, Report, Time, about, duration, write

from worldmove.bench.processes import descendants
from worldmove.cuda.probe import probe
from worldmove.errors import DeviceError

CLI = ("-m", "worldmove")
SUBREAPER = 36
"""`PR_SET_CHILD_SUBREAPER` of prctl(2): what a dead step leaves becomes this process's child."""
LAST_S = 3.0
"""For what comes after the last step."""
SPARE_S = 20.0
"""Between the time that a step is told and the one after which it is ended: a last move, the end of nodes."""
GRACE_S = 5.0
"""For a step that was told to end."""
PATIENCE_S = 2.0
"""For what a step has ended and not waited for."""


class Step(NamedTuple):
    """One step.

    In an argument `{out}` is the step's folder, `{seconds}` the time that it has.

    Attributes:
        arguments: of Python.
        seconds: how long it may take. least: with less it is not begun.
        gpus, needs: GPUs and modules that it asks for.
        figures: names in the document that it writes to stdout; documents in its folder have their own.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    least: float = 20.0
    gpus: int = 1
    needs: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


def tool(name: str, *words: str) -> tuple[str, ...]:
    """Arguments of a tool that knows how to end."""
    return f"tools/gpu_{name}.py", *words, "--seconds", "{seconds}", "--out", "{out}"


def steps(*, quick: bool, first: int) -> list[Step]:
    """Every step, what is most wanted first; `quick`: with small sessions and few moves."""
    shape = ("--regions", "4", "--shape", "1,3000,12,128") if quick else ()
    few, many, mb = ("2", "20", "41") if quick else ("4", "200", "6040")
    world = ("--moves", "2" if quick else "20", "--shape", "small" if quick else "self-forcing")
    deaths = ("--state-mb", "2" if quick else "64", "--first", str(first))
    pytest = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    gpu_tests = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*gpu*.py"))
    bench, moved = (*CLI, "bench"), ("path", "data_ms", "raw_ms", "ratio_data_raw", "handover_ms")
    size = ("--gpu", "--gb", "0.02" if quick else "6.04", "--json")
    return [
        Step("doctor", (*CLI, "doctor", "--json"), 60, 5, figures=("ok",)),
        Step("deaths", tool("faults", "--only", "deaths", *deaths), 300, 60),
        *(
            Step(f"world-{path}", tool("world", "--paths", path, *world), 200, 90, needs=("torch",))
            for path in ("local", "direct", "staged")
        ),
        Step("faults", tool("faults", "--only", "fingerprint,flips,moves", "--moves", many), 150, 40),
        Step("delta-staged", tool("delta", "--only", "bench", "--paths", "staged", "--mb", mb), 150, 60),
        Step("paths", tool("paths", "--lanes", "4,8", "--moves", few, *shape), 100, 50),
        Step("direct", tool("direct", "--only", "chosen,flips,faults", *shape), 110, 45),
        Step("devices", tool("devices", "--mib", "4" if quick else "1024"), 100, 30),
        Step(
            "neighbour",
            tool("world", "--paths", "local", "--neighbour", "only", *world),
            200,
            90,
            gpus=2,
            needs=("torch",),
        ),
        Step("moves", tool("move", "--moves", "20", *(("--only", "small") if quick else ())), 120, 40),
        Step("timed", tool("direct", "--only", "timed", "--moves", few, *shape), 80, 30),
        Step(
            "delta",
            tool("delta", "--only", "ordered,speed", "--mb", mb, *(("--mib", "6") if quick else ())),
            90,
        ),
        Step("kernels", ("tools/gpu_kernels.py", "--out", "{out}"), 120, 60),
        Step("beside", tool("beside", "--shape", world[-1]), 90, 60, needs=("torch",)),
        Step("digest", (*bench, "digest", "--gpu", "--mb", mb, "--json"), 90, figures=("read_gb_per_s",)),
        Step("local", (*bench, "path", *size), 90, figures=moved),
        Step("save", ("tools/gpu_save.py",), 90, 60, needs=("torch",), figures=("median_s", "equal")),
        Step("tests", (*pytest, *gpu_tests), 400, 200, needs=("pytest", "pytest_asyncio", "hypothesis")),
    ]


def gpus() -> list[str]:
    """The names of the GPUs that CUDA shows."""
    try:
        return [device.name for device in asyncio.run(probe())]
    except DeviceError:
        return []


def missing(step: Step, there: int) -> str:
    """Why a step can't run; empty where it can."""
    modules = [name for name in step.needs if util.find_spec(name) is None]
    if modules:
        return f"not installed: {', '.join(modules)}"
    return f"needs {step.gpus} GPU(s), there are {there}" if there < step.gpus else ""


def perform(step: Step, seconds: float, out: Path, facts: Report) -> Report:
    """Runs one step in its folder; its outcome, its seconds, its figures, and its documents by name."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    told = max(seconds - SPARE_S, seconds / 2)
    values = {"{out}": str(out), "{seconds}": f"{told:.0f}"}
    arguments = [values.get(argument, argument) for argument in step.arguments]
    shown = ["python", *(argument for argument in arguments if argument not in (str(out), "--out"))]
    began = time.monotonic()
    with (out / "log").open("w+b") as log, (out / "stdout").open("w+b") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"OUT": str(out)},
            stdin=subprocess.DEVNULL,
            stdout=said if step.figures else log,
            stderr=log,
            start_new_session=True,
        )
        code = ended(process, seconds)
        left = clear_away(0.0 if code is None else PATIENCE_S)
        if step.figures:
            said.seek(0)
            document = read(said.read())
            write(out / "stdout.json", {**facts, "command": " ".join(shown), "document": document})
    (out / "stdout").unlink()
    outcome = "overran" if code is None else "NOT HELD" if code else "held"
    documents = {path.name: read(path.read_bytes()) for path in written(out)}
    result: Report = {
        "outcome": outcome,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
        "of": round(seconds, 1),
        "command": " ".join(shown),
        "figures": figures(step, documents),
        "processes_left": left,
        "documents": documents,
    }
    if outcome != "held":
        result["last_words"] = (out / "log").read_text(errors="replace").splitlines()[-20:]
    return result


def written(out: Path) -> list[Path]:
    """Documents in a folder; not those that a step was killed over (`gpu_report.write`)."""
    return sorted(path for path in out.glob("*.json") if not path.name.startswith("."))


def read(text: bytes) -> Any:
    """JSON as it is, or the last words of what should have been JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return {"not_json": text.decode(errors="replace")[-2000:]}


def figures(step: Step, documents: Report) -> Report:
    """What a line has room for."""
    found: Report = {}
    for document in documents.values():
        found |= document.get("figures", {})
    given = documents.get("stdout.json", {}).get("document")
    if isinstance(given, dict):
        found |= {name: given[name] for name in step.figures if name in given}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; `None` for a step that was told to end because its time was up."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def clear_away(patience: float = 0.0) -> int:
    """Ends what a step has left, in the way of the next as it is; returns how many processes had to be ended.

    Args:
        patience: how long what is about to go may take, in seconds.
    """
    ended_by_force: set[int] = set()
    last = time.monotonic() + patience
    while strays := descendants([os.getpid()]) - {os.getpid()}:
        for pid in strays:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() >= last:
                    os.kill(pid, signal.SIGKILL)
                    ended_by_force.add(pid)
        time.sleep(0.02)
    return len(ended_by_force)


def run(chosen: list[Step], seconds: float, out: Path) -> int:
    """Runs the steps; returns the exit code."""
    left = Time(seconds - LAST_S)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    names = gpus()
    facts = about(names)
    report: Report = {"about": facts, "steps": {}}
    for step in chosen:
        limit = min(step.seconds, left.left() - GRACE_S)
        least = min(step.least, step.seconds)
        why = missing(step, len(names))
        if not why and limit < least:
            why = f"{max(limit, 0):.0f} s are left, it needs {least:g}"
        result: Report = (
            {"outcome": "skipped", "why": why} if why else perform(step, limit, out / step.name, facts)
        )
        report["steps"][step.name] = result
        write(out / "gpu_all.json", report)
        words = why or "; ".join(f"{name}: {value}" for name, value in result["figures"].items())
        print(
            f"{step.name:<12} {result.get('seconds', 0):6.1f} s  {result['outcome']:<8} {words}", flush=True
        )
    results = report["steps"]
    ran = [name for name, result in results.items() if result["outcome"] != "skipped"]
    bad = [name for name in ran if results[name]["outcome"] != "held"]
    print(f"did not hold: {', '.join(bad) or 'none'} of {len(ran)}; all of it: {out / 'gpu_all.json'}")
    return 1 if bad or not ran else 0


def selected(text: str, known: list[Step]) -> list[Step]:
    """The steps that `--only` names, with the time that it gives them.

    Raises:
        ValueError: one is unknown, or its time is none.
    """
    by_name, chosen = {step.name: step for step in known}, []
    for word in filter(None, text.split(",")):
        name, _, seconds = word.partition("=")
        if name not in by_name:
            raise ValueError(f"no step {name}; there are {', '.join(by_name)}")
        chosen.append(by_name[name]._replace(seconds=duration(seconds)) if seconds else by_name[name])
    return chosen or known


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=duration, default=570.0, help="for everything (570)")
    parser.add_argument(
        "--only", default="", help="names of steps, separated by commas, each with =SECONDS or not"
    )
    parser.add_argument("--first", type=int, default=1, help="the move that `deaths` begins with")
    parser.add_argument("--quick", action="store_true", help="small sessions, few moves")
    given = parser.parse_args()
    try:
        chosen = selected(given.only, steps(quick=given.quick, first=given.first))
    except ValueError as error:
        parser.error(str(error))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # With this checkout first in the search path, also where the project isn't installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    try:
        return run(chosen, given.seconds, given.out.resolve())
    finally:
        clear_away()


if __name__ == "__main__":
    sys.exit(main())
