"""Leaf tables, and the root that sums up a whole world. The formats are laid down in docs/format.md."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worldmove.errors import ValidationError
from worldmove.ipc import map_shared, sealed_memfd
from worldmove.kernels.leaf_digest import HASH_BYTES, hash_bytes
from worldmove.manifest import DIGEST_BYTES, Region

ROOT_MAGIC = b"WMROOT"
ROOT_VERSION = 1
MAX_U64 = 2**64 - 1

Leaves = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]

__all__ = ["LeafTable", "Rows", "encode_root", "equal_rows", "hash_bytes", "new_seed", "region_heads", "root"]


def new_seed() -> int:
    """A random XXH3 seed for a session, so that nobody can prepare colliding leaves; 0 to 2**64 - 1."""
    return secrets.randbits(64)


def equal_rows(some: Rows, others: Rows) -> npt.NDArray[np.bool_]:
    """For each of these digests whether the other one is the same; both contiguous."""
    # One pass over both words, then pairs of answers: columns would be two passes over every other word.
    words: npt.NDArray[np.bool_] = some.reshape(-1) == others.reshape(-1)
    equal: npt.NDArray[np.bool_] = words.view(np.uint16) == 0x0101
    return equal


class LeafTable:
    """The digests of all leaves of one manifest, in shared memory, so that executors write into it.

    Entry i is the 16-byte canonical XXH3-128 of leaf i (index of `LeafMap`). Which entries are
    *known* is kept in this process only: whoever lets an executor digest calls `learn` for the parts done.

    Args:
        count: number of leaves; 0 is allowed.

    Attributes:
        count: number of leaves.
        fd: the memory's descriptor, owned by the table.
        nbytes: size of that memory, at least 16.
        rows: uint64[count, 2], the digests as two words each, only good for comparing.
        known: bool[count].
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.nbytes = max(count, 1) * DIGEST_BYTES
        self.fd = sealed_memfd("worldmove-leaves", self.nbytes)
        try:
            # Populated: page faults of a large table would come while it is compared, and a world stands.
            self._map: mmap.mmap = map_shared(self.fd, self.nbytes, populate=True)
        except BaseException:
            os.close(self.fd)
            raise
        self.rows: Rows = np.frombuffer(self._map, dtype=np.uint64).reshape(-1, 2)[:count]
        self.known: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)

    def slice(self, first: int, count: int) -> bytes:
        """The digests of `count` leaves from `first`, 16 bytes each.

        Raises:
            ValidationError: they lie outside the table.
        """
        self._check(first, count)
        return bytes(memoryview(self._map)[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES])

    def hashes(self, edges: Sequence[int]) -> list[bytes]:
        """`hash_bytes` of the digests of the leaves between each edge and the next, ascending from 0.

        Raises:
            ValidationError: an edge lies outside the table.
        """
        self._check(0, edges[-1])
        view = memoryview(self._map)
        ends = [edge * DIGEST_BYTES for edge in edges]
        return [hash_bytes(view[start:stop]) for start, stop in itertools.pairwise(ends)]

    def store(self, first: int, digests: bytes) -> None:
        """Writes digests that another node computed from leaf `first` on, and marks them known.

        Raises:
            ValidationError: they lie outside the table, or are no whole number of digests.
        """
        count, rest = divmod(len(digests), DIGEST_BYTES)
        if rest:
            raise ValidationError(
                f"{len(digests)} bytes are no whole number of {DIGEST_BYTES}-byte digests", field="digests"
            )
        self._check(first, count)
        self._map[first * DIGEST_BYTES : first * DIGEST_BYTES + len(digests)] = digests
        self.learn(first, count)

    def learn(self, first: int, count: int) -> None:
        """Marks entries as known, after they were written.

        Raises:
            ValidationError: they lie outside the table.
        """
        self._check(first, count)
        self.known[first : first + count] = True

    def forget(self, leaves: Leaves | None = None) -> None:
        """Marks the given leaves (all, without an argument) as not known."""
        self.known[slice(None) if leaves is None else leaves] = False

    def take_over(self, other: LeafTable, which: npt.NDArray[np.bool_]) -> None:
        """Takes these entries of a table of as many leaves, and whether they are known.

        Args:
            other: the table.
            which: bool[count].
        """
        # An entry is one item of 16 bytes here: a choice of rows of two words takes ten times as long.
        np.copyto(self.rows.view(np.complex128), other.rows.view(np.complex128), where=which[:, np.newaxis])
        self.known &= ~which
        self.known |= other.known & which

    def differing(self, other: LeafTable, first: int = 0, count: int | None = None) -> Leaves:
        """Leaves that the two tables don't prove equal, as ascending int64 indices; see `unequal`."""
        stop = self._stop(other, first, count)
        mine, theirs = self.rows[first:stop], other.rows[first:stop]
        if self.known[first:stop].all() and other.known[first:stop].all() and np.array_equal(mine, theirs):
            return np.empty(0, dtype=np.int64)
        unequal = np.flatnonzero(self.unequal(other, first, count))
        return unequal.astype(np.int64, copy=False) + first

    def unequal(self, other: LeafTable, first: int = 0, count: int | None = None) -> npt.NDArray[np.bool_]:
        """For each leaf whether the two tables don't prove it equal: different, or unknown to one of them.

        Args:
            other: a table of as many leaves.
            first: where to begin.
            count: how many leaves to look at; `None`: all from `first` on.

        Raises:
            ValidationError: the tables have different sizes, or the range lies outside.
        """
        stop = self._stop(other, first, count)
        mine, theirs = self.rows[first:stop], other.rows[first:stop]
        equal = equal_rows(mine, theirs)
        equal &= self.known[first:stop]
        equal &= other.known[first:stop]
        return ~equal

    def _stop(self, other: LeafTable, first: int, count: int | None) -> int:
        if other.count != self.count:
            raise ValidationError(f"tables of {self.count} and {other.count} leaves", field="tables")
        count = self.count - first if count is None else count
        self._check(first, count)
        return first + count

    def close(self) -> None:
        """Gives the memory back; arrays taken from `rows` before keep it alive while they live."""
        if self.fd < 0:
            return
        self.rows = np.zeros((0, 2), dtype=np.uint64)
        self.known = np.zeros(0, dtype=np.bool_)
        os.close(self.fd)
        self.fd = -1
        self.count = 0
        del self._map

    def _check(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.count:
            raise ValidationError(
                f"leaves {first} to {first + count - 1} of a table of {self.count}", field="leaves"
            )


def encode_root(
    *,
    session_id: str,
    epoch: int,
    block: int,
    seed: int,
    regions: Sequence[Region],
    region_digests: Sequence[bytes],
    state_digests: Sequence[bytes],
    heads: Sequence[bytes] | None = None,
) -> bytes:
    """The unambiguous encoding of a world whose hash is its root (docs/format.md, "Root").

    Args:
        session_id: the session's name.
        epoch: the *source's* epoch, at both ends of a move.
        block: the last block that is part of the state.
        seed: the session's XXH3 seed.
        regions: in manifest order.
        region_digests: `hash_bytes` of every region's leaf digests, in the same order.
        state_digests: `hash_bytes` of every rank's host state, rank 0 first.
        heads: `region_heads` of the regions, if they are at hand.

    Raises:
        ValidationError: a number doesn't fit 64 bits, a digest has another length than 32, or there
            are more or fewer digests than regions.
    """
    if len(region_digests) != len(regions):
        raise ValidationError(
            f"{len(region_digests)} digests for {len(regions)} regions", field="region_digests"
        )
    for field, digests in (("region_digests", region_digests), ("state_digests", state_digests)):
        _check_digests(field, digests)
    parts = [ROOT_MAGIC, struct.pack("<H", ROOT_VERSION), _text(session_id)]
    parts += [_u64(epoch, "epoch"), _u64(block, "block"), _u64(seed, "seed"), _u32(len(regions))]
    parts += itertools.chain.from_iterable(zip(heads or region_heads(regions), region_digests, strict=True))
    parts.append(_u32(len(state_digests)))
    parts += state_digests
    return b"".join(parts)


def region_heads(regions: Sequence[Region]) -> list[bytes]:
    """What stands before each region's digest in `encode_root`; raises as it does."""
    return [
        b"".join(
            [_text(region.name), _text(region.dtype), _u32(len(region.shape))]
            + [_u64(size, "shape") for size in region.shape]
            + [_u64(region.leaf_bytes, "leaf_bytes")]
        )
        for region in regions
    ]


def root(
    *,
    session_id: str,
    epoch: int,
    block: int,
    seed: int,
    regions: Sequence[Region],
    region_digests: Sequence[bytes],
    state_digests: Sequence[bytes],
    heads: Sequence[bytes] | None = None,
) -> bytes:
    """The 32-byte root of a world: equal at both ends of a move, or nothing is installed.

    No device, no node and no path enters it. Arguments and errors as `encode_root`.
    """
    return hash_bytes(
        encode_root(
            session_id=session_id,
            epoch=epoch,
            block=block,
            seed=seed,
            regions=regions,
            region_digests=region_digests,
            state_digests=state_digests,
            heads=heads,
        )
    )


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int, field: str) -> bytes:
    if not 0 <= value <= MAX_U64:
        raise ValidationError(f"{field} is {value}; 0 to {MAX_U64} are allowed", field=field)
    return struct.pack("<Q", value)


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return _u32(len(data)) + data


def _check_digests(field: str, digests: Sequence[bytes]) -> None:
    for size in set(map(len, digests)) - {HASH_BYTES}:
        raise ValidationError(f"{field} holds {size} bytes; {HASH_BYTES} are allowed", field=field)
