"""Executors as real processes on real shared memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
import xxhash
from executor_kit import MB, Arena, executors, expected
from memory_kit import holders, open_descriptors, pattern

from worldmove.digest import LeafTable
from worldmove.errors import TransportError, ValidationError
from worldmove.executor.pool import CopyPiece, ExecutorPool, Piece


@pytest.fixture
async def pool() -> AsyncIterator[ExecutorPool]:
    async with executors(2) as made:
        yield made


@pytest.mark.parametrize("leaf", [8192, 65536, 262144])
@pytest.mark.parametrize("length", [1, 8191, 65537, 9 * MB + 3])
async def test_digests_equal_stock_xxhash(pool: ExecutorPool, leaf: int, length: int) -> None:
    seed = 2**64 - leaf
    arena = await Arena(length + 512 + 7).attach(pool, writable=False)
    arena.map[:] = pattern(arena.nbytes)
    count = -(-length // leaf)
    table = LeafTable(count + 2)
    key = await pool.attach(table.fd, table.nbytes, writable=True)
    seen: list[Piece] = []
    await pool.digest(key, seed, [Piece(arena.key, 512, length, leaf, 1)], on_part=seen.extend)
    data = bytes(arena.map[512 : 512 + length])
    assert table.slice(1, count) == expected(data, leaf, seed)
    assert table.slice(0, 1) == table.slice(count + 1, 1) == bytes(16)
    assert sum(piece.leaves for piece in seen) == count
    assert sum(piece.length for piece in seen) == length
    assert await pool.region_digests(key, [(1, count), (3, 0)]) == [
        hashlib.blake2b(expected(data, leaf, seed), digest_size=32).digest(),
        hashlib.blake2b(b"", digest_size=32).digest(),
    ]
    await pool.detach(arena.key)
    await pool.detach(key)
    arena.close()
    table.close()


async def test_parts_are_in_the_table_when_they_are_announced(pool: ExecutorPool) -> None:
    leaf = 8192
    arena = await Arena(20 * MB).attach(pool)
    arena.map[:] = pattern(arena.nbytes)
    table = LeafTable(arena.nbytes // leaf)
    key = await pool.attach(table.fd, table.nbytes, writable=True)
    parts: list[list[Piece]] = []

    def landed(part: list[Piece]) -> None:
        parts.append(part)
        for piece in part:
            data = bytes(arena.map[piece.offset : piece.offset + piece.length])
            assert table.slice(piece.first_leaf, piece.leaves) == expected(data, leaf, 3)

    await pool.digest(key, 3, [Piece(arena.key, 0, arena.nbytes, leaf, 0)], on_part=landed)
    assert len(parts) >= 4
    arena.close()
    table.close()


async def test_thousands_of_pieces(pool: ExecutorPool) -> None:
    leaf, count = 8192, 4000
    arena = await Arena(512 * count).attach(pool)
    arena.map[:] = pattern(arena.nbytes)
    table = LeafTable(count)
    key = await pool.attach(table.fd, table.nbytes, writable=True)
    sizes = [1 + i % 512 for i in range(count)]
    await pool.digest(
        key, 0, [Piece(arena.key, 512 * i, sizes[i], leaf, i) for i in range(count)], urgent=True
    )
    for number, size in enumerate(sizes):
        data = bytes(arena.map[512 * number : 512 * number + size])
        assert table.slice(number, 1) == xxhash.xxh3_128_digest(data, 0)
    ranges = [(i, 1) for i in range(count)]
    assert await pool.region_digests(key, ranges) == [
        hashlib.blake2b(table.slice(i, 1), digest_size=32).digest() for i in range(count)
    ]
    arena.close()
    table.close()


async def test_copies(pool: ExecutorPool) -> None:
    source, target = (
        await Arena(40 * MB + 5).attach(pool, writable=False),
        await Arena(40 * MB + 5).attach(pool),
    )
    source.map[:] = pattern(source.nbytes)
    await pool.copy([CopyPiece(source.key, 0, target.key, 0, source.nbytes)])
    assert target.map[:] == source.map[:]
    await pool.copy(
        [CopyPiece(source.key, 1, target.key, 70_000, 3), CopyPiece(source.key, 0, target.key, 5, 0)]
    )
    assert target.map[70_000:70_003] == source.map[1:4]
    source.close()
    target.close()


@pytest.mark.parametrize(("source", "target"), [(3 * MB, 0), (0, 3 * MB), (17, 17), (1, 0)])
async def test_a_piece_may_overlap_itself(pool: ExecutorPool, source: int, target: int) -> None:
    arena = await Arena(24 * MB).attach(pool)
    arena.map[:] = pattern(arena.nbytes)
    length = 20 * MB
    before = bytes(arena.map)
    await pool.copy([CopyPiece(arena.key, source, arena.key, target, length)], urgent=True)
    after = before[:target] + before[source : source + length] + before[target + length :]
    assert arena.map[:] == after
    arena.close()


async def test_wiping(pool: ExecutorPool) -> None:
    arena = await Arena(9 * MB + 1).attach(pool)
    arena.map[:] = pattern(arena.nbytes)
    await pool.fill(arena.key, 0xA5)
    assert arena.map[:] == b"\xa5" * arena.nbytes
    await pool.fill(arena.key, 0)
    assert arena.map[:] == bytes(arena.nbytes)
    arena.close()


async def test_wiping_some_leaves_the_rest(pool: ExecutorPool) -> None:
    arena = await Arena(9 * MB).attach(pool)
    arena.map[:] = before = pattern(arena.nbytes)
    ranges = [(3, 5), (100, 0), (MB, 6 * MB + 1), (9 * MB - 1, 1)]
    await pool.fill(arena.key, 0, ranges)
    wiped = bytearray(before)
    for offset, length in ranges:
        wiped[offset : offset + length] = bytes(length)
    assert arena.map[:] == wiped
    with pytest.raises(ValidationError):
        await pool.fill(arena.key, 1, [(0, 1), (9 * MB, 1)])
    assert arena.map[:] == wiped
    arena.close()


async def test_what_lies_outside_is_refused_before_anything_happens(pool: ExecutorPool) -> None:
    arena, still = await Arena(8192).attach(pool), await Arena(8192).attach(pool, writable=False)
    table = LeafTable(2)
    key = await pool.attach(table.fd, table.nbytes, writable=True)
    wrong: list[Callable[[], object]] = [
        lambda: pool.digest(key, 0, [Piece(arena.key, 1, 8192, 8192, 0)]),
        lambda: pool.digest(key, 0, [Piece(arena.key, -1, 10, 8192, 0)]),
        lambda: pool.digest(key, 0, [Piece(arena.key, 0, -1, 8192, 0)]),
        lambda: pool.digest(key, 0, [Piece(arena.key, 0, 10, 0, 0)]),
        lambda: pool.digest(key, 0, [Piece(arena.key, 0, 10, 8192, 2)]),
        lambda: pool.digest(key, 0, [Piece(arena.key, 0, 10, 8192, -1)]),
        lambda: pool.digest(key, 0, [Piece(99, 0, 10, 8192, 0)]),
        lambda: pool.digest(99, 0, [Piece(arena.key, 0, 10, 8192, 0)]),
        lambda: pool.digest(still.key, 0, [Piece(arena.key, 0, 10, 8192, 0)]),
        lambda: pool.copy([CopyPiece(arena.key, 0, still.key, 0, 1)]),
        lambda: pool.copy([CopyPiece(arena.key, 8192, arena.key, 0, 1)]),
        lambda: pool.copy([CopyPiece(arena.key, 0, arena.key, 8192, 1)]),
        lambda: pool.fill(still.key, 0),
        lambda: pool.fill(arena.key, 256),
        lambda: pool.region_digests(key, [(2, 1)]),
        lambda: pool.detach(99),
        lambda: pool.attach(arena.fd, 8193, writable=True),
        lambda: pool.attach(arena.fd, 0, writable=True),
    ]
    for call in wrong:
        with pytest.raises(ValidationError):
            await call()  # type: ignore[misc]
    with pytest.raises(TransportError):
        await pool.attach(-1, 1, writable=True)
    assert arena.map[:] == bytes(8192)
    assert table.slice(0, 2) == bytes(32)
    assert len(pool.pids) == 2
    await pool.digest(key, 0, [])
    await pool.copy([])
    assert await pool.region_digests(key, []) == []
    arena.close()
    still.close()
    table.close()


async def test_detached_memory_is_let_go_everywhere(pool: ExecutorPool) -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    before = open_descriptors()
    arena = await Arena(MB, name).attach(pool)
    assert holders(name) == {os.getpid(), *pool.pids}
    filling = asyncio.create_task(pool.fill(arena.key, 9))
    await asyncio.sleep(0)
    # What is there is finished first; what comes later is refused.
    leaving = asyncio.create_task(pool.detach(arena.key))
    await asyncio.sleep(0)
    with pytest.raises(ValidationError):
        await pool.fill(arena.key, 1)
    leaving.cancel()
    await filling
    with suppress(asyncio.CancelledError):
        await leaving
    assert arena.map[:] == b"\x09" * MB
    await pool.settle(arena.key)
    arena.close()
    other = await Arena(1).attach(pool)
    await pool.detach(other.key)
    other.close()
    assert holders(name) == set()
    assert open_descriptors() <= before


async def test_a_cancelled_attach_leaves_nothing(pool: ExecutorPool) -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    before = open_descriptors()
    for turns in range(6):
        arena = Arena(4 * MB, name)
        task = asyncio.create_task(arena.attach(pool))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
            await pool.detach(arena.key)
        arena.close()
    await pool.close()
    assert holders(name) == set()
    assert open_descriptors() < before


async def test_urgent_work_overtakes() -> None:
    pool = ExecutorPool(1)
    await pool.start()
    arena, small = await Arena(256 * MB).attach(pool), await Arena(MB).attach(pool)
    order: list[str] = []

    async def wipe(key: int, name: str) -> None:
        await pool.fill(key, 1)
        order.append(name)

    async def hurry() -> None:
        await pool.copy([CopyPiece(small.key, 0, small.key, MB // 2, MB // 2)], urgent=True)
        order.append("urgent")

    async with asyncio.TaskGroup() as group:
        group.create_task(wipe(arena.key, "long"))
        group.create_task(wipe(arena.key, "longer"))
        await asyncio.sleep(0)
        group.create_task(hurry())
    assert order == ["urgent", "long", "longer"]
    await pool.close()
    arena.close()
    small.close()
