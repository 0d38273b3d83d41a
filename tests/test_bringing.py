"""What is brought is read back once, all of it: on GPUs in few large pieces while the world generates."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldmove.bringing import LUMP_BYTES, Bringing
from worldmove.digest import LeafTable
from worldmove.manifest import HOST, LeafMap, Region, Span
from worldmove.paths import Path
from worldmove.reading import Reader
from worldmove.tasks import Tasks

MIB = 1 << 20
LEAVES = LeafMap((Region("k", "uint8", (2560 * MIB,)), Region("v", "uint8", (1000 * MIB + 5,))))
WHOLE = [span for span in LEAVES.whole() if span.length]
BATCH = 16 * MIB
WIDTH = 8


class Reads:
    """A reader that notes what it is asked to read back."""

    def __init__(self, device: str) -> None:
        self.memory = SimpleNamespace(extents=[SimpleNamespace(device=device)], leaf_map=LEAVES)
        self.done: list[tuple[list[Span], bool]] = []

    def plan_read(self, _table: object, spans: Sequence[Span], *, few: bool = False) -> list[Span]:
        return list(spans)

    async def prepare(self, _plan: list[Span]) -> None:
        return

    async def perform(self, plan: list[Span], *, urgent: bool, on_read: Callable[..., None]) -> None:
        await asyncio.sleep(0)
        on_read(0, 0)
        self.done.append((plan, urgent))


class Wire:
    """A path whose batches land in any order."""

    width = WIDTH
    batch_bytes = BATCH

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def pull(self, _spans: Sequence[Span], *, urgent: bool) -> None:
        del urgent
        for _ in range(self._chance.randrange(5)):
            await asyncio.sleep(0)


async def brought(device: str, *, urgent: bool, seed: int, wanted: Sequence[list[Span]]) -> Reads:
    """Everything that was read back after some calls of `bring` at once."""
    reads = Reads(device)
    errors: list[BaseException] = []
    landed: list[int] = []
    tasks = Tasks(errors.append)
    bringing = Bringing(
        cast(Reader, reads),
        cast(Path, Wire(seed)),
        spawn=tasks.spawn,
        urgent=lambda: urgent,
        on_landed=landed.append,
        on_read=lambda _first, _count: None,
    )
    bringing.into(cast(LeafTable, None))
    for spans in wanted:
        tasks.spawn(bringing.bring(spans))
    await tasks.join()
    assert not errors
    assert sum(landed) == sum(span.length for spans in wanted for span in spans)
    return reads


def rows(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Spans with those joined that touch."""
    found: list[tuple[int, int, int]] = []
    for region, start, length in sorted(tuple(span) for span in spans):
        if found and found[-1][0] == region and sum(found[-1][1:]) == start:
            found[-1] = (region, found[-1][1], found[-1][2] + length)
        else:
            found.append((region, start, length))
    return found


@pytest.mark.parametrize("seed", range(5))
async def test_of_a_world_that_generates_large_pieces_are_read_back(seed: int) -> None:
    halves: Any = [WHOLE[:1], WHOLE[1:]]
    reads = await brought("GPU-0", urgent=False, seed=seed, wanted=halves)
    assert rows([span for plan, _ in reads.done for span in plan]) == rows(WHOLE)
    sizes = [sum(span.length for span in plan) for plan, _ in reads.done]
    assert len(sizes) <= LEAVES.total // LUMP_BYTES + 1
    assert max(sizes) < LUMP_BYTES + 2 * BATCH
    assert not any(urgent for _, urgent in reads.done)


@pytest.mark.parametrize(("device", "urgent"), [("GPU-0", True), (HOST, False), (HOST, True)])
async def test_a_standing_world_and_host_memory_are_read_batch_by_batch(device: str, urgent: bool) -> None:
    reads = await brought(device, urgent=urgent, seed=1, wanted=[WHOLE])
    assert rows([span for plan, _ in reads.done for span in plan]) == rows(WHOLE)
    assert max(sum(span.length for span in plan) for plan, _ in reads.done) <= BATCH
    assert {each for _, each in reads.done} == {urgent}


async def test_what_is_little_is_read_when_the_last_of_it_has_landed() -> None:
    reads = await brought("GPU-0", urgent=False, seed=3, wanted=[[Span(1, 0, 5 * BATCH)]])
    assert len(reads.done) == 1
