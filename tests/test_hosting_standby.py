"""A standby is found, promised, loaded and handed a session: with real worker processes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hosting_kit import (
    HostKit,
    assert_pause,
    descriptors,
    line,
    manifest,
    region_bytes,
    spec,
    until,
)
from hosting_worker import host_state, pattern

from worldmove.errors import (
    AlreadyMovingError,
    ConflictError,
    FingerprintMismatchError,
    ManifestError,
    NoMemoryError,
    NotFoundError,
    NoWorkerError,
    ProtocolError,
    SessionExistsError,
)
from worldmove.hosting.slots import Slot
from worldmove.ipc import map_shared
from worldmove.manifest import MAX_REGIONS, RAW_DTYPES, Manifest, Region, Source
from worldmove.page.messages import Ended

TWO = (Region("a", "uint8", (700,), rank=0), Region("b", "float64", (50,), rank=1))
SEED = (1 << 63) + 5


def write_world(slot: Slot, block: int) -> None:
    """Puts the world of `block` into a slot's memory, as a move would."""
    for region, place in zip(slot.manifest.regions, slot.places, strict=True):
        size = slot.extents[place.extent].nbytes
        with contextlib.closing(map_shared(slot.fds[place.extent], size)) as memory:
            memory[place.offset : place.offset + region.nbytes] = pattern(region.name, block, region.nbytes)


def hand_over(
    kit: HostKit, slot: Slot, session: Manifest, block: int, ranks: int = 1, epoch: int = 8
) -> None:
    write_world(slot, block)
    kit.host.load(slot, block, [host_state(rank, block) for rank in range(ranks)])
    kit.host.adopt(slot, "w", 8, session, SEED)


async def test_a_standby_is_handed_a_session_and_generates_on(kit: HostKit) -> None:
    session = manifest(*TWO, revision=4, block_ms=9.0, endpoint="wss://source")
    slot, workers = await kit.standby(*TWO)
    assert slot.vacant
    assert slot.kind == "standby"
    for worker in workers:
        worker.tell("wait")
    assert kit.host.find_standby(session, {"cpu": "x"}) is slot
    kit.host.bind(slot, "move-1")
    assert not slot.vacant
    hand_over(kit, slot, session, 12, ranks=2)
    for rank, worker in enumerate(workers):
        assert await worker.hear() == {
            "id": "w",
            "block": 12,
            "epoch": 8,
            "host_state": host_state(rank, 12).decode(),
            "tickets": [],
        }
    await kit.changes.wait(slot, "started")
    assert kit.host.session("w") is slot
    assert not kit.host.standbys
    assert (slot.id, slot.seed, slot.ranks.page.epoch, slot.bound) == ("w", SEED, 8, None)
    assert (slot.manifest.revision, slot.manifest.block_ms) == (4, 9.0)
    assert slot.manifest.endpoint == "wss://source"
    for worker in workers:
        worker.tell("run")
    pause = await slot.ranks.pause(10)
    assert pause.block > 12
    assert_pause(slot, pause)


