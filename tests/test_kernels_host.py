"""The device code itself, run on the CPU thread for thread, against stock xxhash and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from kernels_kit import (
    POISON,
    Launch,
    build,
    compiler,
    digest_with,
    new_table,
    noise,
    run_with,
    single_leaves,
)

from worldmove.kernels.addresses import Bytes
from worldmove.kernels.pieces import digest_pieces, leaf_total, make_pieces, plan_pieces
from worldmove.kernels.runs import (
    copy_runs,
    fill_runs,
    gather_runs,
    make_runs,
    packed_bytes,
    read_runs,
    scatter_runs,
)
from worldmove.kernels.table_diff import DIFF_THREADS, table_diff

SEEDS = (0, 1, 0x0123456789ABCDEF, 2**64 - 1)
KIB = 1024
ALIGNED = ["leaf_digest", "leaf_digest_copy"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    if compiler() is None:
        pytest.skip("no C++ compiler here (g++)")
    return build(tmp_path_factory.mktemp("kernels"))


def stock(data: Bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(data.data, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offset", [0, 1, 7, 8, 13])
def test_every_length_from_0_to_2048(kernels: dict[str, Launch], seed: int, offset: int) -> None:
    data = noise(4 * KIB, seed=offset)
    lengths = list(range(2049))
    pieces = single_leaves([data.ctypes.data + offset] * len(lengths), lengths)
    table = new_table(len(lengths))
    digest_with(kernels["leaf_digest_any"], pieces, seed, table, share=4)
    wrong = [n for n in lengths if table[n].tobytes() != stock(data[offset : offset + n], seed)]
    assert not wrong


@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.parametrize("threads", [64, 128])
def test_every_leaf_size_of_the_leaf_rule(kernels: dict[str, Launch], name: str, threads: int) -> None:
    """All multiples of 256 bytes up to 4 KiB and from 8 to 256 KiB, many pieces in one launch."""
    step = 256 if (name, threads) == ("leaf_digest", 128) else 3328
    sizes = [*range(256, 4 * KIB, 256), *range(8 * KIB, 256 * KIB + 1, step)]
    data, seed = noise(300 * KIB), 2**63 + 11
    starts = [16 * (i % 97) for i in range(len(sizes))]
    pieces = make_pieces([data.ctypes.data + start for start in starts], sizes, sizes, range(len(sizes)))
    target = noise(300 * KIB)
    if name == "leaf_digest_copy":
        pieces["target"] = target.ctypes.data
    table = new_table(len(sizes))
    digest_with(kernels[name], pieces, seed, table, threads=threads, share=16)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        assert table[row].tobytes() == stock(data[start : start + size], seed), (size, start)


def test_a_digesting_copy_copies_what_it_digests(kernels: dict[str, Launch]) -> None:
    data, target = noise(600 * KIB), noise(700 * KIB, seed=2)
    target[:] = POISON
    sizes, starts, places = [300 * KIB, 2560, 73728], [0, 300 * KIB, 310 * KIB], [48, 400 * KIB, 410 * KIB]
    pieces = make_pieces(
        [data.ctypes.data + start for start in starts],
        sizes,
        [60 * KIB, 256, 73728],
        [4, 9, 20],
        [target.ctypes.data + place for place in places],
    )
    table, wanted, expected = new_table(22), new_table(22), target.copy()
    digest_with(kernels["leaf_digest_copy"], pieces, 5, table, share=16)
    digest_pieces(pieces, 5, wanted)
    for start, size, place in zip(starts, sizes, places, strict=True):
        expected[place : place + size] = data[start : start + size]
    assert np.array_equal(table, wanted)
    assert np.array_equal(target, expected)


def test_a_plan_takes_every_leaf_once(kernels: dict[str, Launch]) -> None:
    """4,000 pieces: even and odd addresses, sizes and ends, in the launches that a plan gives."""
    random = np.random.default_rng(3)
    data = noise(1024 * KIB)
    count = 4000
    sizes = random.choice([1, 100, 240, 256, 1000, 1024, 8 * KIB, 9984], count)
    lengths = random.integers(0, 4, count) * sizes + random.choice([0, 0, 1, 255, 256, 512, 777], count)
    lengths[lengths == 0] = 1
    starts = random.integers(0, data.nbytes - 64 * KIB, count)
    starts[::2] = starts[::2] // 16 * 16
    pieces = make_pieces(starts + data.ctypes.data, lengths, sizes, np.zeros(count, dtype=np.uint64))
    pieces["first_leaf"] = pieces["first"] + np.uint64(3)
    rows = leaf_total(pieces) + 5
    table, wanted = new_table(rows), new_table(rows)
    plan = plan_pieces(pieces)
    assert leaf_total(plan.aligned) + leaf_total(plan.other) == leaf_total(pieces)
    assert len(plan.aligned)
    digest_with(kernels["leaf_digest"], plan.aligned, 7, table, share=16)
    digest_with(kernels["leaf_digest_any"], plan.other, 7, table, share=4)
    digest_pieces(pieces, 7, wanted)
    assert np.array_equal(table, wanted)


def scattered(count: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of runs that don't overlap, of every alignment, and the room that they need."""
    random = np.random.default_rng(count)
    lengths = random.integers(0, longest, count)
    gaps = random.integers(0, 40, count)
    return np.cumsum(gaps) + np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths


