"""What the soak plans, what it would notice, and what it says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from worldmove.faults.points import LINGERING, every_fault, parse
from worldmove.soak import report
from worldmove.soak import run as soak
from worldmove.soak.plan import LEADS, Step, steps
from worldmove.soak.story import Story
from worldmove.soak.usage import LANE_DEVICE_BYTES, Usage, device_bytes
from worldmove.soak.world import SoakWorld, regions, twin
from worldmove.views import NodeView

USAGE = Usage(9, 9, 9, 9, 9, 9, 1, 0, 1, 9, 1000, 0, 10_000)


def plan(seed: int, count: int) -> list[Step]:
    return list(itertools.islice(steps(seed, 3, 2), count))


def test_a_seed_repeats_its_plan() -> None:
    assert plan(7, 500) == plan(7, 500)
    assert plan(7, 500) != plan(8, 500)


def test_half_of_the_moves_are_good_and_no_fault_is_left_out() -> None:
    moves = plan(7, 1200)
    faults = [move.fault for move in moves if move.fault]
    assert 500 < len(faults) < 700
    assert set(faults) == {fault.name for fault in every_fault() if fault.what not in LINGERING}
    for what in LINGERING:
        dealt = {step.fault for step in itertools.islice(steps(7, 3, 2, only=[what]), 50)} - {""}
        assert dealt == {fault.name for fault in every_fault() if fault.what == what}
    assert {move.world for move in moves} == {0, 1}
    assert {move.hop for move in moves} == {1, 2}


def test_a_plan_may_deal_some_faults_only_and_kills_a_worker_with_every_other_node() -> None:
    moves = list(itertools.islice(steps(7, 2, 1, {"kill", "lane-kill"}), 300))
    assert {move.fault.rpartition(".")[2] for move in moves} == {"", "kill", "lane-kill"}
    killed = [move for move in moves if move.fault.endswith(".kill")]
    both = [move for move in killed if move.beside]
    assert 0 < len(both) < len(killed)
    assert all(parse(move.beside) and move.fault.rpartition(".")[0] in move.beside for move in both)
    assert not any(move.beside for move in moves if move not in killed)


def test_direct_lanes_change_the_paths_of_a_plan_and_nothing_else() -> None:
    usual = plan(7, 500)
    moves = list(itertools.islice(steps(7, 3, 2, direct=True), 500))
    assert {move.path for move in usual} == {"local", "staged"}
    assert [move._replace(path="local") for move in moves] == [move._replace(path="local") for move in usual]
    straight = [move for move in moves if move.path == "direct"]
    assert 200 < len(straight) < 300
    assert any("lane" in move.fault for move in straight)
    assert not any("token" in move.fault for move in straight)
    assert all(a.path in (b.path, "direct") for a, b in zip(moves, usual, strict=True))


def test_what_leads_to_a_fault_is_a_fault() -> None:
    for phase, leads in LEADS.items():
        side, name = phase.split(".")
        assert any((one.side, one.phase) == (side, name) for one in every_fault())
        assert all(parse(lead) for lead in leads if lead)


def told(blocks: int, state_mb: int = 1) -> list[str]:
    world = twin(state_mb)
    found = []
    for _ in range(blocks):
        world.step()
        found.append(world.digest())
    return found


def test_a_world_is_told_in_order_by_several() -> None:
    story = Story(1)
    digests = told(5)
    for block in (1, 3, 4, 2, 5):
        story.add(block, digests[block - 1])
        assert story.gap == (block in (3, 4))
    assert (story.block, story.torn, story.twice) == (5, [], [])


@pytest.mark.parametrize("again", [2, 4])
def test_a_block_that_comes_twice_is_noticed(again: int) -> None:
    story = Story(1)
    digests = told(4)
    for block in (1, 2, 4):
        story.add(block, digests[block - 1])
    story.add(again, digests[again - 1])
    assert story.twice == [again]


@pytest.mark.parametrize("name", [region.name for region in regions(1)])
def test_one_wrong_byte_is_noticed_from_then_on(name: str) -> None:
    memory = {region.name: np.zeros(region.nbytes, np.uint8) for region in regions(1)}
    world, story = SoakWorld(memory), Story(1)
    for block in range(1, 8):
        world.step()
        if block == 5:
            memory[name][memory[name].size // 2] ^= 1
        story.add(block, world.digest())
    assert story.torn == [5, 6, 7]


def test_a_host_state_that_stayed_behind_is_noticed() -> None:
    memory = {region.name: np.zeros(region.nbytes, np.uint8) for region in regions(1)}
    world, story = SoakWorld(memory), Story(1)
    for block in range(1, 4):
        world.step()
        story.add(block, world.digest())
    stale = SoakWorld(memory, world.block, b"")
    stale.step()
    story.add(4, stale.digest())
    assert story.torn == [4]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        *((name, 1) for name in ("memory_files", "mappings", "leased", "executors", "keeper_files")),
        *(("outstanding_bytes", 1), ("threads", 3), ("children", 1), ("other_files", 4)),
        *(("sockets", 11), ("own_bytes", 97 << 20), ("free_bytes", -1)),
    ],
)
def test_growth_is_noticed(field: str, more: int) -> None:
    assert USAGE.grown(USAGE) == []
    (found,) = USAGE._replace(**{field: getattr(USAGE, field) + more}).grown(USAGE)
    assert field in found


def on_gpu(used_bytes: int, lanes: int) -> NodeView:
    """What is looked at of a node's view."""
    gpu = SimpleNamespace(kind="cuda", total_bytes=used_bytes + 7, free_bytes=7)
    kinds = ["tcp", *["direct"] * lanes]
    return cast(
        "NodeView", SimpleNamespace(devices=[gpu], lanes=[SimpleNamespace(kind=one) for one in kinds])
    )


