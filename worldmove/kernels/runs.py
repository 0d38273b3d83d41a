"""Runs of bytes: copied, gathered, scattered, filled and read, many in one launch.

This module says how runs are laid out for the kernels (`runs.cuh`), and has the plain references, which take
the same runs with addresses of this process. Runs of one launch are worked on in any order and at once: the
target of one may overlap neither another target nor any source. To shift bytes within a buffer, gather first,
then scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worldmove.kernels.addresses import first_of, memory_at

RUN = np.dtype([("source", "<u8"), ("target", "<u8"), ("length", "<u8"), ("first", "<u8")])
"""One run, as `struct Run` in runs.cuh.

`first`: how many tiles stand before it in the launch. A copy takes the 16-byte path where source and
target are equal modulo 16, and goes byte by byte otherwise.
"""

TILE_BYTES = 65536
PACK_ALIGNMENT = 16

Runs = npt.NDArray[np.void]
Numbers = Sequence[int] | npt.NDArray[np.integer]


def make_runs(sources: Numbers, targets: Numbers, lengths: Numbers) -> Runs:
    """Runs from columns; those of zero bytes are left out.

    Raises:
        ValueError: the columns differ in length.
    """
    runs = np.zeros(len(sources), dtype=RUN)
    runs["source"], runs["target"], runs["length"] = sources, targets, lengths
    runs = runs[runs["length"] > 0]
    runs["first"] = first_of(tiles_of(runs))
    return runs


def gather_runs(sources: Numbers, lengths: Numbers, packed: int) -> Runs:
    """Runs that bring scattered bytes together in one buffer, in order.

    Args:
        sources: addresses.
        lengths: in bytes.
        packed: the buffer's address. Every run gets a place there by `packed_places`.
    """
    return make_runs(sources, packed_places(sources, lengths) + np.uint64(packed), lengths)


def scatter_runs(targets: Numbers, lengths: Numbers, packed: int) -> Runs:
    """Runs that bring packed bytes back to where they belong: `gather_runs` the other way round.

    The places in the buffer depend on the addresses modulo 16 and on the lengths alone, so they are the same
    at two ends whose addresses are equal modulo 16 (arenas: always).
    """
    return make_runs(packed_places(targets, lengths) + np.uint64(packed), targets, lengths)


def packed_places(addresses: Numbers, lengths: Numbers) -> npt.NDArray[np.uint64]:
    """Offset of each run in a packed buffer whose address is a multiple of 16.

    A run begins at the next 16-byte boundary plus its address modulo 16: both sides of the copy are then
    equally aligned, at a cost of at most 30 bytes a run.
    """
    unit = np.uint64(PACK_ALIGNMENT)
    skew = np.asarray(addresses, dtype=np.uint64) % unit
    room = (skew + np.asarray(lengths, dtype=np.uint64) + unit - np.uint64(1)) // unit * unit
    places: npt.NDArray[np.uint64] = first_of(room) + skew
    return places


def packed_bytes(addresses: Numbers, lengths: Numbers) -> int:
    """Size of the packed buffer that `packed_places` needs."""
    if len(lengths) == 0:
        return 0
    return int(packed_places(addresses, lengths)[-1]) + int(lengths[-1])


def tiles_of(runs: Runs) -> npt.NDArray[np.uint64]:
    """Number of tiles of each run."""
    counts: npt.NDArray[np.uint64] = (runs["length"] + np.uint64(TILE_BYTES - 1)) // np.uint64(TILE_BYTES)
    return counts


def tile_total(runs: Runs) -> int:
    """Number of tiles of all runs together."""
    return int(tiles_of(runs).sum())


def copy_runs(runs: Runs) -> None:
    """Copies every run: the reference of copy_runs.cu."""
    for run in runs:
        length = int(run["length"])
        memory_at(int(run["target"]), length)[:] = memory_at(int(run["source"]), length)


def fill_runs(runs: Runs, value: int) -> None:
    """Writes the byte `value` all over every run's target: the reference of fill_runs.cu."""
    for run in runs:
        memory_at(int(run["target"]), int(run["length"]))[:] = value


def read_runs(runs: Runs) -> int:
    """XOR of all 64-bit words of all sources: the reference of read_runs.cu.

    Runs begin at 16-byte addresses and are multiples of 16 long.
    """
    total = 0
    for run in runs:
        words = memory_at(int(run["source"]), int(run["length"])).view(np.uint64)
        total ^= int(np.bitwise_xor.reduce(words))
    return total
