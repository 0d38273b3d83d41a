"""What every test shares: the event loop of the service, short directories for sockets, and a leak check.

Every process that a test starts inherits a mark in its environment. When the run ends, processes
with the mark are given time to go; one that stays fails the run, and so does shared memory left in /dev/shm.

Spread over processes by pytest-xdist, each worker looks after the processes that its own tests started
and tells the controller, which fails the run; only the controller looks at /dev/shm, once all are done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from fleet_kit import Fleet
    from hosting_kit import HostKit

# Before NumPy is loaded: several test processes with a BLAS thread for each core would fight over the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

MARK = "PYTEST_RUN_MARK"
GRACE_S = 15.0
LEFT_BEHIND = 7
"""Exit code of a run that leaves something behind; pytest has 0 to 5. No second run can make it good."""
SHM = Path("/dev/shm")

SECONDS = Path(__file__).with_name("data") / "seconds.json"
"""How long files of tests take; those that take less than some seconds are left out."""

_run_key = pytest.StashKey[str]()
_shm_key = pytest.StashKey[set[str]]()
_leaks_key = pytest.StashKey[list[str]]()


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], AbstractEventLoop]]:
    """Asynchronous tests run on the loop that the service runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """An empty directory with a path short enough for Unix sockets (107 bytes), private to this user."""
    path = Path(tempfile.mkdtemp(prefix="wm-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def fleet(nodes: Fleet) -> Iterator[Fleet]:
    """One test's turn on its module's fleet (the fixture `nodes`); dead nodes are started again."""
    for node in nodes.nodes.values():
        if node.process is None:
            node.start()
    with nodes.turn():
        yield nodes


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts find imagined GPUs."""
    from gpu_kit import imagine  # noqa: PLC0415 - as for `kit`

    imagine(monkeypatch)


@pytest.fixture
async def kit(run_dir: Path) -> AsyncIterator[HostKit]:
    """A host with real workers around it."""
    from hosting_kit import host_kit  # noqa: PLC0415 - most tests need none of what it imports

    async with host_kit(run_dir) as made:
        yield made


def _shared_memory() -> set[str]:
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


def _abandoned(names: set[str]) -> list[str]:
    """Those files of /dev/shm that no living process maps: what another program uses is its own affair."""
    maps = ""
    for entry in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps += entry.read_text(errors="replace")
    return sorted(name for name in names if f"{SHM / name}\n" not in maps and (SHM / name).exists())


def marked_processes(mark: str) -> dict[int, str]:
    """Processes (other than this one) that carry the mark, zombies left out: pid to command line."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
    return found


def wait_until_gone(mark: str, grace_s: float) -> dict[int, str]:
    """Waits until every marked process has ended; returns those that have not within `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(mark)) and (rest := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(next(iter(left)))
            try:
                select.select([pidfd], [], [], rest)
            finally:
                os.close(pidfd)
    return left


def pytest_configure(config: pytest.Config) -> None:
    """Marks this run, notes what lies in /dev/shm before it, and keeps the caller's options out of it."""
    for name in [name for name in os.environ if name.startswith("WORLDMOVE_")]:
        del os.environ[name]
    _keep_bytecode(config)
    config.stash[_run_key] = os.environ[MARK] = uuid.uuid4().hex
    config.stash[_shm_key] = _shared_memory()
    config.stash[_leaks_key] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first: one that begins last is waited for by an idle machine.

    Within a file, and among those that `SECONDS` doesn't name, nothing changes its place.
    """
    seconds = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0))


def _keep_bytecode(config: pytest.Config) -> None:
    """Beside the cache of test results, where the caller wants none beside the sources.

    The suite starts many hundreds of processes: without it each compiles all that it imports, which is more
    than half of what starting a node costs.
    """
    cache: pytest.Cache | None = getattr(config, "cache", None)  # there is none with `-p no:cacheprovider`
    if cache is not None and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _is_controller(config: pytest.Config) -> bool:
    return not _is_worker(config) and bool(getattr(config.option, "numprocesses", None))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker process has ended: what it left behind counts for the whole run."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[_leaks_key] += output.get("leaks", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails a run that leaves processes or shared memory behind."""
    config = session.config
    leaks = config.stash[_leaks_key]
    if not _is_controller(config):
        left = wait_until_gone(config.stash[_run_key], GRACE_S)
        leaks += [f"process {pid}: {command}" for pid, command in left.items()]
    if _is_worker(config):
        config.workeroutput["leaks"] = leaks
        return
    leaks += [f"/dev/shm/{name}" for name in _abandoned(_shared_memory() - config.stash[_shm_key])]
    if leaks and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = LEFT_BEHIND


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says how many tests were skipped, also when none was, and what was left behind."""
    for leak in config.stash[_leaks_key]:
        terminalreporter.write_line(f"left behind: {leak}", red=True)
    terminalreporter.write_line(f"skipped: {len(terminalreporter.stats.get('skipped', []))}")
