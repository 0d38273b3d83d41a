"""Host states from elsewhere: whatever the bytes are, they become a state inside the regions, or an error."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmove.errors import ValidationError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install worldmove[torch]")

from torch_kit import arena_for, make_state, step, written  # noqa: E402

from worldmove.manifest import MAX_HOST_STATE  # noqa: E402
from worldmove.torch import format as fmt  # noqa: E402
from worldmove.torch.build import build  # noqa: E402

STATE = {"k": torch.zeros(4, 4), "a": np.zeros(8, np.uint8)}
ARENA = arena_for(STATE, spill_bytes=0)
WHOLE = fmt.Memory("k", 0, 0, 64)
BYTES = fmt.Memory("a", 0, 0, 8)


def document(*nodes: Any, memory: Any = (WHOLE, BYTES), devices: Any = ("cpu",), **more: Any) -> fmt.Document:
    fields = {"magic": fmt.MAGIC, "version": fmt.VERSION, **more}
    return fmt.Document(devices=list(devices), memory=list(memory), nodes=list(nodes), **fields)


def read(data: bytes) -> Any:
    return build(fmt.decode(data), ARENA)


def test_the_document_is_as_it_is_written_down() -> None:
    """docs/torch.md; other implementations read these bytes."""
    state = {"k": STATE["k"], "n": [1, None, -0.0]}
    assert msgspec.msgpack.decode(written(state, ARENA)) == [
        *("worldmove-state", 1, ["cpu"], [["k", 0, 0, 64]]),
        [
            ["s", "k"],
            ["s", "n"],
            ["t", "float32", [4, 4], [4, 1], 0, 0],
            ["i", 1],
            ["n"],
            ["f", b"\0\0\0\0\0\0\0\x80"],
            ["l", [3, 4, 5]],
            ["d", [0, 1], [2, 6]],
        ],
    ]


T = fmt.Tensor
A = fmt.Array


@pytest.mark.parametrize(
    "bad",
    [
        document(),
        document(fmt.Nothing(), magic="x"),
        document(fmt.Nothing(), version=2),
        document(fmt.List([0])),
        document(fmt.List([-1])),
        document(fmt.Nothing(), fmt.Tuple([1])),
        document(fmt.Nothing(), fmt.Dict([0], [])),
        document(fmt.Nothing(), fmt.Dict([0, 0], [0, 0])),
        document(fmt.List([]), fmt.Dict([0], [0])),
        document(fmt.Nothing(), fmt.Tuple([0]), fmt.Tuple([1]), fmt.Dict([2], [0])),
        document(fmt.Bool(True), fmt.Int(1), fmt.Dict([0, 1], [0, 1])),
        document(fmt.Float(b"1234567")),
        document(T("float32", [4, 4], [4, 1], 2, 0)),
        document(T("float32", [4, 4], [4, 1], -1, 0)),
        document(T("float32", [5, 4], [4, 1], 0, 0)),
        document(T("float32", [4, 4], [4, 1], 0, 4)),
        document(T("float32", [4, 4], [4, 1], 0, -4)),
        document(T("float32", [1], [1], 0, 2)),
        document(T("float32", [4], [-1], 0, 60)),
        document(T("float32", [-1], [1], 0, 0)),
        document(T("float32", [4, 4], [4], 0, 0)),
        document(T("float32", [1 << 62, 4], [0, 0], 0, 0)),
        document(T("float32", [2, 2], [1 << 63, 0], 0, 0)),
        document(T("float32", [0], [1], 0, 68)),
        document(T("float32", [1] * 65, [1] * 65, 0, 0)),
        document(T("nothing", [1], [1], 0, 0)),
        document(T("load", [1], [1], 0, 0)),
        document(T("__class__", [1], [1], 0, 0)),
        document(T("x" * 33, [1], [1], 0, 0)),
        document(A("uint8", [9], [1], 1, 0, True)),
        document(A("uint8", [8], [-1], 1, 6, True)),
        document(A("object", [1], [8], 1, 0, True)),
        document(A("i4,i4", [1], [8], 1, 0, True)),
        document(fmt.Scalar("int64", b"1234567")),
        document(fmt.Scalar("O", b"12345678")),
        document(fmt.Generator(0, b"", default=False)),
        document(fmt.Generator(0, bytes(5056), default=False)),
        document(fmt.Generator(0, bytes(16), default=True)),
        document(fmt.Generator(1, b"", default=False)),
        document(fmt.Nothing(), devices=["npu"]),
        document(fmt.Nothing(), memory=[fmt.Memory("k", 1, 0, 64)]),
        document(fmt.Nothing(), memory=[fmt.Memory("k", 0, 0, 65)]),
        document(fmt.Nothing(), memory=[fmt.Memory("k", 0, 64, 1)]),
        document(fmt.Nothing(), memory=[fmt.Memory("k", 0, -1, 2)]),
        document(fmt.Nothing(), memory=[fmt.Memory("k", 0, 8, -4)]),
        document(fmt.Nothing(), memory=[fmt.Memory("nobody", 0, 0, 0)]),
        document(T("float32", [1], [1], 0, 0), memory=[fmt.Memory(None, 0, 0, 64)]),
        document(A("uint8", [1], [1], 0, 0, True), memory=[fmt.Memory(None, 0, 0, 64)]),
    ],
    ids=repr,
)
def test_documents_that_lie(bad: fmt.Document) -> None:
    with pytest.raises(ValidationError, match=r"host state|dtype"):
        read(msgspec.msgpack.encode(bad))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93", b"\x91" * 100_000, bytes(MAX_HOST_STATE + 1)])
def test_bytes_that_are_no_document(data: bytes) -> None:
    with pytest.raises(ValidationError):
        read(data)


def travelled() -> Any:
    state = make_state()
    arena = arena_for(state)
    step(state)
    return arena, written(state, arena)


MOVED, GOOD = travelled()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_host_states(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    try:
        build(fmt.decode(bytes(data)), MOVED)
    except ValidationError:
        return