@pytest.mark.parametrize(("count", "longest"), [(2000, 60), (40, 200_000)])
def test_runs_are_copied_whatever_their_alignment(
    kernels: dict[str, Launch], count: int, longest: int
) -> None:
    places, lengths = scattered(count, longest)
    room = int(places[-1] + lengths[-1]) + 64
    source, target = noise(room), noise(room, seed=2)
    target[:] = POISON
    expected = target.copy()
    skew = np.where(np.arange(count) % 3 == 0, 0, np.arange(count) % 16)
    runs = make_runs(source.ctypes.data + places + skew, target.ctypes.data + places, lengths)
    run_with(kernels["copy_runs"], runs)
    copy_runs(make_runs(source.ctypes.data + places + skew, expected.ctypes.data + places, lengths))
    assert np.array_equal(target, expected)


def test_gathered_runs_come_back_by_scattering(kernels: dict[str, Launch]) -> None:
    places, lengths = scattered(300, 3000)
    room = int(places[-1] + lengths[-1])
    source, target = noise(room), noise(room, seed=9)
    target[:] = POISON
    packed = noise(packed_bytes(places + source.ctypes.data, lengths), seed=4)
    expected = target.copy()
    run_with(kernels["copy_runs"], gather_runs(places + source.ctypes.data, lengths, packed.ctypes.data))
    run_with(kernels["copy_runs"], scatter_runs(places + target.ctypes.data, lengths, packed.ctypes.data))
    for place, length in zip(places, lengths, strict=True):
        expected[place : place + length] = source[place : place + length]
    assert np.array_equal(target, expected)


def test_runs_are_filled_and_nothing_beside_them(kernels: dict[str, Launch]) -> None:
    places, lengths = scattered(200, 5000)
    room = int(places[-1] + lengths[-1]) + 9
    target, expected = noise(room), noise(room)
    run_with(kernels["fill_runs"], make_runs(lengths * 0, places + target.ctypes.data, lengths), 0x1C3)
    fill_runs(make_runs(lengths * 0, places + expected.ctypes.data, lengths), 0xC3)
    assert np.array_equal(target, expected)


def test_the_reading_kernel_reads_every_word(kernels: dict[str, Launch]) -> None:
    data = noise(512 * KIB)
    starts, lengths = np.array([0, 70 * KIB, 400 * KIB]), np.array([65 * KIB, 300 * KIB + 16, 16])
    runs = make_runs(starts + data.ctypes.data, starts, lengths)
    sums = np.full(3 * 512, POISON, dtype=np.uint64)
    run_with(kernels["read_runs"], runs, sums)
    assert int(np.bitwise_xor.reduce(sums)) == read_runs(runs)


@pytest.mark.parametrize("leaves", [1, 31, DIFF_THREADS, DIFF_THREADS + 1, 5000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_difference_of_two_tables(kernels: dict[str, Launch], leaves: int, share: float) -> None:
    random = np.random.default_rng(leaves)
    mine, theirs = noise(leaves * 16).reshape(-1, 16), noise(leaves * 16).reshape(-1, 16)
    changed = np.flatnonzero(random.random(leaves) < share)
    theirs[changed, random.integers(0, 16, len(changed))] ^= 1
    known_mine = (random.random(leaves) > share / 4).astype(np.uint8)
    known_theirs = (random.random(leaves) > share / 4).astype(np.uint8)
    blocks = -(-leaves // DIFF_THREADS)
    marks, counts = np.full(blocks * 32, POISON, dtype=np.uint32), np.full(blocks, POISON, dtype=np.uint32)
    found, total = np.full(leaves, -1, dtype=np.int64), np.full(1, POISON, dtype=np.uint64)
    tables = (mine, theirs, known_mine, known_theirs)
    kernels["table_diff_mark"](blocks, DIFF_THREADS, *tables, leaves, marks, counts)
    kernels["table_diff_list"](blocks, DIFF_THREADS, marks, counts, leaves, 1000, found, total)
    wanted = table_diff(*tables, base=1000)
    assert int(total[0]) == len(wanted)
    assert np.array_equal(found[: len(wanted)], wanted)
    assert np.all(found[len(wanted) :] == -1)
