"""Plans of a round, carried out on plain bytes: in any order of what may overlap, and up to any point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worldmove.delta.columns import SCRATCH
from worldmove.delta.geometry import Geometry
from worldmove.delta.matching import Matcher
from worldmove.delta.moving import LIMITS, Limits, Schedule
from worldmove.delta.plan import DeltaPlan, make_plan
from worldmove.digest import LeafTable
from worldmove.kernels.leaf_digest import digest_leaves
from worldmove.manifest import LeafMap, Region

SEED = 0x5EED
Bytes = npt.NDArray[np.uint8]
KIB = 1024


def region(name: str, leaves: int, *, tail: int = 0, leaf_kib: int = 8) -> Region:
    """A region of so many leaves of `leaf_kib` KiB, at most 256.

    Args:
        name: its name.
        leaves: at least 1; the last one has only `tail` bytes, if that is not 0.
        leaf_kib: how large they are.
    """
    size = leaves * leaf_kib * KIB - (leaf_kib * KIB - tail if tail else 0)
    return Region(name, "uint8", (size,), stride_bytes=leaf_kib * KIB)


class World:
    """Memory with its table."""

    def __init__(
        self,
        regions: Sequence[Region],
        *,
        step: int = 1,
        devices: Sequence[str | None] | None = None,
    ) -> None:
        self.regions = tuple(regions)
        self.leaf_map = LeafMap(self.regions)
        steps = [step] * len(self.regions)
        self.geometry = Geometry(self.leaf_map, steps, devices or ["host"] * len(steps))
        self.memory: list[Bytes] = [np.zeros(each.nbytes, dtype=np.uint8) for each in self.regions]
        self.table = LeafTable(self.leaf_map.count)

    def read(self) -> LeafTable:
        """Its table, as its memory is now."""
        for number, each in enumerate(self.regions):
            first, count = int(self.leaf_map.first[number]), each.leaves
            out = bytearray(count * 16)
            digest_leaves(memoryview(self.memory[number]), each.leaf_bytes, SEED, memoryview(out))
            self.table.store(first, bytes(out))
        return self.table

    def leaf(self, leaf: int) -> Bytes:
        """The bytes of one leaf."""
        geometry = self.geometry
        offset, length = int(geometry.offset[leaf]), int(geometry.length[leaf])
        return self.memory[int(geometry.owner[leaf])][offset : offset + length]

    def same(self, other: World) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.memory, other.memory, strict=True))


class Scratch:
    """The scratch, poisoned, and of no more than its bytes."""

    def __init__(self, nbytes: int = LIMITS.scratch_bytes) -> None:
        self.memory = np.full(nbytes, 0xEE, dtype=np.uint8)


def move(
    world: World,
    made: Schedule,
    stage: int,
    scratch: Scratch,
    rng: np.random.Generator,
    *,
    until: float = 1.0,
) -> None:
    """Makes a stage's moves: in their order, or, where any is as good, in a random one; up to that share."""
    moves = made.moves(stage)
    if not made.ordered(stage):
        rng.shuffle(moves)  # type: ignore[arg-type]
    total = sum(each.length for each in moves)
    left = int(total * until)
    for each in moves:
        source = scratch.memory if each.source == SCRATCH else world.memory[each.source]
        target = scratch.memory if each.target == SCRATCH else world.memory[each.target]
        part = source[each.source_offset : each.source_offset + each.length]
        place = target[each.target_offset : each.target_offset + each.length]
        assert part.size == place.size == each.length
        some = min(left, each.length)
        place[:some] = part[:some].copy()
        left -= some


class Playing:
    """A round at the destination: stages and landings in any order that the plan allows."""

    def __init__(self, old: World, new: World, rng: np.random.Generator, limits: Limits = LIMITS) -> None:
        self.old, self.new, self.rng = old, new, rng
        self.scratch = Scratch(limits.scratch_bytes)
        matcher = Matcher(old.geometry, old.read()).prepare()
        settled = np.zeros(old.geometry.count, dtype=np.bool_)
        self.plan: DeltaPlan = make_plan(old.geometry, matcher, new.read(), settled, limits)
        self.landed: list[int] = []
        self._open = self.plan.asks(0).tolist()
        self._stage = 0

    @property
    def steps(self) -> int:
        """How many steps are left."""
        stages = self.plan.schedule.count
        return len(self._open) + sum(1 + self.plan.asks(n + 1).size for n in range(self._stage, stages))

    def step(self, until: float = 1.0) -> None:
        """Lands one leaf that may land, or makes the next stage, up to that share of its bytes."""
        stages = self.plan.schedule.count
        if self._open and (self._stage == stages or self.rng.random() < 0.5):
            leaf = self._open.pop(int(self.rng.integers(len(self._open))))
            some = int(self.old.leaf(leaf).size * until)
            self.old.leaf(leaf)[:some] = self.new.leaf(leaf)[:some]
            self.landed.append(leaf)
            return
        move(self.old, self.plan.schedule, self._stage, self.scratch, self.rng, until=until)
        self._stage += 1
        self._open += self.plan.asks(self._stage).tolist()
