"""The world of the fleet tests: what every byte of it is after block n, computed from its whole history.

An actor advances it in a session's memory; a test advances an independent copy in memory of its own and
compares bytes. Each block adds to what was there before: a byte that did not come along is never right again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from worldmove.kernels.addresses import memory_at
from worldmove.manifest import Region

Flat = npt.NDArray[np.uint8]
SHARE = 8
"""A block rewrites one part in so many of each region."""


def flat(array: Any) -> Flat:
    """An array's own bytes; those of an imagined GPU are host memory (tests/fake_gpu)."""
    face = getattr(array, "__cuda_array_interface__", None)
    if face is not None:
        return memory_at(face["data"][0], math.prod(face["shape"]) * int(face["typestr"][2:]))
    return array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)


def fill(name: str, memory: Flat) -> None:
    """What a region begins with: noise of its own."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    memory[:] = np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(memory.size), np.uint8)


def write_block(memory: Flat, block: int, share: int = SHARE) -> None:
    """One block's work on a region: adds to one part of it, and to its first and last byte."""
    if not memory.size:
        return
    length = -(-memory.size // share)
    start = block * length % memory.size
    memory[start : start + length] += np.uint8(1 + block * 37 % 255)
    memory[:1] += np.uint8(block & 0xFF)
    memory[-1:] += np.uint8(3)


def core(host_state: bytes, block: int) -> bytes:
    """A host state of `block` without its padding."""
    return host_state[: 32 * (1 + block % 3)] if block else b""


def shown(host_state: bytes) -> str:
    """A host state in hex, a long one as its digest."""
    if len(host_state) <= 4096:
        return host_state.hex()
    return f"{len(host_state)} bytes, blake2b {hashlib.blake2b(host_state).hexdigest()}"


def next_state(state: bytes, rank: int, block: int) -> bytes:
    """Host state after `block`: depends on all blocks before, and changes its length."""
    digest = hashlib.blake2b(state + bytes([rank]) + block.to_bytes(8, "little"), digest_size=32).digest()
    return digest * (1 + block % 3)


class Twin:
    """An independent copy of all ranks of a session, in the memory of whoever holds it.

    Args:
        regions: as registered.
        host: `none` if the stack hands over no host state.
        share: as the actors are told.
        pad: bytes that the stack appends to each host state.
    """

    def __init__(
        self, regions: Sequence[Region], *, host: str = "bytes", share: int = SHARE, pad: int = 0
    ) -> None:
        self.block = 0
        self.host = host
        self.share = share
        self.pad = bytes([0x5A]) * pad
        self.regions: dict[str, Region] = {region.name: region for region in regions}
        self.memory: dict[str, Flat] = {r.name: np.zeros(r.nbytes, np.uint8) for r in regions}
        self._states: dict[int, bytes] = {region.rank: b"" for region in regions} or {0: b""}

    @property
    def host_states(self) -> tuple[bytes, ...]:
        """Of every rank, as of `block`."""
        if not self.block:
            return (b"",) * len(self._states)
        return tuple(
            b"" if self.host == "none" else self._states[rank] + self.pad for rank in sorted(self._states)
        )

    def to(self, block: int) -> Twin:
        """Generates on to `block`."""
        assert block >= self.block, f"the twin is at block {self.block}, beyond {block}"
        while self.block < block:
            self.block += 1
            for name, memory in self.memory.items():
                if self.block == 1:
                    fill(name, memory)
                write_block(memory, self.block, self.share)
            for rank, state in self._states.items():
                self._states[rank] = next_state(state, rank, self.block)
        return self

    def revise(
        self,
        add: Sequence[Region] = (),
        drop: Sequence[str] = (),
        resize: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """What `World.revise` promises, for regions of one dimension: a common prefix, and zeros."""
        for name, shape in (resize or {}).items():
            region = msgspec.structs.replace(self.regions[name], shape=tuple(shape))
            grown = np.zeros(region.nbytes, np.uint8)
            common = min(grown.size, self.memory[name].size)
            grown[:common] = self.memory[name][:common]
            self.regions[name], self.memory[name] = region, grown
        for name in drop:
            del self.regions[name], self.memory[name]
        for region in add:
            self.regions[region.name], self.memory[region.name] = region, np.zeros(region.nbytes, np.uint8)

    def differences(self, found: Mapping[str, bytes]) -> list[str]:
        """Where `found` differs: names with the first differing byte; empty where every byte is equal."""
        wrong = [f"{name}: missing or not wanted" for name in found.keys() ^ self.memory.keys()]
        for name in found.keys() & self.memory.keys():
            wanted = self.memory[name].tobytes()
            if found[name] != wanted:
                pairs = enumerate(zip(wanted, found[name], strict=False))
                first = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(found[name])))
                sizes = f"{len(found[name])} of {len(wanted)} bytes"
                wrong.append(f"{name}: {sizes}, differs from byte {first} on, at block {self.block}")
        return wrong
