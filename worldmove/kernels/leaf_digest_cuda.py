"""The digest of leaves in device memory: the same bytes as `leaf_digest.py`, at the memory's speed.

A *digesting copy* reads once, writes the bytes elsewhere, and digests what it read. It belongs to the
**source** alone, run by the device that owns the memory, writing into a ring or a peer (push): its digest
then says what the source holds, and the bytes that left are those very bytes, even if the world is writing
meanwhile. It verifies nothing: bytes that are damaged on their way or in the target's memory were digested
before that. Nor may a destination pull and digest in one, for either table: taken for the source's, the
digest of what *arrived* would call a damaged world right; taken for its own, it would say nothing of what its
memory holds. A destination digests its own memory, after the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import cupy
import numpy as np

from worldmove.kernels.device import Records, load, upload
from worldmove.kernels.leaf_digest import DIGEST_BYTES
from worldmove.kernels.pieces import Pieces, leaf_total, make_pieces, plan_pieces

THREADS = 128
BESIDE_BYTES = 40 << 10
"""Shared memory that a thread block asks for and does not use, so that few run at once beside a copy."""
MEMBERS, MEMBERS_ANY = 16, 4
"""Threads that share a leaf, in the fast kernels and in the plain one."""


class DigestPlan(NamedTuple):
    """Pieces on the device, ready to be digested again and again (`LeafDigest.plan`)."""

    aligned: Records
    other: Records


class LeafDigest:
    """The kernels, loaded on the current device.

    Args:
        defines: macros of leaf_digest.cu, for trying other shapes.
        threads: of a thread block; `LEAF_THREADS` must be the same.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses the source.
    """

    def __init__(self, defines: Mapping[str, int] | None = None, threads: int = THREADS) -> None:
        self._kernels = load("leaf_digest", defines)
        self._threads = threads
        for name in ("leaf_digest", "leaf_digest_any"):
            self._kernels[name].max_dynamic_shared_size_bytes = BESIDE_BYTES

    def plan(self, pieces: Pieces) -> DigestPlan:
        """Sorts pieces by kernel and brings them to the device.

        Args:
            pieces: from `make_pieces`, addresses that the current device can read.
        """
        aligned, other = plan_pieces(pieces)
        return DigestPlan(upload(aligned, leaf_total(aligned)), upload(other, leaf_total(other)))

    def digest(self, plan: DigestPlan, seed: int, table: int, *, beside: bool = False) -> None:
        """Digests all leaves of a plan, in at most two launches on the current stream.

        Args:
            plan: of `plan`; kept by the caller until the stream is through.
            seed: 0 to 2**64 - 1.
            table: address of uint8[rows, 16], a multiple of 16, that the device can write.
            beside: something is being copied into this memory: leaves it most of the memory's speed.
        """
        room = BESIDE_BYTES if beside else 0
        self._launch("leaf_digest", MEMBERS, plan.aligned, seed, table, room=room)
        self._launch("leaf_digest_any", MEMBERS_ANY, plan.other, seed, table, room=room)

    def digest_copy(self, plan: DigestPlan, seed: int, table: int) -> None:
        """Digests the source's leaves and copies what was read to the pieces' targets, reading once.

        For the source only: see this module's text. Arguments as for `digest`.

        Raises:
            ValueError: the plan has leaves for the plain kernel, which doesn't copy.
        """
        if plan.other.number:
            raise ValueError("a digesting copy takes whole aligned leaves only: copy and digest the others")
        self._launch("leaf_digest_copy", MEMBERS, plan.aligned, seed, table)

    def warm_up(self) -> None:
        """Launches every kernel once on a little memory and waits: first uses take milliseconds."""
        data, table = cupy.zeros(1024, dtype=cupy.uint8), cupy.empty((2, DIGEST_BYTES), dtype=cupy.uint8)
        out = cupy.empty_like(data)
        pieces = make_pieces([data.data.ptr], [512], 512, [0], [out.data.ptr])
        plan = self.plan(pieces)
        for name, members in (
            ("leaf_digest", MEMBERS),
            ("leaf_digest_copy", MEMBERS),
            ("leaf_digest_any", MEMBERS_ANY),
        ):
            self._launch(name, members, plan.aligned, 0, table.data.ptr)
        cupy.cuda.get_current_stream().synchronize()

    def _launch(
        self, name: str, members: int, records: Records, seed: int, table: int, *, room: int = 0
    ) -> None:
        if not records.work:
            return
        grid = -(-records.work * members // self._threads)
        arguments = (*records.arguments, np.uint64(seed), np.uint64(table))
        self._kernels[name]((grid,), (self._threads,), arguments, shared_mem=room)
