"""What a session is made of: regions, their leaves, and where they lie in memory.

Three coordinate systems meet here and nowhere else:

* a *leaf index* counts leaves over all regions of a manifest, in manifest order; equal on both nodes;
* a *span* `(region, offset, length)` names bytes of one region by its index; equal on both nodes;
* a *place* `(extent, offset)` says where a region lies in this node's memory; private to a node.
"""

from __future__ import annotations

import math
import re
import warnings
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worldmove.errors import ManifestError

HOST = "host"
"""The device that is the host's memory."""
REGION_ALIGN = 512
MIN_LEAF = 8 * 1024
MAX_LEAF = 256 * 1024
DEFAULT_LEAF = 64 * 1024
LEAF_STEP = 256
DIGEST_BYTES = 16
MAX_REGIONS = 4096
MAX_RANKS = 64
MAX_NAME = 128
MAX_DIMS = 16
MAX_DTYPE = 32
MAX_DEVICE = 64
MAX_REGION_BYTES = 1 << 40
MAX_SESSION_BYTES = 1 << 42
MAX_SNAPSHOT_EVERY = 1_000_000
MAX_HOST_STATE = 4 * 1024 * 1024
MAX_HOST_STATES = 7 * 1024 * 1024
"""Bytes of all ranks' host states together: a move carries them in one message."""

DEVICE = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""UUID of a GPU, or of a MIG slice of one, as the driver's tools show it."""

RAW_DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1}
"""Element types that NumPy lacks; they are moved as raw bytes and viewed as unsigned integers."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a region's memory comes from.

    `arena`: allocated by the node. `shm`: POSIX shared memory `name`, starting `offset` bytes in. `cuda-ipc`:
    a GPU's memory by `handle` (64 bytes, base64), `offset` bytes in, of a process in `pid_namespace`.
    """

    kind: Literal["arena", "shm", "cuda-ipc"] = "arena"
    name: str | None = None
    offset: int = 0
    handle: str | None = None
    pid_namespace: int | None = None


