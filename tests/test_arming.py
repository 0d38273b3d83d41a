"""Work that begins by itself when a world stands: executors of imagined GPUs, and a real page."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from gpu_kit import GPUS

from worldmove import arming
from worldmove.arming import Armed, Sign
from worldmove.config import Settings
from worldmove.digest import LeafTable
from worldmove.errors import FramingError, TransportError, ValidationError
from worldmove.executor import signs
from worldmove.executor.messages import Armed as ArmedRequest
from worldmove.executor.messages import Digest, Stop
from worldmove.executor.pool import ExecutorPool
from worldmove.hosting.memory import Holding, take
from worldmove.inbound import Inbound
from worldmove.ipc import close_all, sealed_memfd
from worldmove.manifest import Manifest, Region
from worldmove.messages import TablePart
from worldmove.node.devices import Devices
from worldmove.page.control import (
    NEVER,
    ControlPage,
    RankState,
    create_page,
)
from worldmove.page.looking import open_to_look, stop_words
from worldmove.paths import LocalPath
from worldmove.reading import Reader

GPU = GPUS[0]
SEED = 77
REGIONS = tuple(Region(f"r{n}", "uint8", (30_000 + n,), device=GPU) for n in range(6))


class Page:
    """A control page whose ranks this test plays."""

    def __init__(self, ranks: int = 2) -> None:
        self.fd = create_page(ranks, 100, incarnation=1, epoch=1)
        self.page = ControlPage(self.fd)

    def run(self, rank: int, block: int) -> None:
        self.page.publish(rank, block)
        self.page.set_state(rank, RankState.RUNNING)

    def stand(self, rank: int, block: int) -> None:
        self.page.publish(rank, block)
        self.page.set_state(rank, RankState.STOPPED)

    def close(self) -> None:
        self.page.close()
        os.close(self.fd)


@pytest.fixture
def page() -> contextlib.closing[Page]:
    return contextlib.closing(Page())


def test_a_page_shows_the_stop_only_when_every_rank_stands_where_it_was_told_to(
    page: contextlib.closing[Page],
) -> None:
    with page as made:
        looking = open_to_look(made.fd)
        words = stop_words(looking)
        sign = signs.Sign(looking, words.nbytes)
        stop = Stop(1, words.pause_at, words.ranks, RankState.STOPPED)
        sign.check(stop)
        with pytest.raises(ValidationError, match="outside"):
            sign.check(stop._replace(ranks=((10**6, 0),)))
        made.stand(0, 5)
        made.stand(1, 5)
        assert made.page.pause_at == NEVER
        assert sign.block(stop) is None
        made.page.pause_at = 6
        made.run(0, 6)
        assert sign.block(stop) is None
        made.stand(0, 6)
        assert sign.block(stop) is None
        made.stand(1, 7)
        assert sign.block(stop) is None
        made.page.pause_at = 7
        assert sign.block(stop) is None
        made.stand(0, 7)
        assert sign.block(stop) == 7
        sign.close()
        with pytest.raises(OSError, match=r"Permission|permitted"):
            mmap.mmap(looking, words.nbytes)
        os.close(looking)


def test_only_a_control_page_is_looked_at() -> None:
    for size in (64, 4096, 3 * 4096):
        fd = sealed_memfd("noise", size)
        with pytest.raises(FramingError):
            stop_words(fd)
        with pytest.raises(TransportError):
            signs.Sign(fd, size + 4096)
        os.close(fd)


def test_what_waits_too_long_or_for_nothing_is_given_up(
    page: contextlib.closing[Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = signs.Waiting()
    with page as made:
        words = stop_words(made.fd)
        stop = Stop(9, words.pause_at, words.ranks, RankState.STOPPED)
        requests = [ArmedRequest(call, stop, Digest(call, 1, 2, ())) for call in range(3)]
        with pytest.raises(ValidationError, match="not watched"):
            waiting.arm(requests[0])
        waiting.watch(9, made.fd, words.nbytes)
        waiting.arm(requests[0])
        assert (waiting.late(), waiting.due(), bool(waiting)) == ([], [], True)
        assert waiting.take(8) == []
        assert waiting.take(9) == [requests[0]]
        monkeypatch.setattr(signs, "ARMED_S", -1.0)
        waiting.arm(requests[1])
        assert (waiting.late(), bool(waiting)) == ([requests[1]], False)
        waiting.arm(requests[2])
        assert waiting.forget(9)
        assert not waiting.forget(9)
        assert waiting.due() == []


class Rig:
    """A session's memory on an imagined GPU, a second one beside it, and a page."""

    def __init__(self, devices: Devices, holdings: list[Holding], page: Page) -> None:
        self.devices = devices
        self.pool: ExecutorPool = devices.executors.gpus[GPU]
        self.theirs, self.mine = (Reader(holding, devices.executors, SEED) for holding in holdings)
        self.page = page
        self.paths: list[LocalPath] = []

    def write(self, byte: int) -> None:
        """The world's memory, all of it."""
        memory = self.theirs.memory
        for fd, extent in zip(memory.fds, memory.extents, strict=True):
            with mmap.mmap(fd, extent.nbytes) as view:
                view[:] = bytes([byte]) * extent.nbytes

    async def asked(self) -> None:
        """The executor has looked at everything that it was asked before."""
        await self.pool.measure()

    async def reading(self, table: LeafTable, *, parts: int = 1) -> Armed:
        """A reading of the world's memory, armed."""
        spans = self.theirs.all_spans()
        plan = self.theirs.plan_read(table, spans)
        if parts > 1:
            plan.parts[0][1][:] = [
                part
                for span in spans
                for _, some in self.theirs.plan_read(table, [span]).parts
                for part in some
            ]
            for part in plan.parts[0][1]:
                plan.leaves[id(part.pieces)] = [(piece.first_leaf, piece.leaves) for piece in part.pieces]
        return Armed(plan, await Sign.open(self.page.fd, [self.pool]))


