"""Manifest: the leaf rule, the layout, the translation of leaves to spans, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.errors import ManifestError
from worldmove.manifest import (
    DEFAULT_LEAF,
    MAX_LEAF,
    MIN_LEAF,
    RAW_DTYPES,
    REGION_ALIGN,
    LeafMap,
    Manifest,
    Region,
    Source,
    Span,
    itemsize,
    layout,
    leaf_size,
    numpy_dtype,
    validate,
)
from worldmove.placement import differences

KB = 1024


def naive_leaf(stride: int) -> int:
    fitting = [size for size in range(MIN_LEAF, MAX_LEAF + 1, 256) if stride % size == 0]
    return max(fitting, default=DEFAULT_LEAF)


@given(st.one_of(st.integers(1, 1 << 24), st.integers(1, 4096).map(lambda n: n * 256), st.just(1 << 40)))
def test_the_leaf_rule(stride: int) -> None:
    assert leaf_size(stride) == naive_leaf(stride)


@pytest.mark.parametrize(
    ("stride", "leaf"),
    [
        (None, 64 * KB),
        (1, 64 * KB),
        (8 * KB - 256, 64 * KB),
        (8 * KB, 8 * KB),
        (256 * KB, 256 * KB),
        (512 * KB, 256 * KB),
        (3 * 1560 * 12 * 128 * 2, naive_leaf(3 * 1560 * 12 * 128 * 2)),
    ],
)
def test_leaf_sizes_by_hand(stride: int | None, leaf: int) -> None:
    assert leaf_size(stride) == leaf


dtypes = st.sampled_from(["u1", "bfloat16", "float32", "complex128", "float8_e5m2", "S7"])
regions_of_any_size = st.lists(
    st.tuples(
        dtypes,
        st.lists(st.integers(0, 60), max_size=3),
        st.integers(0, 2),
        st.sampled_from([None, 8 * KB, 9 * KB, 24 * KB]),
    ),
    max_size=12,
).map(
    lambda rows: tuple(
        Region(f"r{i}", dtype, tuple(shape), rank=rank, stride_bytes=stride)
        for i, (dtype, shape, rank, stride) in enumerate(rows)
    )
)


@given(regions_of_any_size)
def test_regions_lie_apart_and_aligned(regions: tuple[Region, ...]) -> None:
    extents, places = layout(regions)
    assert [(e.rank, e.device) for e in extents] == sorted({(r.rank, r.device) for r in regions})
    taken: dict[int, list[tuple[int, int]]] = {}
    for region, place in zip(regions, places, strict=True):
        extent = extents[place.extent]
        assert (extent.rank, extent.device) == (region.rank, region.device)
        assert place.offset % REGION_ALIGN == 0
        assert place.offset + region.nbytes <= extent.nbytes
        if region.nbytes:
            taken.setdefault(place.extent, []).append((place.offset, place.offset + region.nbytes))
    for ranges in taken.values():
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert all(extent.nbytes >= REGION_ALIGN for extent in extents)


def every_leaf(regions: tuple[Region, ...]) -> list[Span]:
    """All leaves, one by one."""
    return [
        Span(number, start, min(region.leaf_bytes, region.nbytes - start))
        for number, region in enumerate(regions)
        for start in range(0, region.nbytes, region.leaf_bytes)
    ]


@given(regions_of_any_size, st.data())
def test_leaves_translate_to_the_fewest_spans(regions: tuple[Region, ...], data: st.DataObject) -> None:
    every = every_leaf(regions)
    leaf_map = LeafMap(regions)
    assert leaf_map.count == len(every) == sum(region.leaves for region in regions)
    chosen = sorted(data.draw(st.sets(st.integers(0, max(len(every) - 1, 0)), max_size=len(every))))
    chosen = [leaf for leaf in chosen if leaf < len(every)]
    runs = leaf_map.runs(np.array(chosen, dtype=np.int64))

    covered = []
    for span in runs:
        first, count = leaf_map.leaves_of(span)
        covered += list(range(first, first + count))
        assert span.length == sum(every[leaf].length for leaf in range(first, first + count))
        assert (span.region, span.offset) == every[first][:2]
    assert covered == chosen
    joints = itertools.pairwise(runs)
    assert all(a.region != b.region or a.offset + a.length < b.offset for a, b in joints)
    assert leaf_map.bytes_of(np.array(chosen, dtype=np.int64)) == sum(every[leaf].length for leaf in chosen)


@given(regions_of_any_size)
def test_all_leaves_together_are_the_regions(regions: tuple[Region, ...]) -> None:
    spans = LeafMap(regions).spans(0, LeafMap(regions).count)
    assert spans == [Span(i, 0, r.nbytes) for i, r in enumerate(regions) if r.nbytes]


@given(st.integers(1, 300_000), st.data())
def test_a_span_in_the_midst_touches_the_leaves_around_it(nbytes: int, data: st.DataObject) -> None:
    leaf_map = LeafMap((Region("a", "u1", (5,)), Region("b", "u1", (nbytes,), stride_bytes=8 * KB)))
    offset = data.draw(st.integers(0, nbytes - 1))
    length = data.draw(st.integers(0, nbytes - offset))
    first, count = leaf_map.leaves_of(Span(1, offset, length))
    touched = {1 + byte // (8 * KB) for byte in (offset, offset + length - 1)} if length else set()
    assert (first, first + count - 1) == (min(touched), max(touched)) if touched else count == 0


def test_no_region_has_no_leaf() -> None:
    assert LeafMap(()).count == 0
    assert LeafMap(()).spans(0, 0) == []
    assert layout(()) == ((), ())


def manifest(*regions: Region, **more: Any) -> Manifest:
    return Manifest(**{"model": "m", "regions": regions, "block_ms": 1.0, "horizon_ms": 1.0, **more})


u1 = Region("r", "u1", (4,))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (manifest(block_ms=0.0), "block_ms"),
        (manifest(block_ms=math.nan), "block_ms"),
        (manifest(horizon_ms=math.inf), "horizon_ms"),
        (manifest(host_state_bytes=-1), "host_state_bytes"),
        (manifest(host_state_bytes=1 << 30), "host_state_bytes"),
        (manifest(model=""), "model"),
        (manifest(model="x" * 257), "model"),
        (manifest(*(Region(f"r{i}", "u1", ()) for i in range(4097))), "regions"),
        (manifest(u1, u1), "regions[1].name"),
        (manifest(Region("", "u1", ())), "regions[0].name"),
        (manifest(Region("a\n", "u1", ())), "regions[0].name"),
        (manifest(Region("x" * 129, "u1", ())), "regions[0].name"),
        (manifest(Region("r", "u1", (-1,))), "regions[0].shape"),
        (manifest(Region("r", "u1", (1,) * 17)), "regions[0].shape"),
        (manifest(Region("r", "u1", (1 << 41,))), "regions[0].shape"),
        (manifest(Region("r", "f8", (1 << 38,))), "regions[0].shape"),
        (manifest(Region("r", "u1", (0, 1 << 62))), "regions[0].shape"),
        (manifest(u1, Region("s", "nonsense", ())), "regions[1].dtype"),
        (manifest(Region("r", "O", ())), "regions[0].dtype"),
        (manifest(Region("r", "\0", ())), "regions[0].dtype"),
        (manifest(Region("r", "a5", ())), "regions[0].dtype"),
        (manifest(Region("r", "\ud800", ())), "regions[0].dtype"),
        (manifest(Region("r", "i4,f4", ())), "regions[0].dtype"),
        (manifest(Region("r", "(2,)i4", ())), "regions[0].dtype"),
        (manifest(Region("r", "S0", ())), "regions[0].dtype"),
        (manifest(Region("r", "u1", (4,), stride_bytes=0)), "regions[0].stride_bytes"),
        (manifest(Region("r", "u1", (4,), stride_bytes=5)), "regions[0].stride_bytes"),
        (manifest(Region("r", "u1", (4,), device="GPU-1")), "regions[0].device"),
        (manifest(Region("r", "u1", (4,), rank=1)), "regions.rank"),
        (manifest(u1, Region("s", "u1", (4,), rank=-1)), "regions.rank"),
        (manifest(Region("r", "u1", (4,), source=Source("cuda-ipc"))), "regions[0].source.kind"),
        (manifest(Region("r", "u1", (4,), source=Source("shm"))), "regions[0].source.name"),
        (manifest(Region("r", "u1", (4,), source=Source("shm", "x", -1))), "regions[0].source.offset"),
        (manifest(*(Region(f"r{i}", "u1", (1 << 40,)) for i in range(5))), "regions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(wrong: Manifest, field: str) -> None:
    with pytest.raises(ManifestError) as caught:
        validate(wrong)
    assert caught.value.details["field"] == field


@given(st.text(max_size=12))
def test_any_text_is_a_dtype_or_a_manifest_error(text: str) -> None:
    try:
        parsed = numpy_dtype(text)
    except ManifestError:
        return
    assert parsed.itemsize > 0
    assert not parsed.hasobject


@given(st.from_type(Manifest))
def test_any_manifest_is_valid_or_a_manifest_error(any_manifest: Manifest) -> None:
    try:
        validate(any_manifest)
    except ManifestError:
        return
    extents, places = layout(any_manifest.regions)
    assert len(places) == len(any_manifest.regions)
    assert LeafMap(any_manifest.regions).count == sum(region.leaves for region in any_manifest.regions)
    for region in any_manifest.regions:
        if region.nbytes <= 1 << 20:
            assert np.empty(region.shape, numpy_dtype(region.dtype)).nbytes == region.nbytes
    assert sum(extent.nbytes for extent in extents) >= any_manifest.nbytes


def test_every_dtype_moves() -> None:
    plain = [np.dtype(code).str for code in np.typecodes["All"] if code not in "OSUV"]
    regions = [Region(name, name, (3,)) for name in {*plain, *RAW_DTYPES, "S3", "U3", "V3", "datetime64[ns]"}]
    validate(manifest(*regions))
    for region in regions:
        assert region.nbytes == 3 * itemsize(region.dtype) == 3 * numpy_dtype(region.dtype).itemsize
    assert numpy_dtype("bfloat16") == np.uint16
    assert numpy_dtype("float8_e4m3fn") == np.uint8


def test_a_session_without_regions_has_a_rank() -> None:
    empty = manifest()
    validate(empty)
    assert empty.ranks == (0,)
    assert empty.nbytes == 0


def test_a_manifest_survives_the_wire() -> None:
    sent = manifest(Region("r", "bfloat16", (2, 0, 3), stride_bytes=1), endpoint="http://x")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Manifest) == sent
    assert msgspec.json.decode(msgspec.json.encode(sent), type=Manifest) == sent


@pytest.mark.parametrize(
    ("theirs", "fields"),
    [
        (manifest(u1), []),
        (manifest(u1, endpoint="elsewhere", block_ms=2.0, revision=7), []),
        (manifest(u1, model="other"), ["model"]),
        (manifest(u1, host_state_bytes=1), ["host_state_bytes"]),
        (manifest(Region("r", "u1", (5,))), ["regions.r.shape"]),
        (
            manifest(Region("r", "i1", (2, 2), stride_bytes=2)),
            [f"regions.r.{k}" for k in ("dtype", "shape", "stride_bytes")],
        ),
        (manifest(u1, Region("s", "u1", ())), ["regions.s"]),
        (manifest(), ["regions.r"]),
    ],
)
def test_differences_are_named(theirs: Manifest, fields: list[str]) -> None:
    assert differences(manifest(u1), theirs) == fields
    assert differences(theirs, manifest(u1)) == fields


def test_the_order_of_regions_matters() -> None:
    other = Region("s", "u1", (4,))
    assert differences(manifest(u1, other), manifest(other, u1)) == ["regions.order"]
