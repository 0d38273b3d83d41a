"""Checks of UCX: which one is loaded, and what it can carry."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from worldmove.doctor.finding import Finding, fail, ok, warn

SWITCH = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""Has UCXX's loader take the UCX of the system, if there is one, in place of the wheel's."""

INFINIBAND = Path("/sys/class/infiniband")
NO_SYSTEM_UCX = (
    f"{SWITCH} is set, and not all of libucs.so, libucs_signal.so, libuct.so and libucp.so were found: for "
    "each that is missing the wheel's is taken without a word. Install UCX 1.19 to 1.21 with these names "
    "(its -dev package has them), or put its folder into LD_LIBRARY_PATH."
)

_LOADED = """
import libucx, re
libucx.load_library()
maps = open("/proc/self/maps").read()
print("\\n".join(sorted(set(re.findall(r"/\\S*/libuc[pst]\\S*", maps)))))
"""


def ucx() -> Finding:
    """UCXX and UCX: the data plane, and the transports that this build of it has."""
    name = "UCX"
    names = {"ucxx-cu12", "ucxx-cu13"}
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions(name="ucxx-cu13")}
    installed |= {dist.name.lower(): dist.version for dist in metadata.distributions(name="ucxx-cu12")}
    if not installed:
        return fail(name, f"none of {', '.join(sorted(names))} is installed", "pip install 'worldmove[host]'")
    if len(installed) > 1:
        return fail(
            name, "both ucxx-cu12 and ucxx-cu13 are installed", "They exclude each other: remove one."
        )
    wheel, version = installed.popitem()
    transports = ucx_transports()
    listed = ", ".join(sorted(transports)) or "unknown"
    found = f"{wheel} {version}, UCX {_ucx_version()}; transports: {listed}"
    if system_wanted():
        files = loaded()
        if wheels_own(files) or not files:
            return warn(name, f"{found}; loaded: {', '.join(files)}", NO_SYSTEM_UCX)
        found = f"{found}; the system's: {', '.join(files)}"
    if "tcp" not in transports:
        return warn(name, found, "The tcp transport was not found; lanes need it.")
    return ok(name, found)


def fabric(folder: Path = INFINIBAND, transports: set[str] | None = None) -> Finding:
    """InfiniBand and RoCE: used by the direct path only with a UCX that knows them.

    Args:
        folder: where the kernel shows such devices.
        transports: of UCX; `None`: ask it.
    """
    name = "RDMA"
    cards = sorted(path.name for path in folder.glob("*"))
    if not cards:
        return ok(name, "no InfiniBand or RoCE device: lanes use TCP")
    there = {
        each for each in (ucx_transports() if transports is None else transports) if each[:2] in ("rc", "dc")
    }
    found = f"{', '.join(cards)}; UCX transports for it: {', '.join(sorted(there)) or 'none'}"
    if not there:
        return warn(
            name,
            found,
            "The wheels of UCX carry no rc transport. Install the system's UCX (1.19 to 1.21) and set "
            f"{SWITCH}=true; in a container also --device=/dev/infiniband and "
            "--ulimit memlock=-1: see docs/containers.md.",
        )
    return ok(name, found)


def system_wanted() -> bool:
    """Whether the loader is told to take the system's UCX; read as UCXX's loader reads it."""
    return os.environ.get(SWITCH, "false").lower() != "false"


def loaded() -> list[str]:
    """The files of UCX that a process of ours loads; empty where it loads none."""
    answer = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout.split()


def wheels_own(files: list[str]) -> list[str]:
    """Those libraries that lie in UCX's wheel."""
    return [file for file in files if any(file.startswith(f"{folder}/") for folder in _folders())]


def ucx_transports() -> set[str]:
    """The transports that `ucx_info` lists; empty where UCX came without it (a system build, say)."""
    return set(re.findall(r"Transport: (\S+)", _ucx_info("-d")))


def _ucx_version() -> str:
    match = re.search(r"Library version: (\S+)", _ucx_info("-v"))
    return match[1] if match else "unknown"


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("libucx")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _ucx_info(option: str) -> str:
    quiet = os.environ | {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal"}
    # What stands in LD_LIBRARY_PATH may be how libcuda.so.1 is found.
    before = list(filter(None, [os.environ.get("LD_LIBRARY_PATH")]))
    wheels = [
        (
            [str(folder / "bin" / "ucx_info"), option],
            quiet | {"LD_LIBRARY_PATH": os.pathsep.join([str(folder / "lib"), *before])},
        )
        for folder in _folders()
    ]
    system = [(["ucx_info", option], quiet)] if system_wanted() else []
    for command, environment in [*system, *wheels]:
        try:
            answer = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        return answer.stdout
    return ""
