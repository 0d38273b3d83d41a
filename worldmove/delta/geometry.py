"""The leaves of one manifest as columns: whose they are, how long, and which may take each other's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worldmove.manifest import HOST, LeafMap, Region

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SAMPLE = 2048


def steps_of(regions: Sequence[Region]) -> list[int]:
    """How many leaves each region shifts by; 0 where it has no stride, or one that leaves don't divide."""
    strides = [(region.stride_bytes or 0, region.leaf_bytes) for region in regions]
    return [0 if stride % leaf else stride // leaf for stride, leaf in strides]


class Geometry:
    """Columns over all leaves, in their order.

    Args:
        leaf_map: of the manifest.
        steps: for each region its stride in leaves (`steps_of`).
        devices: for each region, where its copies are made; `None`: nothing is copied there or from there.

    Attributes:
        count: leaves.
        owner: int64[count], the region.
        first: int64[regions + 1], where the leaves of each region begin; at last `count`.
        begins: bool[count], it is the first one of its region.
        length: int64[count], bytes.
        offset: int64[count], where it begins in its region.
        group: int64[count]; leaves of one group have one length and one device. -1: it is never copied.
        groups: how many groups there are. copyable: bool[count], it has one.
        on_gpu: bool[count], it lies on a GPU.
        kinds: the values of `on_gpu` that there are.
        step: int64[count], the leaves of its region's stride; 0 where there is none that leaves divide.
        strided: bool[count], whether it may be taken from some strides further on.
        sample: int64, ascending: some leaves that are strided, chosen by chance.
        stretches: (first, stop, step) of the leaves of neighbouring regions with one step.
    """

    def __init__(self, leaf_map: LeafMap, steps: Sequence[int], devices: Sequence[str | None]) -> None:
        self.count = leaf_map.count
        leaves = np.diff(leaf_map.first)
        self.owner = np.repeat(np.arange(len(steps), dtype=np.int64), leaves)
        self.first = leaf_map.first
        self.begins = np.zeros(self.count, dtype=np.bool_)
        self.begins[self.first[self.first < self.count]] = True
        size = leaf_map.leaf_bytes[self.owner]
        self.offset = (np.arange(self.count, dtype=np.int64) - leaf_map.first[self.owner]) * size
        self.length = np.minimum(leaf_map.nbytes[self.owner] - self.offset, size)
        self.step = np.array(steps, dtype=np.int64)[self.owner]
        self.group = self._groups(devices)
        self.copyable = self.group >= 0
        self.groups = np.unique(self.group[self.copyable]).size
        self.strided = self.copyable & (self.step > 0)
        strided = np.flatnonzero(self.strided)
        chosen = np.random.default_rng(0).integers(max(strided.size, 1), size=min(SAMPLE, strided.size))
        self.sample = np.sort(strided[chosen])
        self._alike: dict[int, Flags] = {}
        self.on_gpu = np.array([device not in (None, HOST) for device in devices], dtype=np.bool_)[self.owner]
        self.kinds = {device not in (None, HOST) for device in devices}
        edges = np.concatenate([[0], np.flatnonzero(np.diff(self.step)) + 1, [self.count]]).tolist()
        self.stretches = [
            (first, stop, int(self.step[first])) for first, stop in itertools.pairwise(edges) if first < stop
        ]

    def _groups(self, devices: Sequence[str | None]) -> Longs:
        names = {name: number for number, name in enumerate(sorted({d for d in devices if d is not None}))}
        number = np.array([names.get(device or "", -1) for device in devices], dtype=np.int64)
        if not self.count:
            return np.zeros(0, dtype=np.int64)
        device = number[self.owner]
        # A leaf has at most 2**18 bytes, so this tells all pairs apart.
        return np.where(device < 0, -1, (device << 20) | self.length)

    def shifted(self, leaves: Longs, strides: int) -> tuple[Longs, Flags]:
        """The leaves so many strides further on, and whether they are another one of the same region."""
        distance = strides * self.step[leaves]
        there = leaves + distance
        inside = (distance != 0) & (there >= 0) & (there < self.count)
        there = np.where(inside, there, 0)
        return there, inside & (self.owner[there] == self.owner[leaves])

    def alike(self, strides: int) -> Flags:
        """For every leaf whether the one so many strides further on is of the same region and group."""
        found = self._alike.get(strides)
        if found is None:
            there, inside = self.shifted(np.arange(self.count), strides)
            found = self._alike[strides] = inside & (self.group[there] == self.group)
        return found

    @property
    def nowhere(self) -> bool:
        """Whether nothing can be copied at all."""
        return not self.groups

    def whole_regions(self, leaves: Flags, first: int, stop: int) -> slice:
        """The leaves of those regions that have one from `first` to before `stop` and of which all are set.

        Args:
            leaves: bool[count]; all from `first` to before `stop` are set.
            first: a leaf.
            stop: behind a later one.
        """
        low = int(np.searchsorted(self.first, first, side="right")) - 1
        high = int(np.searchsorted(self.first, stop, side="left"))
        begin, end = int(self.first[low]), int(self.first[high])
        if not leaves[begin:first].all():
            begin = int(self.first[low + 1])
        if not leaves[stop:end].all():
            end = int(self.first[high - 1])
        return slice(begin, max(begin, end))

    def bytes_of(self, leaves: Longs) -> int:
        """Bytes of the given leaves together."""
        return int(self.length[leaves].sum())
