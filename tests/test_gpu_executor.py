"""The executor of a real GPU, and the SDK's views of its memory, on the device itself; else skipped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import xxhash

from worldmove.cuda.driver import devices
from worldmove.cuda.memory import Device
from worldmove.digest import LeafTable
from worldmove.errors import DeviceError, NoMemoryError, ProcessLostError, ValidationError
from worldmove.executor import kinds
from worldmove.executor.messages import CopyPiece, Piece
from worldmove.executor.pool import ExecutorPool
from worldmove.manifest import Region
from worldmove.sdk.memory import RankMemory

MIB = 1 << 20
SEED = 2**63 + 12345


def found() -> list[str]:
    """UUIDs of the GPUs here, or the reason why there is none to be used."""
    try:
        return [device.uuid for device in devices()]
    except DeviceError as error:
        pytest.skip(f"no GPU here: {error.message}")


@pytest.fixture(scope="module")
def cupy() -> Any:
    found()
    return pytest.importorskip("cupy", reason="CuPy isn't installed")


@pytest.fixture
def gpus(cupy: Any) -> list[str]:
    return found()


class Window:
    """GPU memory as this test sees it."""

    def __init__(self, cupy: Any, uuid: str, fd: int, nbytes: int) -> None:
        self.device = Device(uuid)
        self.mapping = self.device.map(fd, nbytes)
        self.nbytes = nbytes
        self._cupy = cupy

    def write(self, data: np.ndarray) -> None:
        self._cupy.cuda.Device(self.device.info.ordinal).use()
        self._cupy.cuda.runtime.memcpy(self.mapping.address, data.ctypes.data, data.nbytes, 4)
        self.device.synchronize()

    def read(self) -> np.ndarray:
        out = np.empty(self.nbytes, dtype=np.uint8)
        self._cupy.cuda.Device(self.device.info.ordinal).use()
        self._cupy.cuda.runtime.memcpy(out.ctypes.data, self.mapping.address, self.nbytes, 4)
        return out


@pytest_asyncio.fixture
async def pool(gpus: list[str]) -> AsyncIterator[ExecutorPool]:
    pool = ExecutorPool(1, nice=0, kind=kinds.gpu(gpus[-1]))
    await pool.start()
    yield pool
    await pool.close()


async def test_memory_is_made_clear_and_comes_back(pool: ExecutorPool, gpus: list[str], cupy: Any) -> None:
    Device(gpus[-1])  # This process's own context takes its share before anything is measured.
    cupy.zeros(1)
    before, _ = await pool.measure()
    fd = await pool.allocate(65 * MIB + 1)
    assert (await pool.measure())[0] == before - 66 * MIB
    window = Window(cupy, gpus[-1], fd, 65 * MIB + 1)
    assert not window.read().any()
    window.mapping.close()
    os.close(fd)
    assert (await pool.measure())[0] == before
    with pytest.raises(NoMemoryError) as refused:
        await pool.allocate(1 << 45)
    assert refused.value.details["required_bytes"] == 1 << 45
    assert 0 < refused.value.details["available_bytes"] < 1 << 45


async def test_digests_equal_stock_xxhash_at_any_place(
    pool: ExecutorPool, gpus: list[str], cupy: Any
) -> None:
    nbytes = 40 * MIB
    data = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
    fd = await pool.allocate(nbytes)
    window = Window(cupy, gpus[-1], fd, nbytes)
    window.write(data)
    key = await pool.attach(fd, nbytes, writable=False, device=True)
    pieces, expected, first = [], [], 0
    for offset, length, leaf in (
        (0, 20 * MIB, 65536),
        (20 * MIB + 512, 3 * MIB + 17, 73728),
        (1, 9000, 8192),
    ):
        pieces.append(Piece(key, offset, length, leaf, first))
        part = data[offset : offset + length]
        expected += [xxhash.xxh3_128_digest(part[at : at + leaf], SEED) for at in range(0, length, leaf)]
        first += pieces[-1].leaves
    table = LeafTable(first + 1)
    table.store(first, b"\xee" * 16)
    table_key = await pool.attach(table.fd, table.nbytes, writable=True)
    done: list[Piece] = []
    await pool.digest(table_key, SEED, pieces, urgent=True, on_part=done.extend)
    assert table.slice(0, first) == b"".join(expected)
    assert table.slice(first, 1) == b"\xee" * 16
    assert sum(piece.length for piece in done) == sum(piece.length for piece in pieces)
    for each in (key, table_key):
        await pool.detach(each)
    window.mapping.close()
    table.close()
    os.close(fd)


async def test_copies_and_fills_touch_their_bytes_only(
    pool: ExecutorPool, gpus: list[str], cupy: Any
) -> None:
    """From the first GPU to the last: another one, where there are two."""
    nbytes = 64 * MIB
    rng = np.random.default_rng()
    there, here = (rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(2))
    other = Device(gpus[0])
    fds = [other.create(nbytes), await pool.allocate(nbytes)]
    windows = [Window(cupy, uuid, fd, nbytes) for uuid, fd in zip((gpus[0], gpus[-1]), fds, strict=True)]
    windows[0].write(there)
    windows[1].write(here)
    source = await pool.attach(fds[0], nbytes, writable=False, device=True)
    target = await pool.attach(fds[1], nbytes, writable=True, device=True)
    spans = [(0, 1), (17, 4099), (8192, 16 * MIB), (30 * MIB + 5, 3 * MIB + 3), (nbytes - 1, 1)]
    await pool.copy([CopyPiece(source, offset, target, offset, length) for offset, length in spans])
    for offset, length in spans:
        here[offset : offset + length] = there[offset : offset + length]
    assert np.array_equal(windows[1].read(), here)
    ranges = [(3, 5), (20 * MIB, 2 * MIB + 1)]
    await pool.fill(target, 0xA5, ranges)
    for offset, length in ranges:
        here[offset : offset + length] = 0xA5
    assert np.array_equal(windows[1].read(), here)
    assert np.array_equal(windows[0].read(), there)
    with pytest.raises(ValidationError):
        await pool.fill(source, 0)
    for key in (source, target):
        await pool.detach(key)
    for window, fd in zip(windows, fds, strict=True):
        window.mapping.close()
        os.close(fd)


async def test_a_killed_executor_is_replaced_and_memory_is_intact(
    pool: ExecutorPool, gpus: list[str], cupy: Any
) -> None:
    """The executor made the memory, and nobody but a process without work there holds the descriptor."""
    nbytes = 8 * MIB
    fd = await pool.allocate(nbytes)
    key = await pool.attach(fd, nbytes, writable=True, device=True)
    await pool.fill(key, 0x5A)
    pid = pool.pids[0]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while pid in pool.pids or not pool.pids:  # noqa: ASYNC110 - nobody tells a test
            await asyncio.sleep(0.05)
    try:
        await pool.fill(key, 0x5B, [(0, 1)])
    except ProcessLostError:
        await pool.fill(key, 0x5B, [(0, 1)])
    window = Window(cupy, gpus[-1], fd, nbytes)
    seen = window.read()
    assert seen[0] == 0x5B
    assert np.all(seen[1:] == 0x5A)
    window.mapping.close()
    await pool.detach(key)
    os.close(fd)


async def test_what_is_no_gpu_memory_is_refused(pool: ExecutorPool) -> None:
    fd = os.memfd_create("not-a-gpu")
    os.ftruncate(fd, 4 * MIB)
    with pytest.raises(ValidationError):
        await pool.attach(fd, 4 * MIB, writable=True, device=True)
    own = await pool.allocate(2 * MIB)
    with pytest.raises(ValidationError):
        await pool.attach(own, 64 * MIB, writable=True, device=True)
    assert pool.pids, "a refusal is no error of the device"
    await pool.detach(await pool.attach(own, 2 * MIB, writable=True, device=True))
    for each in (fd, own):
        os.close(each)


@pytest.mark.parametrize("like", ["cupy", "torch", None])
def test_a_worker_sees_its_regions_where_they_are(gpus: list[str], cupy: Any, like: str | None) -> None:
    library = pytest.importorskip(like) if like else None
    device = Device(gpus[-1])
    fd = device.create(4 * MIB)
    regions = [
        Region("k", "bfloat16", (1, 100, 8), device=gpus[-1]),
        Region("none", "float32", (0, 3), device=gpus[-1]),
        Region("index", "int64", (1,), device=gpus[-1]),
    ]
    memory = RankMemory()
    memory.map(
        [(region, 0, at) for region, at in zip(regions, (0, 1600, 2048), strict=True)], {0: (fd, 4 * MIB)}
    )
    os.close(fd)
    views = {region.name: memory.view(region.name, like) for region in regions}
    assert tuple(views["none"].shape) == (0, 3) if like else True
    if like == "torch":
        assert views["k"].dtype == library.bfloat16
        views["k"].fill_(1.0)
    else:
        cupy.asarray(views["k"])[...] = 0x3F80
    cupy.asarray(views["index"])[0] = 7
    memory.synchronize()
    raw = cupy.asarray(memory.view("k", None))
    assert cupy.asnumpy(raw).tolist() == np.full((1, 100, 8), 0x3F80).tolist()
    assert int(cupy.asarray(memory.view("index", "cupy"))[0]) == 7
    with pytest.raises(ValidationError):
        memory.view("k", "numpy")