@pytest_asyncio.fixture
async def rig(imagined: None, tmp_path: Path) -> AsyncIterator[Rig]:
    settings = Settings(name="A", ledger="sqlite:///unused", run_dir=tmp_path, gpus=GPU, executors=1)
    devices = Devices(settings, lambda _event, _facts: None)
    await devices.start()
    manifest = Manifest("m", REGIONS, block_ms=20.0, horizon_ms=50.0)
    holdings = [await take(manifest, devices, name) for name in ("theirs", "mine")]
    made = Rig(devices, holdings, Page())
    await made.theirs.open(writable=False)
    await made.mine.open()
    try:
        yield made
    finally:
        for path in made.paths:  # or the collector would tell how it ended, in the middle of another test
            path.abort()
            await path.quiet()
        await made.theirs.close()
        await made.mine.close()
        made.page.close()
        for holding in holdings:
            close_all(holding.fds)
        await devices.close()


async def test_armed_work_begins_at_the_stop_and_not_before(rig: Rig) -> None:
    rig.write(1)
    table, plain = await rig.theirs.table(), await rig.theirs.table()
    armed = await rig.reading(table)
    armed.start()
    await rig.asked()
    rig.page.page.pause_at = 5
    rig.page.stand(0, 5)
    await rig.asked()
    assert not table.known.any()
    assert armed.began is None
    rig.write(2)
    before = time.monotonic()
    rig.page.stand(1, 5)
    assert await armed.stood_at(5)
    assert not await armed.stood_at(4)
    assert before <= (armed.began or 0.0) <= time.monotonic()
    await rig.theirs.read(plain, rig.theirs.all_spans(), urgent=True)
    assert table.known.all()
    assert table.differing(plain).size == 0
    await armed.close()


async def test_what_is_not_armed_follows_when_the_first_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arming, "ARMED_PARTS", 2)
    rig.write(3)
    table, heard = await rig.theirs.table(), []
    armed = await rig.reading(table, parts=len(REGIONS))
    armed.start(lambda first, count: heard.append((first, count)))
    rig.page.page.pause_at = 8
    for rank in range(2):
        rig.page.stand(rank, 8)
    assert await armed.stood_at(8)
    assert table.known.all()
    assert sum(count for _, count in heard) == table.count
    await armed.close()


async def test_a_page_that_tells_nothing_is_no_hindrance(rig: Rig) -> None:
    table = await rig.theirs.table()
    armed = await rig.reading(table)
    armed.start()
    await rig.asked()
    armed.go()
    assert await armed.stood_at(123)
    assert (table.known.all(), armed.began) == (True, None)
    await armed.close()


