"""Puts a state together again: the structure from a document, its tensors as views of a world's regions."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from worldmove.errors import ValidationError
from worldmove.manifest import numpy_dtype
from worldmove.torch import format as fmt
from worldmove.torch.arena import Arena
from worldmove.torch.walk import HOST


def build(document: fmt.Document, arena: Arena, generators: Mapping[int, Any] | None = None) -> Any:
    """The state that a document describes. Tensors of one region share one storage.

    A default generator is restored in this process's own default generator of the device.

    Args:
        document: of `format.decode`.
        arena: the regions that it refers to.
        generators: objects to be used for generators, by node, as they are.

    Raises:
        ValidationError: a view leaves its region, or something can't be made here.
    """
    builder = _Builder(document, arena, generators or {})
    for number, node in enumerate(document.nodes):
        try:
            builder.values.append(builder.value(number, node))
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise _invalid(f"has a {type(node).__name__} that can't be made here: {error}") from error
    return builder.values[-1]


class _Builder:
    def __init__(self, document: fmt.Document, arena: Arena, generators: Mapping[int, Any]) -> None:
        self.values: list[Any] = []
        self._document = document
        self._generators = generators
        self._devices = _devices(document, arena)
        self._parts = [
            None if each.region is None else arena.part(each.region, each.offset, each.nbytes)
            for each in document.memory
        ]

    def value(self, number: int, node: fmt.Node) -> Any:  # noqa: PLR0911 - one for each kind of node
        match node:
            case fmt.List(items=items):
                return [self.values[item] for item in items]
            case fmt.Tuple(items=items):
                return tuple(self.values[item] for item in items)
            case fmt.Dict():
                return self._dict(node)
            case fmt.Tensor():
                return self._tensor(node)
            case fmt.Array():
                return self._array(node)
            case fmt.Scalar(dtype=dtype, value=raw):
                return _scalar(dtype, raw)
            case fmt.Generator():
                given = self._generators.get(number)
                return self._generator(node) if given is None else given
            case fmt.Nothing():
                return None
            case fmt.BigInt(value=raw):
                return int.from_bytes(raw, "big", signed=True)
            case fmt.Float(value=raw):
                return struct.unpack("<d", raw)[0]
            case _:
                return node.value

    def _dict(self, node: fmt.Dict) -> dict[Any, Any]:
        pairs = zip(node.keys, node.values, strict=True)
        made = {self.values[key]: self.values[value] for key, value in pairs}
        if len(made) != len(node.keys):
            raise _invalid("has a dictionary with a key that stands twice")
        return made

    def _tensor(self, node: fmt.Tensor) -> Any:
        dtype = getattr(torch, node.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _invalid(f"has a tensor of type {node.dtype!r}, which this version of torch hasn't")
        if any(stride < 0 for stride in node.strides):
            raise _invalid(f"has a tensor of strides {node.strides}")
        size = int(dtype.itemsize)
        raw = self._parts[node.memory]
        strides = [stride * size for stride in node.strides]
        fmt.check_view(node.shape, strides, node.offset, size, 0 if raw is None else raw.numel())
        if raw is None:
            raw = torch.empty(
                0, dtype=torch.uint8, device=self._devices[self._document.memory[node.memory].device]
            )
        at, rest = divmod(node.offset, size)
        if rest:
            raise _invalid(f"has a tensor of {node.dtype} at byte {node.offset}")
        made = torch.empty(0, dtype=dtype, device=raw.device)
        return made.set_(raw.untyped_storage(), at, node.shape, node.strides)

    def _array(self, node: fmt.Array) -> Any:
        dtype = numpy_dtype(node.dtype)
        raw = self._parts[node.memory]
        if raw is not None and raw.device != HOST:
            raise _invalid("has an array that is not in host memory")
        nbytes = 0 if raw is None else raw.numel()
        fmt.check_view(node.shape, node.strides, node.offset, dtype.itemsize, nbytes)
        made: Any
        if raw is None:
            made = np.empty(node.shape, dtype)
        else:
            made = np.ndarray(
                node.shape, dtype, buffer=raw.numpy(), offset=node.offset, strides=tuple(node.strides)
            )
        made.flags.writeable = node.writable
        return made

    def _generator(self, node: fmt.Generator) -> Any:
        device = self._devices[node.device]
        if not node.default:
            made = torch.Generator(device=device)
        elif device == HOST:
            made = torch.default_generator
        else:
            torch.cuda.init()
            made = torch.cuda.default_generators[device.index]
        made.set_state(torch.from_numpy(np.frombuffer(node.state, np.uint8).copy()))
        return made


def _scalar(dtype: str, raw: bytes) -> Any:
    kind = numpy_dtype(dtype)
    if len(raw) != kind.itemsize:
        raise _invalid(f"has a scalar {dtype!r} of {len(raw)} bytes")
    return np.frombuffer(raw, kind)[0]


def _devices(document: fmt.Document, arena: Arena) -> list[Any]:
    """The devices of the document as they are here: where its regions lie; else in the same order."""
    found: dict[int, Any] = {}
    for memory in document.memory:
        if memory.region is not None:
            found.setdefault(memory.device, arena.raw(memory.region).device)
    gpus = 0
    devices = []
    for number, kind in enumerate(document.devices):
        if kind not in ("cpu", "cuda"):
            raise _invalid(f"names a device {kind[:32]!r}; allowed: 'cpu', 'cuda'")
        devices.append(found.get(number, HOST if kind == "cpu" else torch.device("cuda", gpus)))
        gpus += kind == "cuda"
    return devices


def _invalid(why: str) -> ValidationError:
    return ValidationError(f"the host state {why}", field="host_state")
