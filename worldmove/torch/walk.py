"""Takes a nested state apart: its structure as nodes, and the memory that its tensors share, as blocks.

Whatever overlaps in memory is one block, whether the stack holds it as one tensor, as several views, or as a
tensor and a NumPy array: a block becomes one region, so aliases stay aliases.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from worldmove.errors import ManifestError, ValidationError
from worldmove.manifest import MAX_NAME, numpy_dtype
from worldmove.torch import format as fmt

MAX_DEPTH = 64
HOST = torch.device("cpu")

_TYPES = (
    "dict, list, tuple, torch.Tensor, numpy.ndarray, NumPy scalars, int, float, str, bytes, bool, None, "
    "torch.Generator"
)


class Leaf(NamedTuple):
    """A tensor or array: where it stands among the nodes, and the memory of its storage.

    `start` and `end` are addresses on `device`; both are equal where the storage is empty.
    """

    node: int
    value: Any
    path: str
    device: Any
    start: int
    end: int


class Block(NamedTuple):
    """Memory that overlapping leaves share. `name` is the shortest path that leads to it."""

    device: Any
    start: int
    end: int
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The shortest path to a leaf of it, the first of equally short ones."""
        return self.paths[0]

    @property
    def paths(self) -> list[str]:
        """All paths to it, in the order in which they would name it."""
        return sorted({leaf.path for leaf in self.leaves}, key=lambda path: (len(path), path))


class Walked(NamedTuple):
    """A state taken apart. At a leaf's place in `nodes` stands `None`; the root is the last node.

    `generators` are the objects by their node. `devices` are those of tensors and generators.
    """

    nodes: list[fmt.Node | None]
    leaves: list[Leaf]
    generators: dict[int, Any]
    devices: list[Any]


def walk(state: Any) -> Walked:
    """Takes a state apart without reading a byte of its tensors.

    Raises:
        ValidationError: it holds something that can't be moved; the message says where and what is allowed.
    """
    walker = _Walker()
    walker.visit(state, "", 0)
    return Walked(walker.nodes, walker.leaves, walker.generators, walker.devices)


def blocks(leaves: list[Leaf]) -> list[Block]:
    """The memory of all leaves, overlapping parts as one, ordered by name; empty leaves have none."""
    merged: list[tuple[Any, int, int, list[Leaf]]] = []
    order = sorted(
        (leaf for leaf in leaves if leaf.end > leaf.start), key=lambda leaf: (str(leaf.device), leaf.start)
    )
    for leaf in order:
        if merged and merged[-1][0] == leaf.device and leaf.start < merged[-1][2]:
            device, start, end, inside = merged.pop()
            merged.append((device, start, max(end, leaf.end), [*inside, leaf]))
        else:
            merged.append((leaf.device, leaf.start, leaf.end, [leaf]))
    found = [Block(device, start, end, tuple(inside)) for device, start, end, inside in merged]
    return sorted(found, key=lambda block: block.name)


def layout_of(block: Block) -> tuple[str, tuple[int, ...]]:
    """Element type and shape under which a block is registered.

    They are those of a tensor that covers it without gaps; else it is plain bytes.
    """
    for leaf in sorted(block.leaves, key=lambda leaf: (len(leaf.path), leaf.path)):
        value = leaf.value
        if isinstance(value, np.ndarray):
            dense, dtype = bool(value.flags.c_contiguous), dtype_of(value)
            nbytes = value.nbytes
        else:
            dense, dtype = value.is_contiguous(), dtype_of(value)
            nbytes = value.numel() * value.element_size()
        if dense and nbytes == block.nbytes and _is_plain(dtype):
            return dtype, tuple(int(size) for size in value.shape)
    return "uint8", (block.nbytes,)


