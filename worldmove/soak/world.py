"""The world of the soak: fast, and every byte of it after block n is known, computed from its whole history.

Each block adds to what was there before, so that a byte which did not come along in a move is never right
again. A serving stack advances it in a session's memory, the twin in memory of its own; both tell one digest
of all bytes and the host state for each block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from worldmove.manifest import Region

Flat = npt.NDArray[np.uint8]
HOST = "host"
MB = 1_000_000
SHARE = 16
"""A block rewrites one part in so many of each region."""
STATE = 32
HOST_STATE_BYTES = 4 * STATE


def regions(state_mb: int, device: str = HOST) -> tuple[Region, ...]:
    """Two caches of different size and type, and two regions of odd sizes."""
    half = state_mb * MB // 2
    return (
        Region("cache.k", "uint8", (half,), device=device),
        Region("odd", "uint8", (1001,), device=device),
        Region("cache.v", "bfloat16", (half // 2 - 257,), device=device),
        Region("one", "uint8", (1,), device=device),
    )


class SoakWorld:
    """The world, on whatever memory it is given: one flat array for each region.

    Arrays of CuPy, too: then kernels write it in place, and its bytes come to the host only to be digested.

    Args:
        library: what made the arrays, NumPy or CuPy.

    Attributes:
        block: the last one that was generated.
        host_state: as of that block; its length changes from block to block.
    """

    def __init__(
        self, memory: Mapping[str, Any], block: int = 0, host_state: bytes = b"", library: Any = np
    ) -> None:
        self._library = library
        self._memory: dict[str, Any] = {
            name: array.reshape(-1).view(np.uint8) for name, array in memory.items()
        }
        self.block = block
        self._chain = host_state[:STATE]

    @property
    def host_state(self) -> bytes:
        """Chained over all blocks."""
        return self._chain * (1 + self.block % 3)

    def step(self) -> None:
        """Generates the next block."""
        self.block += 1
        for name, memory in self._memory.items():
            if self.block == 1:
                memory[:] = self._library.asarray(_noise(name, memory.size))
            length = -(-memory.size // SHARE)
            start = self.block * length % memory.size
            memory[start : start + length] += np.uint8(1 + self.block * 37 % 255)
            memory[-1:] += np.uint8(3)
        fresh = self._chain + self.block.to_bytes(8, "little")
        self._chain = hashlib.blake2b(fresh, digest_size=STATE).digest()

    def digest(self) -> str:
        """XXH3-128 of every byte of every region, by name, and of the host state."""
        state = xxhash.xxh3_128()
        for name in sorted(self._memory):
            state.update(self._on_host(self._memory[name]).data)
        state.update(self.host_state)
        return state.hexdigest()

    def _on_host(self, memory: Any) -> Flat:
        found: Flat = memory if self._library is np else self._library.asnumpy(memory)
        return found


def twin(state_mb: int) -> SoakWorld:
    """The same world in plain memory, which never moves."""
    return SoakWorld({region.name: np.zeros(region.nbytes, np.uint8) for region in regions(state_mb)})


def _noise(name: str, size: int) -> Flat:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)
