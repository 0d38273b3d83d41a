"""How lanes end: cleanly, by signals, by cancellation, by faults, and with their node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import numpy as np
import pytest

from tests.transport_kit import (
    MB,
    MOVE,
    Arena,
    alive,
    cut,
    lanes,
    lease_pair,
    mapped,
    until_gone,
    whole,
)
from worldmove import ipc
from worldmove.errors import (
    DeadlineError,
    FramingError,
    ProcessLostError,
    RejectedError,
    TransportError,
    WorldMoveError,
)
from worldmove.manifest import Span
from worldmove.transport.lane_messages import Command, Failed, Report
from worldmove.transport.lease import Lane
from worldmove.transport.pool import LanePool, mint_token


@pytest.fixture
async def pool() -> AsyncIterator[LanePool]:
    async with lanes(stall_ms=1000) as made:
        yield made


@pytest.fixture
async def keeping() -> AsyncIterator[LanePool]:
    """A pool whose released lanes live on."""
    async with lanes(stall_ms=1000, spare=1) as made:
        yield made


@pytest.mark.parametrize("when", ["mapping", "serving"])
async def test_a_lane_that_stands_still_while_it_is_told_something_costs_little_time(when: str) -> None:
    """Nobody watches its beats while it maps: its answer is due by the stall deadline and its bytes' time."""
    memory = Arena(4 * MB, 1)
    async with lanes(stall_ms=400, spare=1) as pool:
        ((pid, _, _),) = pool.lanes
        async with asyncio.timeout(20):
            extents, regions = [(memory.fd, memory.nbytes)], whole(memory)
            if when == "mapping":
                os.kill(pid, signal.SIGSTOP)
                with pytest.raises(DeadlineError, match="did not answer"):
                    await pool.lease("move", extents, regions, writable=False)
            else:
                lane = await pool.lease("move", extents, regions, writable=False)
                os.kill(pid, signal.SIGSTOP)
                with pytest.raises(DeadlineError):
                    await lane.serve(mint_token())
                await lane.gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["source", "destination"])
