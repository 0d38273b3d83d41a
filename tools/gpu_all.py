"""Everything that needs a GPU, in one call: correctness first, then every benchmark.

    python tools/gpu_all.py [--out DIR] [--budget SECONDS] [--only NAME,…] [--quick]

Runs each step in a process of its own, one after another, and goes on when one fails. Two files in DIR
(default: $OUT, or here): gpu_all.json with the outcome of each step and whatever documents it wrote, renewed
after every step, and gpu_all.log with all that they said. Exit code 0 only if every step that could run ended
well. A step that asks for more GPUs or packages than there are is skipped, by name, and so is what no time is
left for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worldmove.views import PathChoice

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cupy-cuda13x", "cuda-bindings", "ucxx-cu13", "libucx-cu13", "numpy", "xxhash", "torch")
CLI = ("-m", "worldmove")
LEAST_S = 5.0


class Step(NamedTuple):
    """One step: a name, arguments of Python, seconds at most, GPUs and modules that it needs.

    `{out}` in an argument is a folder of the step's own: JSON files there become part of the report, as does
    what a step writes to stdout where `document` is set.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    gpus: int = 1
    needs: tuple[str, ...] = ()
    document: bool = False


def steps(quick: bool) -> list[Step]:
    """Every step whose files exist, in order: what fails is to be known before anything is timed."""
    few, size = ("3", "1") if quick else ("20", "6.04")
    pytest = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    gpu_tests = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*gpu*.py"))
    ways = [way for way in get_args(PathChoice) if way not in ("auto", "local")]
    found = [
        Step("doctor", (*CLI, "doctor", "--json"), 240, document=True),
        Step("tests", (*pytest, *gpu_tests), 600, needs=("pytest", "pytest_asyncio", "hypothesis")),
        Step("kernels", ("tools/gpu_kernels.py", "--out", "{out}"), 300),
        Step("moves", ("tools/gpu_move.py", "--moves", few, "--out", "{out}"), 400),
        Step("paths", ("tools/gpu_paths.py", "--out", "{out}"), 600),
        Step("devices", ("tools/gpu_devices.py", "--mib", "1024", "--out", "{out}"), 200, gpus=2),
        Step("save", ("tools/gpu_save.py",), 200, needs=("torch",), document=True),
        Step("faults", ("tools/gpu_faults.py", "--moves", "40" if quick else "200", "--out", "{out}"), 600),
        Step("digest", (*CLI, "bench", "digest", "--gpu", "--json"), 120, document=True),
        Step("local", (*CLI, "bench", "path", "--gpu", "--gb", size, "--json"), 200, document=True),
        *(
            Step(
                way,
                (*CLI, "bench", "path", "--gpu", "--gb", size, "--path", way, "--json"),
                200,
                document=True,
            )
            for way in ways
        ),
    ]
    return [step for step in found if step.arguments[0] == "-m" or (ROOT / step.arguments[0]).exists()]


def gpus() -> int:
    """How many GPUs CUDA shows; asked in a process of its own."""
    command = [sys.executable, "-m", "worldmove.cuda.probe"]
    answer = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False)
    return len(json.loads(answer.stdout)) if answer.returncode == 0 else 0


def environment() -> dict[str, str]:
    """With this checkout first in the search path, also where the project isn't installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def missing(step: Step, there: int) -> str:
    """Why a step can't run; empty where it can."""
    modules = [name for name in step.needs if util.find_spec(name) is None]
    if modules:
        return f"not installed: {', '.join(modules)}"
    return f"needs {step.gpus} GPU(s), there are {there}" if there < step.gpus else ""


def perform(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """Runs one step; its outcome, its seconds, and its documents by name."""
    with tempfile.TemporaryDirectory(prefix="wm-gpu-") as folder:
        out = Path(folder)
        arguments = [argument.replace("{out}", folder) for argument in step.arguments]
        began = time.monotonic()
        with log.open("ab") as file, (out / "stdout").open("w+b") as said:
            file.write(f"\n=== {step.name}: {' '.join(arguments)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment() | {"OUT": folder},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=file,
                start_new_session=True,
            )
            code = _wait(process, seconds)
            said.seek(0)
            text = said.read()
            file.write(text)
        documents = {path.name: _document(path.read_bytes()) for path in sorted(out.glob("*.json"))}
        if step.document:
            documents["stdout"] = _document(text)
    outcome = "ok" if code == 0 else "timeout" if code is None else f"exit {code}"
    if outcome != "ok":
        documents["last_words"] = text.decode(errors="replace").splitlines()[-20:]
    return {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "documents": documents}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; `None` for a step that was ended, with all of its session, because its time was up."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _document(text: bytes) -> Any:
    """JSON as it is, or the last words of what should have been JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return {"not_json": text.decode(errors="replace")[-2000:]}


def about(there: int) -> dict[str, Any]:
    """What the figures belong to."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "gpus": there,
        "packages": versions,
    }


def run(chosen: list[Step], budget: float, out: Path) -> int:
    """Runs the steps; returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget
    there = gpus()
    report: dict[str, Any] = {"about": about(there), "steps": {}}
    for step in chosen:
        left = end - time.monotonic()
        why = missing(step, there) or ("no time left" if left < LEAST_S else "")
        if why:
            result: dict[str, Any] = {"outcome": "skipped", "why": why}
        else:
            result = perform(step, min(step.seconds, left), out / "gpu_all.log")
        report["steps"][step.name] = result
        (out / "gpu_all.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{step.name:<10} {result['outcome']:<10} {result.get('seconds', why)}", flush=True)
    bad = [name for name, result in report["steps"].items() if result["outcome"] not in ("ok", "skipped")]
    ran = [name for name, result in report["steps"].items() if result["outcome"] != "skipped"]
    print(f"failed: {', '.join(bad) or 'none'} of {len(ran)}; all of it: {out / 'gpu_all.json'}")
    return 1 if bad or not ran else 0


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything (3600)")
    parser.add_argument("--only", default="", help="names of steps, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sessions, few moves")
    given = parser.parse_args()
    known = steps(given.quick)
    names = [name for name in given.only.split(",") if name]
    unknown = set(names) - {step.name for step in known}
    if unknown:
        parser.error(
            f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in known)}"
        )
    return run([step for step in known if not names or step.name in names], given.budget, given.out)


if __name__ == "__main__":
    sys.exit(main())
