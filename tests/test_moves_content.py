"""Whole moves between real nodes: worlds of every shape go there and back, and every byte arrives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fleet_kit import Fleet
from moves_kit import WAYS, Traveller, spec_for

from worldmove.errors import ManifestError
from worldmove.manifest import RAW_DTYPES, Region

LEAF = 64 * 1024
MIB = 1 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Fleet]:
    with Fleet("A", "B") as fleet:
        yield fleet


def of_sizes(*sizes: int) -> list[Region]:
    return [Region(f"r{number}", "uint8", (size,)) for number, size in enumerate(sizes)]


def of_every_dtype() -> list[Region]:
    plain = {np.dtype(code).name for code in np.typecodes["All"] if code not in "OSUVMm"}
    flexible = {"S5", "U3", "V7", "datetime64[ns]", "timedelta64[ms]", ">f4", "<i2", "=u8"}
    names = sorted(plain | flexible | set(RAW_DTYPES))
    return [Region(f"{number}-{name}", name, (3, 11)) for number, name in enumerate(names)]


def strided(stride: int, times: int) -> Region:
    return Region(f"stride{stride}", "uint8", (stride * times,), stride_bytes=stride)


CONTENTS = {
    "no host state": (of_sizes(100_000), {"host": "none", "host_state_bytes": 0}),
    "host state asked for when wanted": (of_sizes(100_000), {"host": "lazy"}),
    "a zero-byte region": ([*of_sizes(0, 5000, 0), Region("flat", "float32", (4, 0, 7))], {}),
    "nothing but a zero-byte region": (of_sizes(0), {}),
    "one byte": (of_sizes(1), {}),
    "a scalar": ([Region("scalar", "float64", ())], {}),
    "odd sizes": (of_sizes(1, 255, 511, 513, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 7, 1_000_003), {}),
    "every dtype": (of_every_dtype(), {}),
    "leaves of many sizes": (
        [
            strided(8192, 9),
            strided(14_376_960 // 60, 5),
            strided(768 * 100, 3),
            strided(1009, 70),
            strided(64, 9),
        ],
        {},
    ),
    "two ranks": (
        [Region(f"{name}{rank}", "bfloat16", (40_001,), rank=rank) for name in "kv" for rank in (0, 1)],
        {},
    ),
    "host state as large as it may be": (of_sizes(9), {"host_state_bytes": 4 * MIB, "pad": 4 * MIB - 96}),
    "host states as large as they may be together": (
        [Region(f"r{rank}", "uint8", (9,), rank=rank) for rank in (0, 1)],
        {"host_state_bytes": 7 * MIB // 2, "pad": 7 * MIB // 2 - 96},
    ),
    "more than a batch": (of_sizes(20_000_000, 7_000_001), {"share": 64}),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_world_goes_there_and_back_while_it_generates(fleet: Fleet, content: str) -> None:
    regions, options = CONTENTS[content]
    world = Traveller(fleet, "w", regions, **options)
    for number, (path, live) in enumerate(WAYS):
        world.go("BA"[number % 2], path=path, live=live)
    assert fleet.owner(world.session) == "A"


def test_four_thousand_regions_go_there_and_back(fleet: Fleet) -> None:
    world = Traveller(fleet, "many", [Region(f"r{n}", "uint8", (n % 700,)) for n in range(4000)])
    world.go("B", path="staged")
    world.go("A", path="local", live=False)


def test_the_comparison_sees_a_single_byte(fleet: Fleet) -> None:
    world = Traveller(fleet, "w", of_sizes(3 * LEAF, 10))
    world.step(3)
    world.actors[0].ask("poke", name="r0", offset=LEAF + 5, hex="00")
    world.twin.to(3).memory["r0"][LEAF + 5] = 1
    assert world.twin.differences(world.actors[0].dump()) == [
        f"r0: {3 * LEAF} of {3 * LEAF} bytes, differs from byte {LEAF + 5} on, at block 3"
    ]


def test_more_host_state_than_a_move_carries_is_refused(fleet: Fleet) -> None:
    regions = [Region(f"r{rank}", "uint8", (9,), rank=rank) for rank in (0, 1)]
    with pytest.raises(ManifestError) as refused:
        fleet["A"].client.register(spec_for(regions, host_state_bytes=7 * MIB // 2 + 1))
    assert refused.value.details["field"] == "host_state_bytes"


def test_leaves_follow_from_the_stride() -> None:
    sizes = {region.stride_bytes: region.leaf_bytes for region in CONTENTS["leaves of many sizes"][0]}
    assert sizes == {8192: 8192, 239_616: 239_616, 76_800: 76_800, 1009: LEAF, 64: LEAF}