class Region(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One named contiguous tensor. `shape` in elements; `stride_bytes` is what a rolling cache shifts by."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = HOST
    rank: int = 0
    stride_bytes: int | None = None
    source: Source = Source()

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 where any dimension is 0."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def leaf_bytes(self) -> int:
        """Size in bytes of every leaf but the last, by the rule of `leaf_size`."""
        return leaf_size(self.stride_bytes)

    @property
    def leaves(self) -> int:
        """Number of leaves; 0 for an empty region."""
        return -(-self.nbytes // self.leaf_bytes)


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The frozen, revisioned description of a session's regions.

    `snapshot_every`: blocks from one spare copy of its state to the next, 0 for none.
    """

    model: str
    regions: tuple[Region, ...]
    block_ms: float
    horizon_ms: float
    host_state_bytes: int = 64 * 1024
    endpoint: str | None = None
    revision: int = 1
    snapshot_every: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all regions together."""
        return sum(region.nbytes for region in self.regions)

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs on which regions lie, in the regions' order."""
        return tuple(dict.fromkeys(region.device for region in self.regions if region.device != HOST))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold regions, ascending; a session without regions has rank 0."""
        return tuple(sorted({region.rank for region in self.regions})) or (0,)


class Place(NamedTuple):
    """Where one region lies: index of an extent and the offset in bytes inside it."""

    extent: int
    offset: int


class Extent(msgspec.Struct, frozen=True, gc=False):
    """One allocation: everything of one rank on one device."""

    rank: int
    device: str
    nbytes: int


class Span(NamedTuple):
    """Bytes of one region: `region` is its index in the manifest."""

    region: int
    offset: int
    length: int


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        ManifestError: the name is neither a plain NumPy dtype nor one of `RAW_DTYPES`.
    """
    if dtype in RAW_DTYPES:
        return RAW_DTYPES[dtype]
    return numpy_dtype(dtype).itemsize


@lru_cache(maxsize=256)
def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy type under which a region is viewed: bf16 as uint16, fp8 as uint8.

    Raises:
        ManifestError: the name is unknown, or the type holds Python objects or has no size.
    """
    if dtype in RAW_DTYPES:
        return np.dtype(np.uint16 if RAW_DTYPES[dtype] == 2 else np.uint8)
    # NumPy reads an unprintable name as a type's number, and "a5" (deprecated) as bytes.
    plain = 1 <= len(dtype) <= MAX_DTYPE and dtype.isascii() and dtype.isprintable()
    if not plain or dtype.lstrip("<>=|").startswith("a"):
        raise ManifestError(
            f"dtype {dtype[:MAX_DTYPE]!r} is unknown; NumPy names and {sorted(RAW_DTYPES)} are allowed",
            field="dtype",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a name that NumPy means to drop is not let in
            parsed = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError, Warning) as error:
        raise ManifestError(
            f"dtype {dtype!r} is unknown; NumPy names and {sorted(RAW_DTYPES)} are allowed", field="dtype"
        ) from error
    if parsed.hasobject or parsed.itemsize == 0 or parsed.fields is not None or parsed.subdtype is not None:
        raise ManifestError(f"dtype {dtype!r} is not a plain element type of fixed size", field="dtype")
    return parsed


def leaf_size(stride_bytes: int | None) -> int:
    """The leaf rule of DESIGN §2; bytes."""
    if not stride_bytes:
        return DEFAULT_LEAF
    top = min(stride_bytes, MAX_LEAF) // LEAF_STEP * LEAF_STEP
    for candidate in range(top, MIN_LEAF - 1, -LEAF_STEP):
        if stride_bytes % candidate == 0:
            return candidate
    return DEFAULT_LEAF


def layout(regions: tuple[Region, ...]) -> tuple[tuple[Extent, ...], tuple[Place, ...]]:
    """Packs regions into one extent per (rank, device), each region at a multiple of 512 bytes.

    Returns:
        The extents, ordered by (rank, device), and one place for every region in manifest order.
        An extent is never empty: one that holds only zero-byte regions has 512 bytes.
    """
    keys = sorted({(region.rank, region.device) for region in regions})
    index = {key: number for number, key in enumerate(keys)}
    used = [0] * len(keys)
    places = []
    for region in regions:
        extent = index[region.rank, region.device]
        places.append(Place(extent, used[extent]))
        used[extent] += -(-region.nbytes // REGION_ALIGN) * REGION_ALIGN
    extents = tuple(
        Extent(rank, device, max(size, REGION_ALIGN)) for (rank, device), size in zip(keys, used, strict=True)
    )
    return extents, tuple(places)


class LeafMap:
    """Translates leaf indices of one manifest to spans, vectorised.

    Attributes:
        count: leaves of all regions.
        first: int64[regions + 1]; leaves of region r are `first[r]` to `first[r + 1] - 1`.
        leaf_bytes: int64[regions]; nbytes: int64[regions].
        total: bytes of all regions together.
    """

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.nbytes = np.array([region.nbytes for region in regions], dtype=np.int64)
        self.total = int(self.nbytes.sum())
        self.leaf_bytes = np.array([region.leaf_bytes for region in regions], dtype=np.int64)
        leaves = -(-self.nbytes // self.leaf_bytes) if len(regions) else np.zeros(0, dtype=np.int64)
        self.first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(leaves)])
        self.count = int(self.first[-1])
        self._edges = np.unique(self.first)

    def runs(self, leaves: npt.NDArray[np.int64]) -> list[Span]:
        """Turns ascending leaf indices into the fewest spans; a span never crosses a region's end."""
        if leaves.size == 0:
            return []
        breaks = np.flatnonzero(np.diff(leaves) != 1) + 1
        starts = leaves[np.concatenate([[0], breaks])]
        stops = leaves[np.concatenate([breaks, [leaves.size]]) - 1] + 1
        inside = self._edges[self._edges < stops[-1]]
        run = np.searchsorted(starts, inside) - 1
        inside = inside[(run >= 0) & (inside < stops[run])]
        starts = np.sort(np.concatenate([starts, inside]))
        stops = np.sort(np.concatenate([stops, inside]))
        owner = np.searchsorted(self.first, starts, side="right") - 1
        begin = (starts - self.first[owner]) * self.leaf_bytes[owner]
        end = np.minimum((stops - self.first[owner]) * self.leaf_bytes[owner], self.nbytes[owner])
        return [Span(int(r), int(b), int(e - b)) for r, b, e in zip(owner, begin, end, strict=True)]

    def leaves_of(self, span: Span) -> tuple[int, int]:
        """First leaf index and number of leaves that `span` touches; an empty span touches none."""
        size = int(self.leaf_bytes[span.region])
        first = span.offset // size
        last = -(-(span.offset + span.length) // size) if span.length else first
        return int(self.first[span.region]) + first, last - first

    def whole(self) -> list[Span]:
        """Every region that has bytes, whole."""
        return [Span(region, 0, nbytes) for region, nbytes in enumerate(self.nbytes.tolist()) if nbytes]

    def spans(self, first: int, count: int) -> list[Span]:
        """The spans of `count` leaves from index `first`."""
        return self.runs(np.arange(first, first + count, dtype=np.int64))

    def bytes_of(self, leaves: npt.NDArray[np.int64]) -> int:
        """Bytes of the given leaves together (the last leaf of a region may be short)."""
        return sum(span.length for span in self.runs(leaves))


def validate(manifest: Manifest) -> None:
    """Checks everything that later code takes for granted.

    Raises:
        ManifestError: with the field, its value and what is allowed.
    """
    _check_session(manifest)
    names = set()
    for number, region in enumerate(manifest.regions):
        _check_region(number, region)
        if region.name in names:
            raise ManifestError(
                f"regions[{number}].name {region.name!r} stands twice; names are unique",
                field=f"regions[{number}].name",
            )
        names.add(region.name)
    if manifest.nbytes > MAX_SESSION_BYTES:
        raise ManifestError(
            f"regions hold {manifest.nbytes} bytes; at most {MAX_SESSION_BYTES} are allowed", field="regions"
        )


def _check_session(manifest: Manifest) -> None:
    for name in ("block_ms", "horizon_ms"):
        value = getattr(manifest, name)
        if not (math.isfinite(value) and value > 0):
            raise ManifestError(
                f"{name} is {value}; a finite number of milliseconds above 0 is allowed", field=name
            )
    if not 0 <= manifest.snapshot_every <= MAX_SNAPSHOT_EVERY:
        raise ManifestError(
            f"snapshot_every is {manifest.snapshot_every}; 0 to {MAX_SNAPSHOT_EVERY} blocks are allowed",
            field="snapshot_every",
        )
    if not 0 <= manifest.host_state_bytes <= MAX_HOST_STATE:
        raise ManifestError(
            f"host_state_bytes is {manifest.host_state_bytes}; 0 to {MAX_HOST_STATE} are allowed",
            field="host_state_bytes",
        )
    # Both are shown on terminals and in logs, which control characters could rewrite.
    if not 1 <= len(manifest.model) <= 256 or not manifest.model.isprintable():
        raise ManifestError("model must have 1 to 256 printable characters", field="model")
    if not (manifest.endpoint or "").isprintable():
        raise ManifestError("endpoint must have printable characters only", field="endpoint")
    if len(manifest.regions) > MAX_REGIONS:
        raise ManifestError(
            f"{len(manifest.regions)} regions; at most {MAX_REGIONS} are allowed", field="regions"
        )
    ranks = manifest.ranks
    if ranks != tuple(range(len(ranks))) or len(ranks) > MAX_RANKS:
        raise ManifestError(
            f"ranks are {list(ranks)}; 0 to n - 1 without gaps, at most {MAX_RANKS}, are allowed",
            field="regions.rank",
        )
    if manifest.host_state_bytes * len(ranks) > MAX_HOST_STATES:
        raise ManifestError(
            f"host_state_bytes is {manifest.host_state_bytes} for {len(ranks)} ranks; "
            f"{MAX_HOST_STATES} for all of them together are allowed",
            field="host_state_bytes",
        )


def _check_region(number: int, region: Region) -> None:
    where = f"regions[{number}]"
    if not 1 <= len(region.name) <= MAX_NAME or not region.name.isprintable():
        raise ManifestError(
            f"{where}.name must have 1 to {MAX_NAME} printable characters", field=f"{where}.name"
        )
    if len(region.shape) > MAX_DIMS or any(size < 0 for size in region.shape):
        raise ManifestError(
            f"{where}.shape {list(region.shape)} must have at most {MAX_DIMS} dimensions of 0 or more",
            field=f"{where}.shape",
        )
    try:
        item = itemsize(region.dtype)
    except ManifestError as error:
        raise ManifestError(f"{where}.{error.message}", field=f"{where}.dtype") from error
    # Dimensions beside a zero are bounded too: no array can be viewed under them otherwise.
    bound = math.prod(max(size, 1) for size in region.shape) * item
    if bound > MAX_REGION_BYTES:
        raise ManifestError(
            f"{where}.shape {list(region.shape)} takes {bound} bytes; {MAX_REGION_BYTES} are allowed",
            field=f"{where}.shape",
        )
    if region.stride_bytes is not None and not 0 < region.stride_bytes <= max(region.nbytes, 1):
        raise ManifestError(
            f"{where}.stride_bytes {region.stride_bytes} must lie in 1 to {region.nbytes}",
            field=f"{where}.stride_bytes",
        )
    if region.device != HOST and DEVICE.fullmatch(region.device) is None:
        raise ManifestError(
            f"{where}.device {region.device[:MAX_DEVICE]!r} is no device; allowed: 'host', or the UUID of a "
            "GPU such as 'GPU-…' or 'MIG-…'",
            field=f"{where}.device",
        )
    source = region.source
    if source.kind != "arena" and (source.kind == "shm") != (region.device == HOST):
        raise ManifestError(
            f"{where}.source.kind is {source.kind!r} and device is {region.device!r}; allowed: 'arena', "
            "'shm' for host memory, 'cuda-ipc' for a GPU's",
            field=f"{where}.source.kind",
        )
    lacking = {"shm": "name", "cuda-ipc": "handle"}.get(source.kind)
    if lacking is not None and not getattr(source, lacking):
        raise ManifestError(
            f"{where}.source.{lacking} is missing; it says which memory", field=f"{where}.source.{lacking}"
        )
    if source.offset < 0:
        raise ManifestError(
            f"{where}.source.offset {source.offset} must be 0 or more", field=f"{where}.source.offset"
        )
