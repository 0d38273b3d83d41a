"""Digests and roots of moving worlds, computed again from docs/format.md with stock xxhash and hashlib."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator

import pytest
import xxhash
from fleet_kit import Fleet, Twin
from moves_kit import Traveller

from worldmove.manifest import Region
from worldmove.views import DigestView

MIB = 1 << 20
REGIONS = [
    Region("k", "bfloat16", (2, 3, 30_001)),
    Region("v", "float8_e4m3fn", (24_576 * 20,), stride_bytes=24_576),
    Region("nothing", "int32", (0, 5)),
    Region("größe", ">f8", ()),
    Region("k1", "uint8", (MIB + 1,), rank=1),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("A", "B") as fleet:
        yield fleet


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def leaf_bytes(stride: int | None) -> int:
    fitting = [size for size in range(8192, 262_144 + 1, 256) if stride and stride % size == 0]
    return max(fitting, default=65_536)


def region_digest(data: bytes, leaf: int, seed: int) -> bytes:
    leaves = (data[start : start + leaf] for start in range(0, len(data), leaf))
    return hashed(b"".join(xxhash.xxh3_128_digest(each, seed) for each in leaves))


def root(session: str, epoch: int, seed: int, twin: Twin) -> str:
    """The root of the twin's world, field by field as the table of docs/format.md has them."""
    parts = [b"WMROOT", struct.pack("<H", 1), text(session)]
    parts += [struct.pack("<QQQ", epoch, twin.block, seed), struct.pack("<I", len(twin.regions))]
    for name, region in twin.regions.items():
        leaf = leaf_bytes(region.stride_bytes)
        parts += [text(name), text(region.dtype), struct.pack("<I", len(region.shape))]
        parts += [struct.pack("<Q", size) for size in region.shape]
        parts += [struct.pack("<Q", leaf), region_digest(twin.memory[name].tobytes(), leaf, seed)]
    parts += [struct.pack("<I", len(twin.host_states)), *(hashed(state) for state in twin.host_states)]
    return hashed(b"".join(parts)).hex()


def check(view: DigestView, twin: Twin) -> None:
    twin.to(view.block)
    assert tuple(base64.b64decode(state) for state in view.host_state) == twin.host_states
    for region, told in zip(twin.regions.values(), view.regions, strict=True):
        leaf = leaf_bytes(region.stride_bytes)
        assert (told.name, told.dtype, told.shape) == (region.name, region.dtype, region.shape)
        assert (told.leaf_bytes, told.leaves) == (leaf, -(-region.nbytes // leaf))
        assert told.digest == region_digest(twin.memory[region.name].tobytes(), leaf, view.seed).hex()
    assert view.root == root(view.session_id, view.epoch, view.seed, twin)


def test_anybody_can_check_a_world_and_its_moves(fleet: Fleet) -> None:
    with fleet.turn():
        world = Traveller(fleet, "w", REGIONS)
        world.run()
        first = fleet.client.digest(world.session)
        assert (first.epoch, len(first.host_state)) == (1, 2)
        check(first, world.twin)
        for epoch, (to, path, live) in enumerate(
            [("B", "staged", True), ("A", "local", True), ("B", "local", False), ("A", "staged", False)],
            start=1,
        ):
            standing = world.stand_by(to)
            receipt = fleet.moved(world.session, to, path=path, live=live)
            assert receipt.block is not None
            # The root is of the source's epoch, and of the block at which all ranks stopped.
            wanted = root(world.session, epoch, first.seed, world.twin.to(receipt.block))
            assert (receipt.source_root, receipt.destination_root) == (wanted, wanted)
            world.arrive(standing, to)
            world.run()
            now = fleet.client.digest(world.session)
            assert (now.epoch, now.seed) == (epoch + 1, first.seed)
            check(now, world.twin)