def test_a_direct_lane_of_whatever_node_is_no_growth_on_a_device() -> None:
    before = device_bytes(on_gpu(1000 + 2 * LANE_DEVICE_BYTES, 1), [on_gpu(0, 1)])
    assert before == 1000
    assert device_bytes(on_gpu(1000 + 3 * LANE_DEVICE_BYTES, 2), [on_gpu(0, 1)]) == before
    assert device_bytes(on_gpu(1000 + 3 * LANE_DEVICE_BYTES, 1), [on_gpu(0, 2)]) == before
    assert device_bytes(on_gpu(1001 + 2 * LANE_DEVICE_BYTES, 1), [on_gpu(0, 1)]) == before + 1


def done(number: int, fault: str, result: report.Result, *, fired: bool = True) -> report.Done:
    step = Step(number, 0, 1, live=True, path="local", fault=fault, lead="", hold_s=0.4)
    return report.Done(step=step, result=result, code=None, reason=None, fired=fired and bool(fault), ms=1.0)


def test_moves_are_counted_by_fault_by_phase_and_by_path() -> None:
    moves = [
        done(1, "", "committed"),
        done(2, "source.copying.kill", "aborted"),
        done(3, "destination.copying.kill", "committed", fired=False),
        done(4, "destination.copying.delay=300", "rejected"),
    ]
    by_fault = report.count(moves, slice(2, 3))
    assert msgspec.to_builtins(by_fault["kill"]) == {
        "moves": 2,
        "fired": 1,
        "committed": 1,
        "aborted": 1,
        "rejected": 0,
    }
    assert list(by_fault) == ["delay", "kill"]
    assert {name: entry.moves for name, entry in report.count_paths(moves).items()} == {"local": 3}
    assert {name: entry.moves for name, entry in report.count(moves, slice(0, 2)).items()} == {
        "destination.copying": 2,
        "source.copying": 1,
    }


def test_a_seed_goes_on_where_an_earlier_soak_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Step] = []

    class Trial:
        """Takes every move, and nothing happens."""

        def __init__(self, *_: object) -> None: ...

        async def __aenter__(self) -> Trial:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def begin(self) -> None: ...

        async def take(self, step: Step) -> None:
            taken.append(step)

        def outcome(self, _: float) -> report.Outcome:
            counts = dict.fromkeys(report.Outcome.__struct_fields__, 0)
            return report.Outcome(**{**counts, "duration_s": 0.0, "by_fault": {}, "by_phase": {}})

    monkeypatch.setattr(soak, "Trial", Trial)
    assert soak.run(json=True, moves=4, seed=7, first=3) == 0
    assert taken == plan(7, 6)[2:]
