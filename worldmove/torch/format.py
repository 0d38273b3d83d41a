"""The host state of a nested state: a MessagePack document without code, bounded and checked (docs/torch.md).

It holds the structure and everything that is no tensor; tensors are views of regions. Values stand in one
flat list in which each refers only to earlier ones: reading needs no recursion, and there are no circles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from worldmove.errors import ValidationError
from worldmove.manifest import MAX_HOST_STATE

MAGIC = "worldmove-state"
VERSION = 1
MAX_DIMS = 64
MAX_DTYPE = 32
MAX_ELEMENTS = 1 << 62


class Nothing(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """`None`."""


class Bool(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A `bool`."""

    value: bool


class Int(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """An `int` of at most 64 bits, signed."""

    value: int


class BigInt(msgspec.Struct, frozen=True, array_like=True, tag="I"):
    """Any other `int`: two's complement, big endian."""

    value: bytes


class Float(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A `float`: its eight bytes, little endian, so that every NaN stays the one that it is."""

    value: bytes


class Text(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A `str`."""

    value: str


class Bytes(msgspec.Struct, frozen=True, array_like=True, tag="y"):
    """A `bytes`."""

    value: bytes


class List(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A `list`: indices of its items."""

    items: list[int]


class Tuple(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """A `tuple`: indices of its items."""

    items: list[int]


class Dict(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A `dict` in its order: indices of keys (scalars, or tuples of scalars) and of values."""

    keys: list[int]
    values: list[int]


class Tensor(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A `torch.Tensor`: `strides` in elements, `offset` in bytes from the beginning of `memory`."""

    dtype: str
    shape: list[int]
    strides: list[int]
    memory: int
    offset: int


class Array(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A `numpy.ndarray`: `strides` and `offset` in bytes."""

    dtype: str
    shape: list[int]
    strides: list[int]
    memory: int
    offset: int
    writable: bool


class Scalar(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A NumPy scalar: its type and its bytes."""

    dtype: str
    value: bytes


class Generator(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """A `torch.Generator`: index of its device, its state, and whether it is that device's default one."""

    device: int
    state: bytes
    default: bool


Node = (
    Nothing
    | Bool
    | Int
    | BigInt
    | Float
    | Text
    | Bytes
    | List
    | Tuple
    | Dict
    | Tensor
    | Array
    | Scalar
    | Generator
)
ATOMS = (Nothing, Bool, Int, BigInt, Float, Text, Bytes)


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What tensors are views of: bytes of a region, or nothing at all (empty ones). `device` is an index."""

    region: str | None
    device: int
    offset: int
    nbytes: int


class Document(msgspec.Struct, frozen=True, array_like=True):
    """A whole state; its root is the last node. `devices` are types (`cpu`, `cuda`), numbered from 0."""

    magic: str
    version: int
    devices: list[str]
    memory: list[Memory]
    nodes: list[Node]


def encode(document: Document) -> bytes:
    """The document's bytes.

    Raises:
        ValidationError: a text in it is no Unicode.
    """
    try:
        return msgspec.msgpack.encode(document)
    except UnicodeEncodeError as error:
        raise ValidationError(f"a text of the state can't be written: {error}", field="state") from error


def decode(data: bytes) -> Document:
    """The document of `encode`, with every reference checked.

    Raises:
        ValidationError: it is none, or of another version, or a reference in it leads nowhere.
    """
    if len(data) > MAX_HOST_STATE:
        raise _invalid(f"has {len(data)} bytes; at most {MAX_HOST_STATE} are allowed")
    try:
        document = msgspec.msgpack.decode(data, type=Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _invalid(str(error)) from error
    if (document.magic, document.version) != (MAGIC, VERSION):
        raise _invalid(f"is {document.magic[:32]!r} version {document.version}; {MAGIC!r} {VERSION} is read")
    if not document.nodes:
        raise _invalid("is empty")
    for memory in document.memory:
        _index(memory.device, len(document.devices), "device")
    for number, node in enumerate(document.nodes):
        _check_node(document, number, node)
    return document


def _check_node(document: Document, number: int, node: Node) -> None:
    match node:
        case List(items=items) | Tuple(items=items):
            for item in items:
                _index(item, number, "value")
        case Dict(keys=keys, values=values):
            if len(keys) != len(values):
                raise _invalid(f"has a dictionary of {len(keys)} keys and {len(values)} values")
            for key in keys:
                _check_key(document, _index(key, number, "key"))
            for value in values:
                _index(value, number, "value")
        case Tensor() | Array():
            _index(node.memory, len(document.memory), "memory")
            if not len(node.shape) == len(node.strides) <= MAX_DIMS or len(node.dtype) > MAX_DTYPE:
                raise _invalid(f"has a tensor {node.dtype[:MAX_DTYPE]!r} of {len(node.shape)} dimensions")
        case Generator(device=device):
            _index(device, len(document.devices), "device")
        case Float(value=raw):
            if len(raw) != 8:
                raise _invalid(f"has a float of {len(raw)} bytes")
        case _:
            pass


def _check_key(document: Document, key: int) -> None:
    """Tuples inside tuples would be hashed in a time that doubles with each of a few bytes."""
    node = document.nodes[key]
    parts = [document.nodes[item] for item in node.items] if isinstance(node, Tuple) else [node]
    if not all(isinstance(part, ATOMS) for part in parts):
        raise _invalid("has a key that is neither a scalar nor a tuple of scalars")


def check_view(shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int, nbytes: int) -> None:
    """Makes sure that a view stays inside its memory.

    Args:
        shape: in elements.
        strides: in bytes.
        offset: of the first element, in bytes.
        itemsize: bytes of one element.
        nbytes: of the memory.

    Raises:
        ValidationError: it does not, or has more elements than can be counted.
    """
    elements = 1
    for size in shape:
        elements *= max(size, 1)
        if size < 0 or elements > MAX_ELEMENTS:
            raise _invalid(f"has a tensor of shape {list(shape)}")
    if any(abs(stride) > MAX_ELEMENTS for stride in strides):
        raise _invalid(f"has a tensor of strides {list(strides)}")
    low = high = offset
    if 0 not in shape:
        steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        low += sum(step for step in steps if step < 0)
        high += sum(step for step in steps if step > 0) + itemsize
    if low < 0 or high > nbytes:
        raise _invalid(f"has a tensor at bytes {low} to {high} of a memory of {nbytes}")


def _index(value: int, end: int, what: str) -> int:
    if not 0 <= value < end:
        raise _invalid(f"refers to {what} {value} of {end}")
    return value


def _invalid(why: str) -> Any:
    return ValidationError(f"the host state {why}", field="host_state")
