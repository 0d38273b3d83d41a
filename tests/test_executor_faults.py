"""Executors that are cancelled, killed, stopped, aborted, orphaned, or can't be started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from executor_kit import MB, Arena, Events, executors, expected
from memory_kit import ended, open_descriptors, pattern

from worldmove.digest import LeafTable
from worldmove.errors import ProcessLostError, ValidationError
from worldmove.executor.pool import CopyPiece, ExecutorPool, Piece

OWNER = Path(__file__).with_name("executor_owner.py")


@pytest.fixture
async def pool() -> AsyncIterator[ExecutorPool]:
    async with executors(2) as made:
        yield made


async def test_after_a_cancelled_job_nothing_is_written_any_more(pool: ExecutorPool) -> None:
    source, target = await Arena(192 * MB).attach(pool), await Arena(192 * MB).attach(pool)
    await pool.fill(source.key, 0xFF)
    for turns in range(4):
        copying = asyncio.create_task(pool.copy([CopyPiece(source.key, 0, target.key, 0, source.nbytes)]))
        for _ in range(1 + turns * 4):
            await asyncio.sleep(0)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        await pool.settle(target.key)
        target.map[:] = bytes(target.nbytes)
        await pool.settle(source.key)
        # Whatever comes after in the same executors comes after all of the cancelled job.
        await pool.copy([CopyPiece(source.key, 0, source.key, 1, 1)] * 8)
        assert target.map[:] == bytes(target.nbytes)
    source.close()
    target.close()


async def test_an_error_of_the_callback_goes_to_the_caller(pool: ExecutorPool) -> None:
    arena = await Arena(64 * MB).attach(pool)
    table = LeafTable(1024)
    key = await pool.attach(table.fd, table.nbytes, writable=True)

    def fail(_: list[Piece]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await pool.digest(key, 0, [Piece(arena.key, 0, 64 * MB, 65536, 0)], on_part=fail)
    await pool.settle(arena.key)
    arena.close()
    table.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_killed_executor_fails_its_jobs_and_is_replaced(count: int) -> None:
    events = Events()
    pool = ExecutorPool(2, on_event=events)
    await pool.start()
    arena = await Arena(96 * MB).attach(pool)
    table = LeafTable(arena.nbytes // 8192)
    key = await pool.attach(table.fd, table.nbytes, writable=True)
    arena.map[: 1 << 20] = pattern(1 << 20)
    everything = [Piece(arena.key, 0, arena.nbytes, 8192, 0)]
    victims = pool.pids[:count]
    for pid in victims:  # or else they may have done all of it before this process comes to kill them
        os.kill(pid, signal.SIGSTOP)
    digesting = asyncio.create_task(pool.digest(key, 1, everything))
    await asyncio.sleep(0)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError):
        await digesting
    # By then the dead one is reaped, and settle says when the others are done.
    await pool.settle(arena.key)
    await events.wait("executor-started", 2 + count)
    assert len(pool.pids) == 2
    assert not set(victims) & set(pool.pids)
    await pool.digest(key, 1, everything)
    assert table.slice(0, table.count) == expected(bytes(arena.map), 8192, 1)
    assert events.names.count("executor-lost") == count
    await pool.close()
    arena.close()
    table.close()


async def test_work_waits_for_the_replacement() -> None:
    events = Events()
    pool = ExecutorPool(1, on_event=events)
    await pool.start()
    arena = await Arena(MB).attach(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    await events.wait("executor-lost", 1)
    assert pool.pids == []
    await pool.fill(arena.key, 5)
    assert arena.map[:] == b"\x05" * MB
    await pool.close()
    arena.close()


async def test_who_asks_for_memory_waits_for_the_replacement() -> None:
    """A standby that registers just after a GPU's executor died must not be sent away."""
    pool = ExecutorPool(1)
    await pool.start()
    os.kill(pool.pids[0], signal.SIGKILL)
    while pool.pids:  # noqa: ASYNC110 - the executor is there until its end is seen
        await asyncio.sleep(0.001)
    with pytest.raises(ProcessLostError):
        await pool.measure()
    with pytest.raises(ValidationError, match="knows no Allocate"):
        await pool.allocate(1)
    await pool.close()
    with pytest.raises(ProcessLostError):
        await pool.allocate(1)


async def test_a_stopped_executor_is_found_and_ended() -> None:
    events = Events()
    pool = ExecutorPool(1, stall_s=0.4, on_event=events)
    await pool.start()
    arena = await Arena(MB).attach(pool)
    stopped = pool.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(ProcessLostError):
        await pool.fill(arena.key, 5)
    await ended(stopped)
    await pool.fill(arena.key, 6)
    assert arena.map[:] == b"\x06" * MB
    await pool.close()
    arena.close()


async def test_a_place_where_no_executor_lives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    pool = ExecutorPool(1, on_event=events)
    await pool.start()
    arena = await Arena(MB).attach(pool)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(pool.pids[0], signal.SIGKILL)
    await events.wait("executor-lost", 1)
    with pytest.raises(ProcessLostError):
        await pool.fill(arena.key, 5)
    assert events.names[-1] == "executor-given-up"
    with pytest.raises(ProcessLostError):
        await pool.fill(arena.key, 5)
    await pool.detach(arena.key)
    await pool.close()
    arena.close()


async def test_a_pool_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = open_descriptors()
    pool = ExecutorPool(2)
    with pytest.raises(ProcessLostError):
        await pool.start()
    with pytest.raises(ProcessLostError):
        await pool.region_digests(await pool.attach(0, 1, writable=False), [(0, 0)])
    await pool.close()
    assert open_descriptors() <= before


async def test_a_cancelled_start_leaves_nothing() -> None:
    before = open_descriptors()
    for turns in (1, 5, 20):
        pool = ExecutorPool(2)
        task = asyncio.create_task(pool.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.close()
    assert open_descriptors() <= before


async def test_closing_finishes_what_is_there() -> None:
    pool = ExecutorPool(2)
    await pool.start()
    pids = pool.pids
    arena = await Arena(64 * MB).attach(pool)
    filling = asyncio.create_task(pool.fill(arena.key, 7))
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(ProcessLostError):
        await pool.fill(arena.key, 8)
    await filling
    await pool.close()
    assert arena.map[:] == b"\x07" * arena.nbytes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ProcessLostError):
        await pool.attach(arena.fd, 1, writable=True)
    arena.close()


async def test_aborting_does_not_wait() -> None:
    pool = ExecutorPool(2)
    await pool.start()
    arena = await Arena(256 * MB).attach(pool)
    jobs = [asyncio.create_task(pool.fill(arena.key, byte)) for byte in range(1, 5)]
    await asyncio.sleep(0)
    pool.abort()
    assert pool.pids == []
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(outcome, ProcessLostError) for outcome in outcomes)
    await pool.settle(arena.key)
    arena.map[:] = bytes(arena.nbytes)
    await pool.close()
    assert arena.map[:] == bytes(arena.nbytes)
    arena.close()


async def test_executors_die_with_their_node() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, OWNER, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    try:
        pids = [int(pid) for pid in (await owner.stdout.readline()).split()]
        assert len(pids) == 2
        assert all(os.getsid(pid) == pid for pid in pids)
        polite = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
        assert all(os.getpriority(os.PRIO_PROCESS, pid) == polite for pid in pids)
        # Stopped, so that only the kernel can end it: it could not notice its closed socket.
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        owner.kill()
        await owner.wait()
    await asyncio.gather(*(ended(pid) for pid in pids))