async def test_what_is_dropped_never_begins(rig: Rig) -> None:
    table = await rig.theirs.table()
    armed = await rig.reading(table)
    armed.start()
    await armed.close()
    rig.page.page.pause_at = 1
    for rank in range(2):
        rig.page.stand(rank, 1)
    assert not await armed.stood_at(1)
    assert not table.known.any()


async def test_an_executor_that_dies_meanwhile_costs_only_the_time(rig: Rig) -> None:
    table = await rig.theirs.table()
    armed = await rig.reading(table)
    armed.start()
    await rig.asked()
    os.kill(rig.pool.pids[0], signal.SIGKILL)
    assert not await armed.stood_at(0)
    await rig.theirs.read(table, rig.theirs.all_spans(), urgent=True)
    assert table.known.all()
    await armed.close()


async def landing(rig: Rig) -> tuple[LocalPath, Inbound]:
    sign = await Sign.open(rig.page.fd, [rig.pool])
    path = LocalPath(rig.theirs, rig.mine, sign)
    rig.paths.append(path)
    failed: list[BaseException] = []
    inbound = Inbound(rig.mine, path, failed.append, lambda _bytes: None)
    await inbound.open(arm=True)
    return path, inbound


def regions_of(memory: Holding) -> list[bytes]:
    return [
        os.pread(memory.fds[place.extent], region.nbytes, place.offset)
        for place, region in zip(memory.places, REGIONS, strict=True)
    ]


async def table_of(rig: Rig) -> tuple[LeafTable, TablePart]:
    table = await rig.theirs.table()
    await rig.theirs.read(table, rig.theirs.all_spans(), urgent=True)
    return table, TablePart(number=1, first=0, digests=table.slice(0, table.count))


@pytest.mark.parametrize("held", [4, 5])
async def test_bytes_of_another_stop_are_brought_again(rig: Rig, held: int) -> None:
    """At block 4 the world stood for somebody else, and went on: its pause is at 5."""
    rig.write(1)
    _, inbound = await landing(rig)
    rig.page.page.pause_at = held
    for rank in range(2):
        rig.page.stand(rank, held)
    while not inbound.arrived:
        await rig.asked()
    if held == 4:
        rig.write(2)
    word = time.monotonic()
    inbound.start_round(1, final=True)
    _, part = await table_of(rig)
    inbound.plan(part)
    count = await inbound.close_round()
    await inbound.confirm(5)
    assert inbound.damaged().size == 0
    times = 2 if held == 4 else 1
    total = sum(region.nbytes for region in REGIONS)
    assert inbound.count.bytes == times * total
    assert inbound.count.again_bytes == (times - 1) * total
    assert inbound.kept_bytes == 0
    assert (count.started < word) == (held == 5), "a round of a world that went on began with its word"
    assert regions_of(rig.mine.memory) == regions_of(rig.theirs.memory)


async def test_a_path_that_is_aborted_while_it_waits_is_quiet_at_once(rig: Rig) -> None:
    rig.write(1)
    path, inbound = await landing(rig)
    await rig.asked()
    path.abort()
    await inbound.stop()
    await path.quiet()
    rig.page.page.pause_at = 9
    for rank in range(2):
        rig.page.stand(rank, 9)
    await rig.mine.fill(0)
    for fd in rig.mine.memory.fds:
        assert not any(os.pread(fd, 1 << 20, 0))


@pytest.mark.parametrize("came", [0, 2])
async def test_what_has_waited_for_too_long_is_asked_for_when_the_round_begins(rig: Rig, came: int) -> None:
    """Leaves that had come by then come again, and count twice: they were sent twice."""
    rig.write(1)
    path, inbound = await landing(rig)
    await rig.asked()
    assert path.sign is not None
    path.sign.release(begin=False)  # as an executor does by itself
    await rig.asked()
    inbound._own.learn(0, came)
    rig.write(2)
    inbound.start_round(1, final=True)
    _, part = await table_of(rig)
    inbound.plan(part)
    await inbound.close_round()
    assert inbound.damaged().size == 0
    await inbound.confirm(5)
    assert inbound.damaged().size == 0
    leaf_map = rig.mine.memory.leaf_map
    again = sum(span.length for span in leaf_map.runs(np.arange(came)))
    assert (inbound.count.bytes, inbound.count.again_bytes) == (leaf_map.total + again, again)
    assert inbound.count.leaves == leaf_map.count + came
    assert regions_of(rig.mine.memory) == regions_of(rig.theirs.memory)
