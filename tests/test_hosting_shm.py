"""Shared memory that a serving stack made, registered by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosting_kit import HostKit, assert_pause, region_bytes, spec
from hosting_worker import pattern

from worldmove.errors import ManifestError
from worldmove.hosting.shared import SHM, open_shared
from worldmove.manifest import Region, Source


@pytest.fixture
def shared(run_dir: Path) -> Iterator[str]:
    name = f"wm-test-{run_dir.name}"
    path = SHM / name
    path.write_bytes(bytes(10_000))
    yield name
    path.unlink(missing_ok=True)


async def test_regions_in_shared_memory_beside_arenas(kit: HostKit, shared: str) -> None:
    regions = (
        Region("a", "uint8", (1000,)),
        Region("s1", "float32", (10, 3), source=Source("shm", shared, 4)),
        Region("b", "int64", (5,)),
        Region("s2", "uint8", (333,), source=Source("shm", f"/{shared}", 5001)),
        Region("s3", "uint8", (0,), source=Source("shm", shared, 10_000)),
    )
    slot, (worker,) = await kit.session(*regions)
    assert [extent.nbytes for extent in slot.extents] == [1536, 10_000]
    assert [place.extent for place in slot.places] == [0, 1, 0, 1, 1]
    assert kit.budget.held == 1536
    worker.tell("run")
    pause = await slot.ranks.pause(5)
    assert_pause(slot, pause)
    # The stack sees the same bytes under the name, and nothing beside the regions has changed.
    data = (SHM / shared).read_bytes()
    assert data[4:124] == pattern("s1", pause.block, 120)
    assert data[5001:5334] == pattern("s2", pause.block, 333)
    assert data[:4] + data[124:5001] + data[5334:] == bytes(10_000 - 120 - 333)
    pause.resume()


async def test_a_resized_region_leaves_shared_memory(kit: HostKit, shared: str) -> None:
    slot, (worker,) = await kit.session(Region("s", "uint8", (100,), source=Source("shm", shared)))
    await worker("step")
    assert await worker("revise", resize={"s": [200]}) == {}
    await kit.changes.wait(slot, "revised")
    assert slot.manifest.regions[0].source.kind == "arena"
    assert region_bytes(slot, "s") == pattern("s", 1, 100) + bytes(100)


async def test_the_field_that_is_wrong_is_named(kit: HostKit, shared: str) -> None:
    for source, size, field in [
        (Source("shm", "no-such-thing"), 1, "regions[1].source.name"),
        (Source("shm", shared), 10_001, "regions[1].source.name"),
        (Source("shm", shared, 9_999), 2, "regions[1].source.name"),
        (Source("shm", shared, -1), 2, "regions[1].source.offset"),
        (Source("shm", None), 2, "regions[1].source.name"),
    ]:
        with pytest.raises(ManifestError) as caught:
            await kit.host.open_session(
                spec(Region("a", "uint8", (1,)), Region("s", "uint8", (size,), source=source)), "w", 1
            )
        assert caught.value.details["field"] == field
    twice = (
        Region("x", "uint8", (10,), source=Source("shm", shared)),
        Region("y", "uint8", (10_000,), source=Source("shm", shared, 1)),
    )
    with pytest.raises(ManifestError) as caught:
        await kit.host.open_session(spec(*twice), "w", 1)
    assert caught.value.details["field"] == "regions[1].source.offset"


@pytest.mark.parametrize("name", ["", "/", "//x", "a/b", "../passwd", ".", "..", "x\0y", "x" * 300, "\udcff"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ManifestError):
        open_shared(name, 1, "field")


def test_only_plain_files_of_this_user(shared: str, run_dir: Path) -> None:
    fd, size = open_shared(shared, 10_000, "field")
    assert size == 10_000
    os.close(fd)
    names = [f"{shared}-{kind}" for kind in ("link", "fifo", "foreign", "dir")]
    link, fifo, foreign, folder = (SHM / name for name in names)
    try:
        link.symlink_to(SHM / shared)
        os.mkfifo(fifo)
        folder.mkdir()
        foreign.write_bytes(b"x")
        if os.geteuid() == 0:
            os.chown(foreign, 65534, 65534)
        else:
            foreign.unlink()
        for name in names:
            with pytest.raises(ManifestError):
                open_shared(name, 1, "field")
    finally:
        for path in (link, fifo, foreign):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


async def test_a_name_that_is_gone_takes_nothing_with_it(kit: HostKit, shared: str) -> None:
    """The descriptor holds the memory, as everywhere."""
    slot, (worker,) = await kit.session(Region("s", "uint8", (100,), source=Source("shm", shared)))
    (SHM / shared).unlink()
    await worker("step")
    assert region_bytes(slot, "s") == pattern("s", 1, 100)
    await asyncio.sleep(0)
