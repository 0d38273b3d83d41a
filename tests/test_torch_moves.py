"""Nested states of PyTorch that move between real nodes, compared bit for bit with a twin that stays."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import Fleet
from fleet_node import PATIENCE_S, until

from worldmove.errors import ConflictError, ValidationError
from worldmove.worker import SessionEndedError, SessionMoved

torch = pytest.importorskip("torch", reason="torch is not installed: pip install worldmove[torch]")

from torch_kit import assert_same, make_state, step  # noqa: E402

from worldmove.torch import TorchStandby, TorchWorker, TorchWorld, state_regions  # noqa: E402

TIMES = {"model": "torch", "block_ms": 20.0, "horizon_ms": 10_000.0}
WORK_S = 0.003
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B") as fleet:
        yield fleet


@pytest.fixture
def crew() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Twin:
    """The same state, alone."""

    def __init__(self) -> None:
        self.state = make_state()
        self.block = 0

    def to(self, block: int) -> Any:
        while self.block < block:
            step(self.state)
            self.block += 1
        return self.state


def play(world: TorchWorld, blocks: int = 2_000, change: Callable[[Any], None] = step, **more: Any) -> Any:
    """Generates until the world has gone (then `None`), or for so many blocks: then returns the state."""
    state = world.state
    with contextlib.suppress(SessionMoved):
        for _ in range(blocks):
            with world.block():
                change(state)
                time.sleep(WORK_S)
            world.boundary(state, **more)
        return state
    return None


def worker(fleet: Fleet, node: str) -> TorchWorker:
    return TorchWorker(fleet[node].url)


def arriving(crew: ThreadPoolExecutor, standby: TorchStandby) -> Future[TorchWorld | None]:
    return crew.submit(standby.wait, PATIENCE_S)


def arrived(future: Future[TorchWorld | None]) -> TorchWorld:
    world = future.result()
    assert world is not None
    return world


def dropped(fleet: Fleet, standby: str) -> bool:
    """Ends a standby; false while an aborted move still cleans up after itself."""
    try:
        fleet["B"].client.drop_standby(standby)
    except ConflictError:
        return False
    return True


@pytest.mark.parametrize("path", ["local", "staged"])
@pytest.mark.parametrize("place", [True, False])
def test_there_and_back_while_it_generates(
    fleet: Fleet, crew: ThreadPoolExecutor, path: str, place: bool
) -> None:
    twin, name = Twin(), fleet.unique("w")
    handed = make_state()
    with worker(fleet, "A") as at_a, worker(fleet, "B") as at_b:
        world = at_a.register(name, handed, place=place, **TIMES)
        assert_same(world.state, twin.state)
        assert (world.state is handed) == (not place)
        assert world.state["noise"] is handed["noise"]
        for here, there in (("A", at_b), ("B", at_a), ("A", at_b)):
            waiting = there.standby(make_state(seed=99), **TIMES)
            coming = arriving(crew, waiting)
            going = crew.submit(play, world)
            receipt = fleet.moved(name, "B" if here == "A" else "A", path=path)
            assert going.result() is None
            world = arrived(coming)
            assert world.block_number == receipt.block
            assert_same(world.state, twin.to(world.block_number))
            assert waiting.state["kv"][0]["k"].data_ptr() == world.state["kv"][0]["k"].data_ptr()
            play(world, 3)
            assert_same(world.state, twin.to(world.block_number))
        world.close()


def test_a_state_that_outgrows_its_spill(fleet: Fleet, crew: ThreadPoolExecutor) -> None:
    name = fleet.unique("w")

    def grow(state: dict[str, Any]) -> None:
        state["n"] += 1
        state["all"] = torch.cat([state["all"], torch.full((100,), float(state["n"]))])

    with worker(fleet, "A") as at_a, worker(fleet, "B") as at_b:
        first = {"n": 0, "all": torch.zeros(1), "k": torch.arange(4)}
        world = at_a.register(name, first, spill_bytes=512, **TIMES)
        play(world, 5, grow)
        coming = arriving(crew, standby := at_b.standby(first, spill_bytes=512, **TIMES))
        going = crew.submit(play, world, change=grow)
        ended = fleet.move(name, "B")
        assert (ended.state, ended.code) == ("aborted", "revised")
        assert not going.done()
        until(lambda: dropped(fleet, standby.id), "the standby is nobody's again")
        with pytest.raises(SessionEndedError):
            coming.result()
        # The regions as they are since: the world is still generating, in a thread of its own.
        again = arriving(crew, at_b.standby(regions=world.regions, **TIMES))
        fleet.moved(name, "B")
        assert going.result() is None
        here = arrived(again)
        count = here.block_number
        wanted = torch.cat([torch.zeros(1), *(torch.full((100,), float(n + 1)) for n in range(count))])
        assert here.state["n"] == count
        assert torch.equal(here.state["all"], wanted)
        play(here, 2, grow)
        assert here.refit(here.state) is False
        here.close()


def test_refit_makes_room_before_a_move_needs_it(fleet: Fleet, crew: ThreadPoolExecutor) -> None:
    name = fleet.unique("w")
    with worker(fleet, "A") as at_a, worker(fleet, "B") as at_b:
        world = at_a.register(name, {"k": torch.zeros(3)}, spill_bytes=0, **TIMES)
        state = {**world.state, "late": torch.arange(1000)}
        with world.block(), pytest.raises(ConflictError):
            world.refit(state)
        world.boundary(state)
        assert world.refit(state) is True
        assert world.refit(state) is False
        coming = arriving(crew, at_b.standby(regions=world.regions, **TIMES))
        world.state = state
        going = crew.submit(play, world, change=lambda state: state["k"].add_(1))
        fleet.moved(name, "B")
        assert going.result() is None
        here = arrived(coming)
        assert torch.equal(here.state["late"], torch.arange(1000))
        assert torch.equal(here.state["k"], torch.full((3,), here.block_number - 1.0))
        here.close()


@pytest.mark.parametrize("lasting", [False, True], ids=["for-one-block", "until-the-move-ends"])
def test_a_state_that_cannot_be_moved(fleet: Fleet, crew: ThreadPoolExecutor, lasting: bool) -> None:
    """The world goes on where it is; the move takes the next state that can be, or is given up."""
    name = fleet.unique("w")
    refused: list[str] = []
    ended = threading.Event()

    def play_on(world: TorchWorld) -> None:
        state, odd = world.state, {"k": world.state["k"], "odd": {1, 2}}
        with contextlib.suppress(SessionMoved):
            for _ in range(20_000):
                with world.block():
                    state["k"] += 1
                    time.sleep(WORK_S)
                good = ended.is_set() if lasting else bool(refused)
                try:
                    world.boundary(state if good else odd)
                except ValidationError as error:
                    refused.append(error.message)

    with worker(fleet, "A") as at_a, worker(fleet, "B") as at_b:
        world = at_a.register(name, {"k": torch.zeros(8)}, **TIMES)
        coming = arriving(crew, at_b.standby(regions=world.regions, **TIMES))
        going = crew.submit(play_on, world)
        view = fleet.move(name, "B", horizon_ms=1_000, deadline_ms=3_000)
        ended.set()
        assert view.state == ("aborted" if lasting else "released"), view.reason
        if lasting:
            until(lambda: fleet["B"].view().standbys[0].state == "attached", "the standby is nobody's again")
            fleet.moved(name, "B")
        going.result()
        assert "state['odd'] is a builtins.set" in refused[0]
        here = arrived(coming)
        assert torch.equal(here.state["k"], torch.full((8,), float(here.block_number)))
        here.close()


def test_a_world_that_was_kept_is_taken_up_by_another_worker(fleet: Fleet) -> None:
    twin, name = Twin(), fleet.unique("w")
    with worker(fleet, "A") as at_a:
        world = at_a.register(name, make_state(), **TIMES)
        play(world, 4, keep=True)
        world.close()
        taken = at_a.attach(name)
        assert taken.block_number == 4
        assert_same(taken.state, twin.to(4))
        play(taken, 2, keep=True)
        assert_same(taken.state, twin.to(6))
        taken.close()


def test_two_ranks(fleet: Fleet, crew: ThreadPoolExecutor) -> None:
    twin, name = Twin(), fleet.unique("w")
    others = state_regions(make_state(), rank=1)
    with worker(fleet, "A") as at_a, worker(fleet, "B") as at_b:
        first = at_a.register(name, make_state(), others=others, **TIMES)
        ranks = [first, at_a.join(first.world.tickets[0], make_state())]
        one = at_b.standby(make_state(), others=others, **TIMES)
        two = at_b.join_standby(one.standby.tickets[0], first.regions, rank=1, template=make_state())
        coming = [arriving(crew, one), arriving(crew, two)]
        going = [crew.submit(play, rank) for rank in ranks]
        fleet.moved(name, "B")
        assert [future.result() for future in going] == [None, None]
        for world in map(arrived, coming):
            assert_same(world.state, twin.to(world.block_number))
            world.close()


def test_the_example_of_the_documentation(fleet: Fleet, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "torch.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = tmp_path / "world.py"
    program.write_text(code)

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(program), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start("play", fleet["A"].url) as playing, start("follow", fleet["B"].url, "3") as following:
        assert playing.stdout is not None
        assert following.stdout is not None
        assert playing.stdout.readline() == "registered\n"
        assert following.stdout.readline() == "waiting\n"
        fleet.moved("example", "B")
        assert playing.stdout.read() == "moved to B\n"
        shown = following.stdout.read()
    assert (playing.returncode, following.returncode) == (0, 0)
    with start("alone", shown.split()[1]) as alone:
        assert alone.stdout is not None
        assert alone.stdout.read() == shown
