"""The digest of leaves on the host: XXH3-128 with a seed, by stock `xxhash`.

This is the reference that every other implementation must equal to the bit; the host's executor runs it.
"""

from __future__ import annotations

import hashlib

import xxhash

DIGEST_BYTES = 16
HASH_BYTES = 32
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)


def leaf_count(nbytes: int, leaf_bytes: int) -> int:
    """Number of leaves of `nbytes` bytes; the last one may be short."""
    return -(-nbytes // leaf_bytes)


def digest_leaves(view: memoryview, leaf_bytes: int, seed: int, out: memoryview) -> None:
    """Digests consecutive leaves of `view`.

    Args:
        view: bytes that begin at a leaf's boundary; the last leaf may be short.
        leaf_bytes: size of every leaf but the last.
        seed: 0 to 2**64 - 1.
        out: writable, 16 bytes for each leaf: the canonical (big-endian) form of XXH3-128, as the
            xxHash specification defines it and `xxhash.xxh3_128_digest` returns it.

    Raises:
        ValueError: `out` has another size than `16 * leaf_count(len(view), leaf_bytes)`.
    """
    digest = xxhash.xxh3_128_digest
    size = len(view)
    out[:] = b"".join(
        [digest(view[start : start + leaf_bytes], seed) for start in range(0, size, leaf_bytes)]
    )


def hash_bytes(data: bytes | memoryview) -> bytes:
    """BLAKE2b-256 (RFC 7693, 32-byte digest, no key): `b2sum -l 256`."""
    state = _EMPTY.copy()  # quicker than a new one with its options
    state.update(data)
    return state.digest()
