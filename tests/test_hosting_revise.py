"""Regions come, go and grow at a boundary: the worker allocates, the node follows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hosting_kit import Caller, HostKit, assert_pause, region_bytes, spec, until
from hosting_worker import pattern

from worldmove.errors import ManifestError, ProtocolError
from worldmove.hosting.memory import revised, take
from worldmove.hosting.slots import check_sealed
from worldmove.ipc import sealed_memfd
from worldmove.manifest import Manifest, Region, Source
from worldmove.memory.arena import MemoryBudget
from worldmove.page.messages import Put, Revise
from worldmove.sdk.memory import copy_common

REGIONS = (
    Region("cache", "int32", (1, 10, 4), stride_bytes=16),
    Region("old", "uint8", (100,)),
    Region("other", "uint8", (9,), rank=1),
)


def names(manifest: Manifest) -> list[str]:
    return [region.name for region in manifest.regions]


async def test_a_world_is_revised_and_goes_on(kit: HostKit) -> None:
    slot, (worker, other) = await kit.session(*REGIONS)
    assert (await worker("step", n=2))["block"] == 2
    before = slot.holding
    held = kit.budget.held
    answer = await worker(
        "revise",
        add=[{"name": "new", "dtype": "float16", "shape": [3, 3]}],
        drop=["old"],
        resize={"cache": [1, 16, 4]},
    )
    assert answer == {}
    await kit.changes.wait(slot, "revised")
    assert names(slot.manifest) == ["cache", "other", "new"]
    assert (slot.manifest.revision, slot.ranks.page.revision) == (2, 2)
    assert slot.manifest.regions[0].shape == (1, 16, 4)
    assert slot.leaf_map.nbytes.tolist() == [256, 9, 18]
    assert before.manifest.revision == 1
    wanted = np.zeros((1, 16, 4), np.int32)
    wanted[:, :10] = np.frombuffer(pattern("cache", 2, 160), np.int32).reshape(1, 10, 4)
    assert region_bytes(slot, "cache") == wanted.tobytes()
    assert region_bytes(slot, "new") == bytes(18)
    # The old extent of rank 0 is gone, a new one with both regions is there.
    assert len(slot.extents) == 2
    assert kit.budget.held == held - before.extents[0].nbytes + 512 + 512
    read = await worker("read", name="cache")
    assert (read["shape"], read["hex"]) == ([1, 16, 4], wanted.tobytes().hex())
    assert (await worker("read", name="old"))["error"] == "not-found"
    worker.tell("run")
    await other("step", n=2)
    other.tell("run")
    pause = await slot.ranks.pause(10)
    assert_pause(slot, pause)


async def test_growing_for_ever_holds_only_what_is_used(kit: HostKit) -> None:
    slot, (worker,) = await kit.session(Region("grows", "uint8", (10,)), Region("stays", "uint8", (5,)))
    first = slot.holding
    for size in range(1, 30):
        assert await worker("revise", resize={"grows": [size * 1000]}) == {}
        await worker("step")
    await kit.changes.wait(slot, "revised", count=29)
    assert slot.manifest.revision == 30
    assert len(slot.fds) == 2
    assert kit.budget.held == slot.holding.counted_bytes == first.extents[0].nbytes + 29184
    worker.tell("run")
    assert_pause(slot, await slot.ranks.pause(5))


async def test_a_pinned_holding_stays_whole(kit: HostKit) -> None:
    slot, (worker,) = await kit.session(Region("k", "uint8", (1000,)))
    await worker("step")
    with slot.pinned() as holding:
        await worker("revise", resize={"k": [2000]})
        await kit.changes.wait(slot, "revised")
        assert os.pread(holding.fds[0], 1000, 0) == pattern("k", 1, 1000)
        assert slot.fds != holding.fds
    await until(lambda: not Path(f"/proc/self/fd/{holding.fds[0]}").exists())


async def test_a_revision_comes_before_the_pause_that_follows_it(kit: HostKit) -> None:
    """The worker waits for nobody, and yet a pause never sees the old regions with the new block."""
    slot, (worker,) = await kit.session(Region("k", "uint8", (1000,)))
    await worker("revise", resize={"k": [3000]})
    worker.tell("run")
    pause = await slot.ranks.pause(5)
    assert slot.manifest.regions[0].shape == (3000,)
    assert_pause(slot, pause)


async def test_a_revision_is_taken_in_once_and_in_order(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    for number, outcome in [(1, 2), (1, 2), (2, 3), (1, 3), (2, 3)]:
        fd = sealed_memfd("x", 4096)
        put = Put(Region("x", "uint8", (10 * number,)), 0, 0)
        slot.revise(0, Revise(number, (), (put,), (4096,)), [fd], kit.budget)
        assert slot.manifest.revision == outcome
    with pytest.raises(ProtocolError):
        slot.revise(0, Revise(9, (), (), ()), [], kit.budget)
    assert kit.budget.held == slot.holding.counted_bytes


async def test_another_worker_counts_its_revisions_on(kit: HostKit) -> None:
    slot, (worker,) = await kit.session(Region("k", "uint8", (1000,)))
    await worker("revise", resize={"k": [2000]})
    await worker("step")
    await worker("close")
    await kit.changes.wait(slot, "left")
    _, tickets = kit.host.attach("w", {"cpu": "x"})
    (other,) = await kit.join(slot, tickets)
    await other("revise", resize={"k": [3000]})
    other.tell("run")
    pause = await slot.ranks.pause(5)
    assert slot.manifest.regions[0].shape == (3000,)
    assert_pause(slot, pause)


async def test_what_is_not_possible_changes_nothing(kit: HostKit) -> None:
    slot, (worker, _) = await kit.session(*REGIONS)
    for wrong in [
        {"drop": ["nobody"]},
        {"drop": ["other"]},
        {"resize": {"other": [3]}},
        {"drop": ["old"], "resize": {"old": [3]}},
        {"drop": ["old", "old"]},
        {"drop": ["old", "cache"]},
        {"add": [{"name": "cache", "dtype": "uint8", "shape": [1]}]},
        {"add": [{"name": "x", "dtype": "uint8", "shape": [1], "rank": 1}]},
        {"add": [{"name": "x", "dtype": "uint8", "shape": [-1]}]},
        {"add": [{"name": "x", "dtype": "uint8", "shape": [1], "colour": "red"}]},
        {"add": [{"name": "x"}]},
        {"add": [{"name": "x", "dtype": "uint8", "shape": [1], "source": {"kind": "shm", "name": "y"}}]},
        {"resize": {"cache": [1 << 45]}},
    ]:
        assert (await worker("revise", **wrong))["error"] in ("manifest", "validation"), wrong
    assert (await worker("revise", resize={"old": [1 << 38]}))["error"] == "no-memory"
    assert await worker("revise") == {}
    assert await worker("revise", resize={"old": [100]}) == {}
    assert (await worker("read", name="old"))["shape"] == [100]
    await worker("step")
    assert slot.manifest.revision == 1


async def test_a_node_checks_what_a_worker_says() -> None:
    budget = MemoryBudget()
    holding = await take(Manifest("m", REGIONS, 1, 1), budget, "test")

    def put(name: str = "x", extent: int = 0, offset: int = 0, **more: object) -> Put:
        return Put(Region(name, "uint8", (10,), **more), extent, offset)  # type: ignore[arg-type]

    good = revised(holding, 0, Revise(1, ("old",), (put(),), (512,)), (99,))
    assert (good.fds, good.places[2]) == ((*holding.fds, 99), (2, 0))
    for wrong in [
        Revise(1, ("nobody",), (), ()),
        Revise(1, ("other",), (), ()),
        Revise(1, ("cache",), (put("cache"),), (512,)),
        Revise(1, (), (put(), put()), (512,)),
        Revise(1, (), (put(extent=1),), (512,)),
        Revise(1, (), (put(extent=-1),), (512,)),
        Revise(1, (), (put(offset=-512),), (512,)),
        Revise(1, (), (put(offset=100),), (512,)),
        Revise(1, (), (put(offset=512),), (512,)),
        Revise(1, (), (put(),), (9,)),
        Revise(1, (), (put("other", rank=1),), (512,)),
        Revise(1, (), (put("other"),), (512,)),
        Revise(1, (), (put(source=Source("shm", "x")),), (512,)),
        Revise(1, (), (put(device="cuda:0"),), (512,)),
        Revise(1, ("cache", "old"), (), ()),
    ]:
        with pytest.raises(ManifestError):
            revised(holding, 0, wrong, (99,))
    for fd in holding.fds:
        os.close(fd)


def test_descriptors_must_be_sealed_memory_of_their_size() -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096)
    good = sealed_memfd("good", 4096)
    null = os.open("/dev/null", os.O_RDWR)
    check_sealed([good], [4096])
    for fds, sizes in [
        ([plain], [1]),
        ([good], [4097]),
        ([good], [0]),
        ([null], [1]),
        ([good], []),
        ([], [1]),
    ]:
        with pytest.raises(ManifestError):
            check_sealed(fds, sizes)
    for fd in (plain, good, null):
        os.close(fd)


async def test_a_worker_that_lies_is_let_go(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    caller = Caller(kit)
    await caller.enter(slot, ticket)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 4096)
    await caller.channel.send(Revise(1, (), (Put(Region("x", "uint8", (9,)), 0, 0),), (4096,)), [plain])
    os.close(plain)
    await caller.gone()
    await kit.changes.wait(slot, "lost")
    assert slot.manifest.revision == 1


@pytest.mark.parametrize(
    ("old", "new"), [((4,), (6,)), ((6,), (4,)), ((2, 3), (3, 2)), ((2, 3), (7,)), ((), (3,)), ((0,), (2,))]
)
def test_a_resized_region_keeps_the_common_part(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    before = np.arange(1, 1 + int(np.prod(old)), dtype=np.int64).reshape(old)
    after = np.zeros(new, np.int64)
    copy_common(before, after)
    for index in np.ndindex(*new):
        if len(old) == len(new):
            inside = all(i < size for i, size in zip(index, old, strict=True))
            assert after[index] == (before[index] if inside else 0)
    if len(old) != len(new):
        count = min(before.size, after.size)
        assert (after.reshape(-1)[:count] == before.reshape(-1)[:count]).all()
