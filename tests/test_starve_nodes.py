"""Nodes that really run short while they take in sessions and standbys, or have lost a process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from fault_kit import Usage, settles
from fleet_kit import Actor, ActorError, Fleet, until
from pulse_kit import Pulse
from refusal_kit import REGIONS
from starve_kit import PAGE, address_space, group, limited, next_descriptor

from worldmove.memory.arena import HEADROOM_BYTES

MB = 1 << 20


@pytest.fixture(scope="module")
def lonely() -> Iterator[Fleet]:
    with Fleet("A", options=("--memory-limit", "64MB")) as fleet:
        yield fleet


@pytest.fixture(params=["session", "standby"])
def newcomer(request: pytest.FixtureRequest, lonely: Fleet) -> Iterator[Actor]:
    """A worker that is about to bring a session or a standby; `kind` says which."""
    with lonely.turn():
        actor = lonely.actor("A")
        actor.ask("use", share=8)
        actor.kind = request.param  # type: ignore[attr-defined]
        yield actor


def bring(actor: Actor) -> None:
    if actor.kind == "session":  # type: ignore[attr-defined]
        actor.register("w", REGIONS)
    else:
        actor.standby(REGIONS)


def refused(lonely: Fleet, actor: Actor, shortage: AbstractContextManager[object]) -> ActorError:
    """What the worker is told; nothing of it may be left, and without the shortage it is let in."""
    before = Usage.of(lonely["A"])
    with shortage, pytest.raises(ActorError) as told:
        bring(actor)
    settles(lonely["A"], before)
    bring(actor)
    return told.value


def test_memory_files_that_may_not_be_so_large(lonely: Fleet, newcomer: Actor) -> None:
    told = refused(lonely, newcomer, limited(lonely["A"].pid, resource.RLIMIT_FSIZE, MB))
    assert told.code == "no-memory"
    assert told.details["required_bytes"] > told.details["available_bytes"] == MB


def test_no_descriptors(lonely: Fleet, newcomer: Actor) -> None:
    pid = lonely["A"].pid
    told = refused(lonely, newcomer, limited(pid, resource.RLIMIT_NOFILE, next_descriptor(pid) + 20))
    assert told.code == "no-memory"
    assert told.details["required"] > told.details["available"]


def test_no_address_space(lonely: Fleet, newcomer: Actor) -> None:
    """The control page can't be mapped."""
    pid = lonely["A"].pid
    told = refused(lonely, newcomer, limited(pid, resource.RLIMIT_AS, address_space(pid, PAGE)))
    assert told.code == "no-memory"
    assert told.details["required_bytes"] > told.details["available_bytes"]


def test_a_cgroup_without_room(lonely: Fleet, newcomer: Actor) -> None:
    """The kernel would kill: so the cgroup's limit is asked before anything is taken, and nobody dies."""
    node = lonely["A"]
    keeper = node.view().keeper
    told = refused(lonely, newcomer, group("memory", {"memory.limit_in_bytes": HEADROOM_BYTES}, [node.pid]))
    assert told.code == "no-memory"
    assert told.details["required_bytes"] > told.details["available_bytes"]
    assert node.view().keeper == keeper


def test_no_more_processes(lonely: Fleet) -> None:
    """What has died can't be replaced: it is, as soon as the system lets it."""
    node = lonely["A"]
    (executor,), keeper = node.view().executors, node.view().keeper
    threads = len(list(Path(f"/proc/{node.pid}/task").iterdir()))
    with Pulse(node):
        with group("pids", {"pids.max": threads}, [node.pid]):
            os.kill(executor, signal.SIGKILL)
            os.kill(keeper, signal.SIGKILL)
            until(lambda: "keeper not replaced" in node.log.read_text(), "the system has refused a keeper")
            until(lambda: not node.view().executors, "the executor is missed")
            assert httpx.get(f"{node.url}/v1/readyz", trust_env=False).status_code == 503
        until(lambda: node.view().executors, "there is an executor again")
        until(lambda: node.view().keeper not in (0, keeper), "there is a keeper again")
    assert httpx.get(f"{node.url}/v1/readyz", trust_env=False).status_code == 200
    with lonely.turn():
        lonely.actor("A").register("w", REGIONS)
