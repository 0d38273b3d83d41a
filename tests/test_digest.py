"""The formats of docs/format.md: leaf digests, leaf tables, roots. Vectors were made by other code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from worldmove.digest import LeafTable, encode_root, hash_bytes, new_seed, root
from worldmove.errors import ValidationError
from worldmove.kernels.leaf_digest import digest_leaves, leaf_count
from worldmove.manifest import Region

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data/format_vectors.json").read_text())
MASK = 2**64 - 1


def sanity_buffer(nbytes: int) -> bytes:
    """The generator of xxHash's own tests."""
    state, out = 2654435761, bytearray()
    for _ in range(nbytes):
        out.append(state >> 56)
        state = state * 11400714785074694797 & MASK
    return bytes(out)


def digests(data: bytes, leaf_bytes: int, seed: int) -> bytes:
    out = bytearray(16 * leaf_count(len(data), leaf_bytes))
    digest_leaves(memoryview(data), leaf_bytes, seed, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("vector", VECTORS["leaves"], ids=lambda v: f"{v['bytes']}-{v['seed']}")
def test_leaf_vectors(vector: dict[str, Any]) -> None:
    data = sanity_buffer(vector["bytes"])
    if data:
        assert digests(data, len(data), vector["seed"]).hex() == vector["digest"]
    assert xxhash.xxh3_128_digest(data, vector["seed"]).hex() == vector["digest"]


@given(st.binary(max_size=5000), st.integers(1, 700), st.integers(0, MASK))
def test_every_leaf_equals_stock_xxhash(data: bytes, leaf_bytes: int, seed: int) -> None:
    leaves = [data[start : start + leaf_bytes] for start in range(0, len(data), leaf_bytes)]
    assert digests(data, leaf_bytes, seed) == b"".join(xxhash.xxh3_128(x, seed=seed).digest() for x in leaves)


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, MASK), st.booleans(), st.booleans())))
def test_entries_are_taken_over_whole(entries: list[tuple[int, int, bool, bool]]) -> None:
    """Whatever their bits would mean as numbers; and the others stay."""
    which = np.array([chosen for *_, chosen in entries], dtype=np.bool_)
    with closing(LeafTable(len(entries))) as mine, closing(LeafTable(len(entries))) as other:
        mine.rows[:], mine.known[:] = 7, True
        for number, (first, second, known, _) in enumerate(entries):
            other.rows[number], other.known[number] = (first, second), known
        mine.take_over(other, which)
        assert mine.rows.tolist() == [[a, b] if chosen else [7, 7] for a, b, _, chosen in entries]
        assert mine.known.tolist() == [known or not chosen for *_, known, chosen in entries]


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_digests_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="different structures"):
        digest_leaves(memoryview(b"x" * 10), 64, 0, memoryview(bytearray(size)))


def root_arguments(vector: dict[str, Any]) -> dict[str, Any]:
    regions = [
        Region(r["name"], r["dtype"], tuple(r["shape"]), stride_bytes=r["stride_bytes"])
        for r in vector["regions"]
    ]
    contents = [sanity_buffer(r["contents"]) for r in vector["regions"]]
    tables = [digests(c, r.leaf_bytes, vector["seed"]) for c, r in zip(contents, regions, strict=True)]
    return {
        "session_id": vector["session_id"],
        "epoch": vector["epoch"],
        "block": vector["block"],
        "seed": vector["seed"],
        "regions": regions,
        "region_digests": [hash_bytes(table) for table in tables],
        "state_digests": [hash_bytes(bytes.fromhex(state)) for state in vector["states"]],
    }


@pytest.mark.parametrize("vector", VECTORS["roots"], ids=lambda v: v["title"])
def test_root_vectors(vector: dict[str, Any]) -> None:
    arguments = root_arguments(vector)
    assert [d.hex() for d in arguments["region_digests"]] == [r["digest"] for r in vector["regions"]]
    assert [r.leaf_bytes for r in arguments["regions"]] == [r["leaf_bytes"] for r in vector["regions"]]
    assert encode_root(**arguments).hex() == vector["encoding"]
    assert root(**arguments).hex() == vector["root"]


def test_b2sum_agrees() -> None:
    table = b"any table"
    done = subprocess.run(["b2sum", "-l", "256"], input=table, capture_output=True, check=True)
    assert done.stdout.split()[0].decode() == hash_bytes(table).hex()


