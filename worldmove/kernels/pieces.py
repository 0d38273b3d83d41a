"""What one launch of the leaf digest takes: pieces of memory, many at once, anywhere.

A piece is a row of leaves of one size, of which only the last may be short. This module says how pieces are
laid out for the kernels (`leaf_digest.cu`), and which kernel takes which leaves; `digest_pieces` is the plain
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.kernels.addresses import Bytes, first_of, memory_at
from worldmove.kernels.leaf_digest import DIGEST_BYTES, digest_leaves

PIECE = np.dtype(
    [
        ("address", "<u8"),
        ("length", "<u8"),
        ("leaf_bytes", "<u8"),
        ("first_leaf", "<u8"),
        ("first", "<u8"),
        ("target", "<u8"),
    ]
)
"""One piece, as `struct Piece` in leaf_digest.cu.

`address` and `length` of the bytes; size of a leaf; row of the table for its first leaf; `first`: how many
leaves stand before it in the launch; `target`: where a digesting copy puts the bytes.
"""

ALIGNMENT = 16
LEAF_UNIT = 256

Pieces = npt.NDArray[np.void]
Numbers = Sequence[int] | npt.NDArray[np.integer]


class Plan(NamedTuple):
    """Pieces sorted by the kernel that takes them.

    Attributes:
        aligned: whole leaves of a multiple of 256 bytes at 16-byte addresses: the fast kernel's.
        other: what is left: odd addresses, odd leaf sizes, short ends.
    """

    aligned: Pieces
    other: Pieces


def make_pieces(
    addresses: Numbers,
    lengths: Numbers,
    leaf_bytes: Numbers | int,
    first_leaves: Numbers,
    targets: Numbers | None = None,
) -> Pieces:
    """Pieces from columns.

    Args:
        addresses: of the first byte, where a leaf begins.
        lengths: in bytes; a piece of zero bytes has no leaf.
        leaf_bytes: size of a leaf, of each piece or of all.
        first_leaves: row of the table for each piece's first leaf.
        targets: where `LeafDigest.digest_copy` copies the bytes to.

    Raises:
        ValueError: a leaf size is zero, or the columns differ in length.
    """
    pieces = np.zeros(len(addresses), dtype=PIECE)
    pieces["address"] = addresses
    pieces["length"] = lengths
    pieces["leaf_bytes"] = leaf_bytes
    pieces["first_leaf"] = first_leaves
    pieces["target"] = 0 if targets is None else targets
    if not np.all(pieces["leaf_bytes"]):
        raise ValueError("a leaf of zero bytes")
    return _numbered(pieces)


def leaves_of(pieces: Pieces) -> npt.NDArray[np.uint64]:
    """Number of leaves of each piece, short ones included."""
    size = pieces["leaf_bytes"]
    counts: npt.NDArray[np.uint64] = (pieces["length"] + size - np.uint64(1)) // size
    return counts


def leaf_total(pieces: Pieces) -> int:
    """Number of leaves of all pieces together."""
    return int(leaves_of(pieces).sum())


def plan_pieces(pieces: Pieces) -> Plan:
    """Divides pieces between the fast kernel and the plain one; every leaf is in exactly one of them."""
    unit, size = np.uint64(LEAF_UNIT), pieces["leaf_bytes"]
    placed = (pieces["address"] | pieces["target"]) % np.uint64(ALIGNMENT) == 0
    whole = np.where(placed & (size % unit == 0), pieces["length"] // size * size, 0)
    body, rest = pieces.copy(), pieces.copy()
    body["length"] = whole
    for column in ("address", "target"):
        rest[column] += whole
    rest["length"] -= whole
    rest["first_leaf"] += whole // size
    # A short leaf of whole 256 bytes is as good as any other, as a piece of its own.
    single = placed & (size % unit == 0) & (rest["length"] % unit == 0)
    ends, others = rest[single & (rest["length"] > 0)], rest[~single]
    ends["leaf_bytes"] = ends["length"]
    return Plan(_numbered(np.concatenate([body[whole > 0], ends])), _numbered(others[others["length"] > 0]))


def digest_pieces(pieces: Pieces, seed: int, table: Bytes) -> None:
    """Writes the digest of every leaf into its row: the reference of the kernels, for memory of this process.

    Args:
        pieces: with addresses of this process.
        seed: 0 to 2**64 - 1.
        table: uint8[rows, 16].
    """
    for piece, count in zip(pieces, leaves_of(pieces), strict=True):
        first, view = int(piece["first_leaf"]), memory_at(int(piece["address"]), int(piece["length"]))
        out = np.empty(int(count) * DIGEST_BYTES, dtype=np.uint8)
        digest_leaves(view.data, int(piece["leaf_bytes"]), seed, out.data)
        table[first : first + int(count)] = out.reshape(-1, DIGEST_BYTES)


def _numbered(pieces: Pieces) -> Pieces:
    pieces["first"] = first_of(leaves_of(pieces))
    return pieces
