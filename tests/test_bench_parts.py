"""The parts of the benchmarks: what they compute, and that they measure what they say."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.bench import digest
from worldmove.bench.digest import fill
from worldmove.bench.lanes import lane_pair
from worldmove.bench.processes import descendants, own_bytes, shared_bytes, watch
from worldmove.bench.raw import RawStream
from worldmove.bench.report import at_least, at_most
from worldmove.bench.stats import gbps, median, quantile
from worldmove.errors import ProcessLostError
from worldmove.ipc import map_shared
from worldmove.memory.arena import create_arena

MIB = 1 << 20
floats = st.floats(0, 1e9)


@contextmanager
def arena(nbytes: int) -> Iterator[int]:
    fd = create_arena(nbytes, "test-bench")
    try:
        yield fd
    finally:
        os.close(fd)


@given(st.lists(floats, min_size=1, max_size=50))
def test_median_is_the_one_of_the_library(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))


@given(st.lists(floats, min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_is_a_value_that_enough_others_do_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < max(share * len(values), 1)


def test_nothing_has_no_quantile_and_no_median() -> None:
    with pytest.raises(ValueError, match="0 values"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_rates_count_decimal_bits() -> None:
    assert gbps(10**9, 1.0) == 8.0


def test_bars_say_whether_they_are_met() -> None:
    assert at_least(0.7, 0.65) == "≥ 0.65, met"
    assert at_least(0.6, 0.65) == "≥ 0.65, NOT MET"
    assert at_most(12, 20, "µs") == "≤ 20 µs, met"


def test_noise_is_reproducible_and_differs_by_seed() -> None:
    first, again, other = bytearray(4096), bytearray(4096), bytearray(4096)
    fill(memoryview(first), seed=3)
    fill(memoryview(again), seed=3)
    fill(memoryview(other), seed=4)
    assert first == again
    assert first != other


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 3])
async def test_a_raw_stream_brings_every_byte(nbytes: int) -> None:
    with arena(nbytes) as source, arena(nbytes) as destination:
        with map_shared(source, nbytes) as mapping, memoryview(mapping) as view:
            fill(view)
        async with RawStream(source, destination, nbytes) as stream:
            assert await stream.run() > 0
            assert await stream.run() > 0
        assert os.pread(destination, nbytes, 0) == os.pread(source, nbytes, 0)


async def test_a_raw_stream_whose_sender_dies_says_so() -> None:
    with arena(MIB) as source, arena(MIB) as destination:
        async with RawStream(source, destination, MIB) as stream:
            for process in stream._processes:
                process.send_signal(signal.SIGKILL)
            with pytest.raises(ProcessLostError):
                await stream.run()


async def test_lanes_alone_bring_every_byte() -> None:
    nbytes = 20 * MIB + 5
    with arena(nbytes) as source, arena(nbytes) as destination:
        with map_shared(source, nbytes) as mapping, memoryview(mapping) as view:
            fill(view)
        async with lane_pair(source, destination, nbytes) as lanes:
            assert lanes.prepare_ms > 0
            assert await lanes.run() > 0
        assert os.pread(destination, nbytes, 0) == os.pread(source, nbytes, 0)


async def child(program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


async def test_growth_of_a_nodes_child_counts_as_the_nodes() -> None:
    program = (
        "import sys; print('up', flush=True); sys.stdin.readline();"
        f"memory = bytearray({32 * MIB}); print('grown', flush=True); sys.stdin.readline()"
    )
    process = await child(program)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"up\n"
        assert process.pid in descendants([os.getpid()])
        async with watch({"A": (process.pid,)}) as growth:
            process.stdin.write(b"\n")
            assert await process.stdout.readline() == b"grown\n"
            growth.look()
        assert growth.peak_bytes >= 32 * MIB
        assert growth.samples >= 2
    finally:
        process.kill()
        await process.communicate()


def test_memory_files_count_as_shared_and_not_as_own() -> None:
    """`Shmem` is the whole machine's, and others make and free memory files meanwhile: the median counts."""
    shared, own = [], []
    for _ in range(9):
        before_shared, before_own = shared_bytes(), own_bytes([os.getpid()])
        with arena(64 * MIB) as fd, mmap.mmap(fd, 64 * MIB):
            shared.append(shared_bytes() - before_shared)
            own.append(own_bytes([os.getpid()]) - before_own)
    assert statistics.median(shared) >= 32 * MIB
    assert max(own) < 32 * MIB


def test_processes_that_are_gone_count_nothing() -> None:
    assert own_bytes([2**22 - 1]) == 0


def test_digest_bench_checks_every_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert digest.run(mb=8, executors=2, repeats=1, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is True
    assert result["executors"] == 2
    assert min(result["executor_gbps"], result["stock_gbps"], result["read_gbps"]) > 0


def test_digest_bench_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert digest.run(mb=1, repeats=1) == 0
    assert "stock xxhash" in capsys.readouterr().out