class Reader:
    """Reads an encoding back by the table in docs/format.md alone."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        head, self.data = self.data[:count], self.data[count:]
        assert len(head) == count
        return head

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def text(self) -> str:
        return self.take(self.number(4)).decode()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
u64 = st.integers(0, MASK)
regions_strategy = st.lists(
    st.builds(
        Region,
        name=names,
        dtype=st.sampled_from(["float32", "bfloat16", "int64", "<f2"]),
        shape=st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
        stride_bytes=st.none() | st.integers(1, 1 << 30),
    ),
    max_size=4,
)
hashes = st.binary(min_size=32, max_size=32)


@given(names, u64, u64, u64, regions_strategy, st.lists(hashes, max_size=3), st.data())
def test_an_encoding_reads_back_to_what_went_in(
    session: str,
    epoch: int,
    block: int,
    seed: int,
    regions: list[Region],
    states: list[bytes],
    data: st.DataObject,
) -> None:
    tables = data.draw(st.lists(hashes, min_size=len(regions), max_size=len(regions)))
    encoding = encode_root(
        session_id=session,
        epoch=epoch,
        block=block,
        seed=seed,
        regions=regions,
        region_digests=tables,
        state_digests=states,
    )
    reader = Reader(encoding)
    assert reader.take(6) == b"WMROOT"
    assert reader.number(2) == 1
    assert (reader.text(), reader.number(8), reader.number(8), reader.number(8)) == (
        session,
        epoch,
        block,
        seed,
    )
    assert reader.number(4) == len(regions)
    for region, table in zip(regions, tables, strict=True):
        assert (reader.text(), reader.text()) == (region.name, region.dtype)
        assert tuple(reader.number(8) for _ in range(reader.number(4))) == region.shape
        assert (reader.number(8), reader.take(32)) == (region.leaf_bytes, table)
    assert [reader.take(32) for _ in range(reader.number(4))] == states
    assert reader.data == b""
    assert hash_bytes(encoding) == hashlib.blake2b(encoding, digest_size=32).digest()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epoch": -1}, "epoch"),
        ({"block": 2**64}, "block"),
        ({"seed": 2**64}, "seed"),
        ({"region_digests": []}, "region_digests"),
        ({"region_digests": [b"short"]}, "region_digests"),
        ({"state_digests": [b"x" * 33]}, "state_digests"),
    ],
)
def test_what_cannot_be_encoded_is_named(change: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {
        "session_id": "s",
        "epoch": 1,
        "block": 1,
        "seed": 1,
        "regions": [Region("r", "u1", (1,))],
        "region_digests": [bytes(32)],
        "state_digests": [bytes(32)],
    }
    with pytest.raises(ValidationError) as caught:
        root(**{**arguments, **change})
    assert caught.value.details["field"] == field


def test_a_table_stores_slices_and_compares() -> None:
    mine, theirs = LeafTable(10), LeafTable(10)
    rows = [os.urandom(16) for _ in range(10)]
    mine.store(0, b"".join(rows))
    assert mine.differing(theirs).tolist() == list(range(10))
    theirs.store(2, b"".join(rows[2:9]))
    assert mine.differing(theirs).tolist() == [0, 1, 9]
    assert mine.differing(theirs).dtype == np.int64
    theirs.store(4, bytes(16))
    assert mine.differing(theirs, 2, 6).tolist() == [4]
    assert theirs.differing(mine, 8).tolist() == [9]
    assert mine.slice(3, 2) == rows[3] + rows[4]
    theirs.forget(np.array([5, 6]))
    assert mine.differing(theirs, 3, 4).tolist() == [4, 5, 6]
    theirs.learn(5, 1)
    assert mine.differing(theirs, 5, 1).tolist() == []
    theirs.forget()
    assert mine.differing(theirs, 0, 0).tolist() == []
    assert mine.differing(theirs).size == 10
    mine.close()
    theirs.close()


def test_equal_zeroes_that_nobody_wrote_prove_nothing() -> None:
    mine, theirs = LeafTable(1), LeafTable(1)
    assert mine.differing(theirs).tolist() == [0]
    mine.store(0, bytes(16))
    assert mine.differing(theirs).tolist() == [0]
    theirs.store(0, bytes(16))
    assert mine.differing(theirs).tolist() == []
    mine.close()
    theirs.close()


def test_one_half_of_a_digest_is_not_enough() -> None:
    mine, theirs = LeafTable(2), LeafTable(2)
    mine.store(0, b"a" * 8 + b"b" * 8 + b"a" * 16)
    theirs.store(0, b"a" * 8 + b"c" * 8 + b"c" * 8 + b"a" * 8)
    assert mine.differing(theirs).tolist() == [0, 1]
    mine.close()
    theirs.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 5), (4, 1), (2, -1), (5, 0)])
def test_what_lies_outside_a_table_is_refused(first: int, count: int) -> None:
    table, other = LeafTable(4), LeafTable(4)
    for call in (table.slice, table.learn, lambda f, c: table.differing(other, f, c)):
        with pytest.raises(ValidationError):
            call(first, count)
    table.close()
    other.close()


def test_wrong_digests_are_refused() -> None:
    table, other = LeafTable(2), LeafTable(3)
    with pytest.raises(ValidationError):
        table.store(0, b"x" * 17)
    with pytest.raises(ValidationError):
        table.store(1, b"x" * 32)
    with pytest.raises(ValidationError):
        table.differing(other)
    assert not table.known.any()
    table.close()
    other.close()


def test_an_empty_table_is_a_table() -> None:
    table, other = LeafTable(0), LeafTable(0)
    assert table.nbytes == 16
    assert table.slice(0, 0) == b""
    assert table.differing(other).size == 0
    table.close()
    table.close()
    other.close()
    assert table.fd == -1


def test_seeds_are_not_repeated() -> None:
    seeds = {new_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(0 <= seed <= MASK for seed in seeds)