async def test_a_worker_that_dies_before_it_is_told_loses_no_world(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    kit.host.bind(slot, "move-1")
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    hand_over(kit, slot, slot.manifest, 30)
    assert slot.ranks.state == "unattended"
    pause = await slot.ranks.pause(1, allow_unattended=True)
    assert_pause(slot, pause)
    pause.resume()
    _, (ticket,) = kit.host.attach("w", {"cpu": "x"})
    other = await kit.worker()
    answer = await other("join", ticket=line("w", kit.host, ticket))
    assert (answer["block"], answer["host_state"]) == (30, host_state(0, 30).decode())
    assert (await other("step"))["block"] == 31


async def test_who_attaches_while_the_world_is_held_waits(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    await worker("step", n=2)
    await worker("close")
    await kit.changes.wait(slot, "left")
    pause = await slot.ranks.pause(1, allow_unattended=True)
    assert_pause(slot, pause)
    _, (ticket,) = kit.host.attach("w", {"cpu": "x"})
    for ending in ("resume", "moved"):
        other = await kit.worker()
        other.tell("join", ticket=line("w", kit.host, ticket))
        await kit.changes.wait(slot, "attached", count=2 if ending == "resume" else 3)
        assert pause.held
        if ending == "resume":
            pause.resume()
            assert (await other.hear())["block"] == 2
            await other("close")
            await kit.changes.wait(slot, "left", count=2)
            pause = await slot.ranks.pause(1, allow_unattended=True)
            _, (ticket,) = kit.host.attach("w", {"cpu": "x"})
    pause.moved("B", None)
    assert await other.hear() == {"moved": "B", "endpoint": None}


async def test_nobody_waits(kit: HostKit) -> None:
    with pytest.raises(NoWorkerError):
        kit.host.find_standby(manifest(), {"cpu": "x"})
    slot, _ = await kit.host.open_standby(spec())
    with pytest.raises(NoWorkerError):
        kit.host.find_standby(manifest(), {"cpu": "x"})
    with pytest.raises(NoWorkerError):
        kit.host.bind(slot, "move-1")


async def test_one_that_does_not_match_names_the_fields(kit: HostKit) -> None:
    slot, _ = await kit.standby()
    with pytest.raises(FingerprintMismatchError) as prints:
        kit.host.find_standby(manifest(), {"cpu": "y", "gpu": "none"})
    assert prints.value.details["fields"] == ["cpu", "gpu"]
    with pytest.raises(ManifestError) as fields:
        kit.host.find_standby(
            manifest(Region("k", "float32", (33, 8)), slot.manifest.regions[1]), {"cpu": "x"}
        )
    assert fields.value.details["fields"] == ["regions.k.shape"]
    other, _ = await kit.standby(Region("z", "uint8", (1,)))
    assert kit.host.find_standby(manifest(Region("z", "uint8", (1,))), {"cpu": "x"}) is other


async def test_a_standby_is_promised_to_one_move(kit: HostKit) -> None:
    slot, _ = await kit.standby()
    kit.host.bind(slot, "one")
    kit.host.bind(slot, "one")
    with pytest.raises(AlreadyMovingError):
        kit.host.bind(slot, "two")
    with pytest.raises(NoWorkerError):
        kit.host.find_standby(manifest(), {"cpu": "x"})
    kit.host.unbind(slot, "two")
    assert not slot.vacant
    kit.host.unbind(slot, "one")
    assert kit.host.find_standby(manifest(), {"cpu": "x"}) is slot


async def test_a_standby_waits_with_a_time_limit_and_can_be_dropped(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    assert await worker("wait", timeout=0.05) == {}
    worker.tell("wait")
    kit.host.close_slot(slot, Ended("dropped"))
    assert await worker.hear() == {"error": "session-ended", "message": "dropped", "details": "{}"}
    with pytest.raises(NotFoundError):
        kit.host.standby(slot.id)


async def test_what_an_aborted_move_brought_is_not_taken_for_a_later_one(kit: HostKit) -> None:
    slot, (worker,) = await kit.standby()
    kit.host.load(slot, 50, [b"of the aborted move"])
    kit.host.bind(slot, "move-2")
    hand_over(kit, slot, slot.manifest, 49)
    await worker("wait")
    await worker("step", lazy=True)
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    with pytest.raises(ConflictError):
        await slot.ranks.pause(1, allow_unattended=True)


async def test_host_states_must_fit_the_ranks(kit: HostKit) -> None:
    slot, _ = await kit.standby(host_state_bytes=4)
    for states in ([], [b"", b""]):
        with pytest.raises(ProtocolError):
            kit.host.load(slot, 1, states)
    with pytest.raises(ManifestError):
        kit.host.load(slot, 1, [b"large"])


@pytest.mark.parametrize(
    "regions",
    [
        (),
        (Region("empty", "int64", (0,)),),
        (Region("one", "uint8", (1,)),),
        (Region("empty", "int64", (3, 0)), Region("odd", "uint8", (12345,)), Region("scalar", "float64", ())),
        tuple(Region(f"r{n}", "uint8", (n % 50,)) for n in range(4000)),
        tuple(
            Region(dtype, dtype, (5, 3))
            for dtype in (*"?bBhHiIlLefdFDgG", "S7", "U3", "M8[ns]", "m8[s]", *RAW_DTYPES)
        ),
    ],
    ids=["none", "empty", "one", "odd", "4000", "dtypes"],
)
async def test_every_kind_of_world_is_mapped_and_written(kit: HostKit, regions: tuple[Region, ...]) -> None:
    assert len(regions) <= MAX_REGIONS
    slot, tickets = await kit.host.open_session(
        spec().__class__(manifest=Manifest("m", regions, 10, 10), fingerprint={}), "w", 1
    )
    (worker,) = await kit.join(slot, tickets)
    assert (await worker("step", n=3))["block"] == 3
    worker.tell("run")
    pause = await slot.ranks.pause(20)
    assert_pause(slot, pause)
    pause.moved("B", None)
    await worker.hear()


async def test_one_id_is_one_session(kit: HostKit) -> None:
    slot, _ = await kit.host.open_session(spec(), "w", 1)
    with pytest.raises(SessionExistsError):
        await kit.host.open_session(spec(), "w", 1)
    kit.host.close_slot(slot, Ended("gone"))
    kit.host.close_slot(slot, Ended("gone again"))
    twice = await asyncio.gather(
        *(kit.host.open_session(spec(), "w", 2) for _ in range(2)), return_exceptions=True
    )
    assert sum(isinstance(each, SessionExistsError) for each in twice) == 1


async def test_what_fails_leaves_nothing(kit: HostKit) -> None:
    await kit.session(session_id="warm")
    before, held = descriptors(), kit.budget.held
    shared = Region("x", "uint8", (1,), source=Source("shm", "is-not-there-7f"))
    for bad, error in [
        (spec(Region("x", "uint8", (1 << 39,))), NoMemoryError),
        (spec(Region("x", "nonsense", (1,))), ManifestError),
        (spec(shared), ManifestError),
        (spec(Region("a", "uint8", (1,)), shared), ManifestError),
    ]:
        with pytest.raises(error):
            await kit.host.open_session(bad, "w", 1)
    with pytest.raises(NotFoundError):
        kit.host.session("w")
    task = asyncio.create_task(kit.host.open_session(spec(Region("x", "uint8", (64 << 20,))), "w", 1))
    await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: kit.budget.held == held and descriptors() == before)


async def test_memory_goes_back_when_a_session_closes(kit: HostKit) -> None:
    await kit.session(session_id="warm")
    before, held = descriptors(), kit.budget.held
    for _ in range(3):
        slot, (worker,) = await kit.session(Region("x", "uint8", (1 << 20,)), session_id="w")
        worker.tell("run")
        pause = await slot.ranks.pause(5)
        with slot.pinned() as holding:
            kit.host.close_slot(slot, Ended("gone"))
            assert region_bytes(slot, "x") == pattern("x", pause.block, 1 << 20)
            assert holding.counted_bytes == 1 << 20
        assert (await worker.hear())["ended"] == "gone"
        await worker.kill()
    assert kit.budget.held == held
    await until(lambda: descriptors() == before)