async def test_the_loss_of_either_lane_is_noticed_by_the_other(
    pool: LanePool, victim: str, number: signal.Signals
) -> None:
    source, destination = Arena(64 * MB, 1), Arena(64 * MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    struck, survivor = (giver, taker) if victim == "source" else (taker, giver)
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(64 * MB, 4 * MB)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
    os.kill(struck.pid, number)
    more = [asyncio.create_task(taker.pull(spans)) for _ in range(3) for spans in cut(64 * MB, 4 * MB)]
    try:
        async with asyncio.timeout(20):
            assert isinstance(await survivor.lost, WorldMoveError)
            outcome = await asyncio.gather(*pulls, *more, return_exceptions=True)
            assert all(isinstance(item, int | WorldMoveError) for item in outcome)
            assert any(isinstance(item, WorldMoveError) for item in outcome)
            assert isinstance(await struck.lost, WorldMoveError)
    finally:
        for lane in (giver, taker):
            lane.abort()
            await lane.gone()


async def test_after_gone_no_byte_lands(pool: LanePool) -> None:
    source, destination = Arena(128 * MB, 1), Arena(128 * MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(128 * MB, 4 * MB)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
    taker.abort()
    await taker.gone()
    assert not alive(taker.pid)
    destination.bytes[:] = 0xA5
    for item in await asyncio.gather(*pulls, return_exceptions=True):
        assert isinstance(item, int | ProcessLostError)
    assert isinstance(await giver.lost, TransportError)
    await giver.gone()
    assert (destination.bytes == 0xA5).all()


async def test_a_cancelled_pull_goes_on_and_release_waits_for_it(keeping: LanePool) -> None:
    source, destination = Arena(32 * MB, 1), Arena(32 * MB)
    giver, taker = await lease_pair(keeping, source, destination, whole(source))
    pull = asyncio.create_task(taker.pull([Span(0, 0, 32 * MB)]))
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await taker.release()
    assert np.array_equal(source.bytes, destination.bytes)
    await giver.release()
    assert not taker.lost.done()
    assert not giver.lost.done()


async def test_a_source_may_end_first_and_its_peer_learns_it(keeping: LanePool) -> None:
    source, destination = Arena(32 * MB, 1), Arena(32 * MB)
    giver, taker = await lease_pair(keeping, source, destination, whole(source))
    pulls = [asyncio.create_task(taker.pull(spans)) for spans in cut(32 * MB, MB)]
    await pulls[0]
    await giver.release()
    # The peer ends with pulls under way; its reset may overtake its confirmation, and then so does this lane.
    assert not alive(giver.pid) or not mapped(giver.pid)
    for outcome in await asyncio.gather(*pulls, return_exceptions=True):
        assert outcome == MB or isinstance(outcome, WorldMoveError)
    taker.abort()
    await taker.gone()


async def test_cancelled_commands_end_their_lane_and_leave_nothing(pool: LanePool) -> None:
    source = Arena(MB, 1)
    for steps in range(0, 12, 2):
        leasing = asyncio.create_task(pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=False))
        for _ in range(steps):
            await asyncio.sleep(0)
        leasing.cancel()
        with suppress(asyncio.CancelledError):
            (await leasing).abort()
    taker = await pool.lease(MOVE, [(source.fd, MB)], whole(source), writable=True)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        waiting = asyncio.create_task(taker.connect("127.0.0.1", port, mint_token(), 60_000))
        called, _ = await asyncio.get_running_loop().run_in_executor(None, mute.accept)
        with called:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    await taker.gone()
    with pytest.raises(ProcessLostError):
        await taker.serve(mint_token())


async def test_release_of_a_broken_pair_leaves_nothing_mapped(pool: LanePool) -> None:
    source, destination = Arena(MB, 1), Arena(MB)
    giver, taker = await lease_pair(pool, source, destination, whole(source))
    taker.abort()
    await giver.release()
    assert not alive(giver.pid)
    await taker.release()
    assert not alive(taker.pid)


async def test_a_pool_has_a_limit_and_replaces_what_it_lost() -> None:
    events: list[tuple[str, object]] = []
    ready = asyncio.Event()

    def note(name: str, facts: dict[str, object]) -> None:
        events.append((name, facts["pid"]))
        if sum(kind == "lane-started" for kind, _ in events) == 2:
            ready.set()

    async with lanes(spare=1, limit=2, on_event=note) as pool:
        ((pid, port, leased),) = pool.lanes
        assert port > 0
        assert leased is None
        os.kill(pid, signal.SIGKILL)
        await ready.wait()
        arena = Arena(4096)
        first = await pool.lease("m-1", [(arena.fd, 4096)], whole(arena), writable=False)
        second = await pool.lease("m-2", [(arena.fd, 4096)], whole(arena), writable=False)
        assert pid not in (first.pid, second.pid)
        with pytest.raises(RejectedError, match="all 2 lanes"):
            await pool.lease("m-3", [(arena.fd, 4096)], whole(arena), writable=False)
        await first.release()
        third = await pool.lease("m-3", [(arena.fd, 4096)], whole(arena), writable=False)
        assert third.pid == first.pid
    assert [name for name, _ in events].count("lane-lost") >= 1
    for _, number in events:
        assert not alive(int(str(number)))
    with pytest.raises(ProcessLostError, match="closed"):
        await pool.lease("m-4", [(arena.fd, 4096)], whole(arena), writable=False)


async def test_lanes_do_not_outlive_their_node() -> None:
    program = (
        "import asyncio, sys\n"
        "from worldmove.transport.pool import LanePool\n"
        "async def main():\n"
        "    pool = LanePool(spare=2)\n"
        "    await pool.start()\n"
        "    sys.stdout.write(' '.join(str(pid) for pid, _, _ in pool.lanes) + '\\n')\n"
        "    sys.stdout.flush()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    pids = [int(word) for word in (await node.stdout.readline()).split()]
    assert len(pids) == 2
    node.kill()
    await node.wait()
    async with asyncio.timeout(10):
        for pid in pids:
            await until_gone(pid)


@pytest.mark.parametrize(
    ("fault", "damaged"),
    [("lane-flip-once", [1, 0]), ("lane-flip-always", [2, 2])],
)
async def test_faults_damage_what_is_sent_and_never_the_source(fault: str, damaged: list[int]) -> None:
    source, destination = Arena(5 * MB, 1), Arena(5 * MB)
    before = source.bytes.copy()
    async with lanes(faults=fault) as pool:
        _, taker = await lease_pair(pool, source, destination, whole(source))
        for count in damaged:
            await taker.pull([Span(0, 0, 5 * MB)])
            assert int(np.count_nonzero(source.bytes != destination.bytes)) == count
        assert np.array_equal(source.bytes, before)


@pytest.mark.parametrize(
    ("fault", "kind"), [("lane-short-once", TransportError), ("lane-stall", DeadlineError)]
)
async def test_faults_that_break_a_transfer_are_found(fault: str, kind: type[WorldMoveError]) -> None:
    source, destination = Arena(9 * MB, 1), Arena(9 * MB)
    async with lanes(faults=fault, stall_ms=500) as pool:
        _, taker = await lease_pair(pool, source, destination, whole(source))
        with pytest.raises(kind):
            await taker.pull([Span(0, 0, 9 * MB)])
        await taker.lost


class Dying:
    """A lane's process that says why it ends, and has ended before anybody could read that."""

    pid = 7
    returncode: int | None = None

    def __init__(self, sock: socket.socket, *, unread: bool) -> None:
        self._unread = unread
        self._channel: ipc.Channel[Command] = ipc.Channel(sock, Command)
        self.end = asyncio.Event()

    async def wait(self) -> int:
        await self.end.wait()
        self.speak()
        self.returncode = 1
        return 1

    def speak(self) -> None:
        """Its last words."""
        if self._channel.fileno() < 0:
            return
        if not self._unread:
            while self._channel.receive_nowait() is not None:
                pass
        self._channel.send_nowait(Failed(FramingError.code, "a chunk of 7 bytes came where 8 were pulled"))
        self._channel.close()

    def kill(self) -> None:
        self.end.set()


@pytest.mark.parametrize("unread", [False, True], ids=["all-read", "commands-unread"])
async def test_every_open_pull_is_told_why_the_lane_ended(unread: bool) -> None:
    """Also where the end is noticed before the reason is read; the kernel tells of unread commands first."""
    mine, its = ipc.socketpair()
    process = Dying(its, unread=unread)
    lane = Lane(cast("asyncio.subprocess.Process", process), ipc.Channel(mine, Report), 5.0)
    pulls = [asyncio.create_task(lane.pull([Span(0, 0, 8)])) for _ in range(3)]
    await asyncio.sleep(0)
    process.end.set()
    for outcome in await asyncio.gather(*pulls, return_exceptions=True):
        assert isinstance(outcome, FramingError), outcome
    await lane.gone()
    assert "a chunk of 7 bytes" in lane.lost.result().message


async def test_a_pull_that_can_not_be_sent_any_more_is_told_why_the_lane_ended() -> None:
    mine, its = ipc.socketpair()
    process = Dying(its, unread=True)
    lane = Lane(cast("asyncio.subprocess.Process", process), ipc.Channel(mine, Report), 5.0)
    process.speak()
    with pytest.raises(FramingError, match="a chunk of 7 bytes"):
        await lane.pull([Span(0, 0, 8)])
    await lane.gone()