def dtype_of(value: Any) -> str:
    """The element type's name: as in a manifest where that has one."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    kind: np.dtype[Any] = value.dtype
    return kind.name if kind.isnative and kind.kind in "biufc" else kind.str


def _is_plain(dtype: str) -> bool:
    if dtype == "bfloat16" or dtype.startswith("float8_"):
        return True
    try:
        numpy_dtype(dtype)
    except ManifestError:
        return False
    return True


class _Walker:
    def __init__(self) -> None:
        self.nodes: list[fmt.Node | None] = []
        self.leaves: list[Leaf] = []
        self.generators: dict[int, Any] = {}
        self.devices: list[Any] = []
        self._known: dict[Any, int] = {}
        self._open: set[int] = set()
        self._kept: list[Any] = []
        self._paths: set[str] = set()

    def visit(self, value: Any, path: str, depth: int) -> int:
        atom = _atom(value, path)
        if atom is not None:
            return self._once((type(value), atom), atom)
        known = self._known.get(id(value))
        if known is not None:
            return known
        if depth > MAX_DEPTH:
            raise _refused(path, f"lies deeper than {MAX_DEPTH} containers")
        if id(value) in self._open:
            raise _refused(path, "contains itself")
        self._open.add(id(value))
        node = self._compound(value, path, depth)
        self._open.discard(id(value))
        self._kept.append(value)  # an id means something only while its object lives
        self._known[id(value)] = number = len(self.nodes)
        self.nodes.append(node)
        return number

    def _once(self, key: Any, node: fmt.Node) -> int:
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def _compound(self, value: Any, path: str, depth: int) -> fmt.Node | None:
        kind = type(value)
        if kind is dict:
            keys = [self._key(key, path) for key in value]
            return fmt.Dict(keys, list(self._items(value.items(), path, depth)))
        if kind is list:
            return fmt.List(list(self._items(enumerate(value), path, depth)))
        if kind is tuple:
            return fmt.Tuple(list(self._items(enumerate(value), path, depth)))
        if kind is torch.Tensor:
            self.leaves.append(_tensor(value, len(self.nodes), self._path(path)))
            self._note(value.device)
            return None
        if kind is np.ndarray:
            self.leaves.append(_array(value, len(self.nodes), self._path(path)))
            self._note(HOST)
            return None
        if kind is torch.Generator:
            self.generators[len(self.nodes)] = value
            return fmt.Generator(
                self._note(value.device), value.get_state().numpy().tobytes(), _is_default(value)
            )
        raise _refused(path, f"is a {kind.__module__}.{kind.__qualname__}; allowed: {_TYPES}")

    def _items(self, items: Any, path: str, depth: int) -> Iterator[int]:
        for key, value in items:
            yield self.visit(value, f"{path}.{key}" if path else str(key), depth + 1)

    def _key(self, key: Any, path: str) -> int:
        parts = key if type(key) is tuple else (key,)
        if any(_atom(part, path) is None or isinstance(part, np.generic) for part in parts):
            raise _refused(path, f"has the key {key!r}; allowed: scalars and tuples of scalars")
        return self.visit(key, path, 0)

    def _note(self, device: Any) -> int:
        if device not in self.devices:
            self.devices.append(device)
        return self.devices.index(device)

    def _path(self, path: str) -> str:
        """The path as a region's name: plain characters, short enough, and nobody else's."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", path) or "state"
        if len(name) > MAX_NAME - 32:
            digest = hashlib.blake2b(path.encode(errors="replace"), digest_size=8).hexdigest()
            name = f"{name[: MAX_NAME - 64]}-{digest}"
        unique, number = name, 1
        while unique in self._paths:
            number += 1
            unique = f"{name}-{number}"
        self._paths.add(unique)
        return unique


def _atom(value: Any, path: str) -> fmt.Node | None:  # noqa: PLR0911 - one for each kind
    """A value without parts, as a node; `None` for anything else."""
    kind = type(value)
    if value is None:
        return fmt.Nothing()
    if kind is bool:
        return fmt.Bool(value)
    if kind is int:
        if -(1 << 63) <= value < 1 << 63:
            return fmt.Int(value)
        return fmt.BigInt(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if kind is float:
        return fmt.Float(struct.pack("<d", value))
    if kind is str:
        return fmt.Text(value)
    if kind is bytes:
        return fmt.Bytes(value)
    if isinstance(value, np.generic):
        if value.dtype.fields is not None or not _is_plain(value.dtype.str):
            raise _refused(path, f"is a NumPy scalar of type {value.dtype}")
        return fmt.Scalar(value.dtype.str, value.tobytes())
    return None


def _tensor(value: Any, node: int, path: str) -> Leaf:
    for wrong, what in (
        (value.layout != torch.strided, "is not strided; .to_dense() makes it so"),
        (value.device.type not in ("cpu", "cuda"), f"lies on {value.device}; allowed: cpu, cuda"),
        (value.requires_grad, "takes part in autograd; .detach() takes it out"),
        (value.is_quantized, "is quantised; its integer representation can be moved"),
        (value.is_conj() or value.is_neg(), "is a lazy conjugate; .resolve_conj().resolve_neg() ends that"),
    ):
        if wrong:
            raise _refused(path, what)
    storage = value.untyped_storage()
    start = storage.data_ptr()
    return Leaf(node, value, path, value.device, start, start + storage.nbytes())


def _array(value: np.ndarray[Any, Any], node: int, path: str) -> Leaf:
    if value.dtype.fields is not None or not _is_plain(value.dtype.str):
        raise _refused(path, f"has elements of type {value.dtype}; plain ones of fixed size can be moved")
    owner = value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start, end = np.lib.array_utils.byte_bounds(owner)
    if owner.size == 0:
        start = end = value.ctypes.data
    return Leaf(node, value, path, HOST, start, end)


def _is_default(generator: Any) -> bool:
    if generator is torch.default_generator:
        return True
    if generator.device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    return any(generator is each for each in torch.cuda.default_generators)


def _refused(path: str, what: str) -> ValidationError:
    where = f"state[{path!r}]" if path else "the state"
    return ValidationError(f"{where} {what}", field="state")
