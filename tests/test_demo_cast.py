"""The demo's processes: heard to the end, found when they die, ended with every trace."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest
from threadpoolctl import threadpool_limits

from worldmove.demo.cast import Actor, Cast
from worldmove.demo.film import Film
from worldmove.demo.model import Model
from worldmove.demo.news import Generated
from worldmove.demo.player import action
from worldmove.demo.twin import SEED
from worldmove.demo.world import Size, World
from worldmove.errors import DeadlineError, ProcessLostError

TWIN = "worldmove.demo.twin"


def arguments(blocks: int) -> list[str]:
    return ["--state-mb", "4", "--blocks", str(blocks)]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_twin_generates_the_film_of_its_seed() -> None:
    heard = []
    twin = await Actor.start("twin", TWIN, *arguments(9))
    try:
        await twin.listen(lambda _, news: heard.append(news))
    finally:
        await twin.end()
    world = World(Model(), Size.of_mb(4), Size.of_mb(4).allocate())
    world.begin(SEED)
    blocks = [news for news in heard if isinstance(news, Generated)]
    assert [news.block for news in blocks] == list(range(1, 10))
    with threadpool_limits(1):  # the bits depend on BLAS's threads, and the twin has one
        film = [world.step(action(news.block).keys).tobytes() for news in blocks]
    assert film == [news.pictures for news in blocks]
    assert twin.block == len(twin.block_ms) == 9


async def test_a_cast_gathers_the_film_and_ends_its_actors() -> None:
    with Film() as film:
        async with Cast(film) as cast:
            actor = await cast.enter("A", TWIN, *arguments(100_000))
            await cast.until(lambda: film.last >= 3, "block 3", 30)
            assert cast.owner is actor
            pid = actor.pid
        assert gone(pid)
        assert film.missing == []
        assert set(film.nodes.values()) == {"A"}


async def test_what_never_happens_is_a_deadline() -> None:
    with Film() as film:
        async with Cast(film) as cast:
            await cast.enter("A", TWIN, *arguments(1))
            with pytest.raises(DeadlineError, match="the impossible"):
                await cast.until(lambda: False, "the impossible", 0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_actor_is_found(number: signal.Signals) -> None:
    with Film() as film:
        async with Cast(film) as cast:
            actor = await cast.enter("A", TWIN, *arguments(100_000))
            await cast.until(lambda: film.last >= 1, "block 1", 30)
            os.kill(actor.pid, number)
            with pytest.raises(ProcessLostError, match="node A"):
                await cast.until(lambda: False, "the impossible", 30)


async def test_a_stopped_actor_is_ended_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr("worldmove.demo.cast.END_TIMEOUT_S", 0.2)
    with Film() as film:
        async with Cast(film) as cast:
            actor = await cast.enter("A", TWIN, *arguments(100_000))
            await cast.until(lambda: film.last >= 1, "block 1", 30)
            os.kill(actor.pid, signal.SIGSTOP)
        assert gone(actor.pid)


async def test_a_cast_that_is_cancelled_leaves_nothing() -> None:
    started: asyncio.Queue[int] = asyncio.Queue()

    async def show() -> None:
        with Film() as film:
            async with Cast(film) as cast:
                started.put_nowait((await cast.enter("A", TWIN, *arguments(100_000))).pid)
                await cast.until(lambda: False, "the impossible", 60)

    task = asyncio.create_task(show())
    pid = await started.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pid)


def test_an_actor_dies_with_its_parent() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from worldmove.demo.cast import Cast\n"
        "from worldmove.demo.film import Film\n"
        "async def main():\n"
        "    async with Cast(film := Film()) as cast:\n"
        f"        actor = await cast.enter('A', {TWIN!r}, *{arguments(100_000)!r})\n"
        "        await cast.until(lambda: film.last > 0, 'block 1', 30)\n"
        "        print(actor.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        actor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([actor], [], [], 10)[0], "the actor outlived its parent"
    finally:
        os.close(actor)
