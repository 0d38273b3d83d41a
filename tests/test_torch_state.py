"""Nested states taken apart and put together again: structure, bits, strides and aliases."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest

from worldmove.errors import ValidationError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install worldmove[torch]")

from torch_kit import again, arena_for, assert_same, make_state, step, written  # noqa: E402

from worldmove.torch import format as fmt  # noqa: E402
from worldmove.torch import state_regions, synchronise  # noqa: E402
from worldmove.torch.build import build  # noqa: E402
from worldmove.torch.pack import pack  # noqa: E402


def test_a_whole_state_comes_back_and_goes_on_alike() -> None:
    state, twin = make_state(), make_state()
    for _ in range(3):
        state = again(state)
        assert_same(state, twin)
        for _ in range(4):
            step(state)
            step(twin)
    assert_same(again(state), twin)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        (1 << 63) - 1,
        -(1 << 63),
        1 << 63,
        -(1 << 64) - 1,
        1 << 4000,
        0.0,
        -0.0,
        math.inf,
        5e-324,
        "",
        "wörld\n",
        b"\x00",
        [],
        (),
        {},
        [[], [()]],
        {1: "i", "1": "s", None: 0, b"k": 1, 2.5: 2, (0, "a"): 3, (): 4},
        np.float32(1.5),
        np.bool_(True),
        np.int64(-3),
        np.datetime64("2020-01-01"),
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    back = again({"v": value, "t": torch.zeros(1)})["v"]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_a_nan_keeps_its_bits() -> None:
    nan = float(np.frombuffer(b"\x01\x02\x03\x04\x05\x06\xf8\x7f", np.float64)[0])
    assert_same(again([nan]), [nan])


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    ],
)
def test_every_type_of_tensor(dtype: str) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % 2 if dtype == "bool" else torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype))
    assert_same(again({"t": tensor, "part": tensor[1:2]}), {"t": tensor, "part": tensor[1:2]})


@pytest.mark.parametrize("dtype", ["float32", ">f4", "bool", "S3", "U2", "M8[s]", "complex64", "float16"])
def test_every_type_of_array(dtype: str) -> None:
    array = np.arange(6 * np.dtype(dtype).itemsize, dtype=np.uint8).view(np.uint8) % 2
    whole = array.view(dtype).reshape(2, 3)
    fixed = whole.copy()
    fixed.flags.writeable = False
    state = {"a": whole, "t": whole.T, "back": whole[::-1, ::-2], "fixed": fixed, "none": whole[:, :0]}
    assert_same(again(state), state)


def test_shapes_and_strides() -> None:
    base = torch.arange(120.0)
    state = [
        base.view(2, 3, 4, 5).permute(3, 1, 0, 2),
        base[7:].as_strided((3, 3), (1, 2)),
        base[:1].expand(4, 4),
        base[3],
        base[5:5],
        torch.empty(3, 0, 2).transpose(0, 2),
        torch.zeros(()),
    ]
    assert_same(again(state), state)


def test_containers_with_two_names_stay_one() -> None:
    inner: dict[str, Any] = {"t": torch.ones(2)}
    back = again({"a": [inner, inner], "b": (inner,), "t": inner["t"]})
    assert back["a"][0] is back["a"][1] is back["b"][0]
    assert back["t"] is inner["t"] or back["a"][0]["t"] is back["t"]
    back["b"][0]["t"].add_(1)
    assert torch.equal(back["t"], torch.full((2,), 2.0))


def test_generators_go_on_where_they_were() -> None:
    one = torch.Generator().manual_seed(3)
    torch.randn(5, generator=one)  # an odd number: half of a pair of normals waits in it
    back = again({"g": one, "same": [one]})
    assert back["g"] is back["same"][0]
    assert back["g"] is not one
    assert torch.equal(torch.randn(9, generator=back["g"]), torch.randn(9, generator=one))


def test_the_default_generator_is_restored_in_place() -> None:
    torch.manual_seed(11)
    arena = arena_for({"g": torch.default_generator})
    data = written({"g": torch.default_generator}, arena)
    wanted = torch.randn(7)
    assert build(fmt.decode(data), arena)["g"] is torch.default_generator
    assert torch.equal(torch.randn(7), wanted)


def test_regions_are_named_by_their_shortest_path_in_any_order() -> None:
    both = torch.zeros(4, 6, dtype=torch.bfloat16)
    one = {"view": {"of": both[0]}, "kv": both, "odd key!": torch.zeros(3), 7: np.zeros(2)}
    other = dict(reversed(one.items()))
    regions = state_regions(one, spill_bytes=0, stride_bytes={"k*": 24})
    assert regions == state_regions(other, spill_bytes=0, stride_bytes={"k*": 24})
    assert [(r.name, r.dtype, r.shape, r.stride_bytes) for r in regions] == [
        ("7", "float64", (2,), None),
        ("kv", "bfloat16", (4, 6), 24),
        ("odd_key_", "float32", (3,), None),
    ]
    assert [r.name for r in state_regions(one, rank=2)][-1] == "r2:~spill.0"
    assert [r.name for r in state_regions(torch.zeros(1), spill_bytes=0)] == ["state"]


def test_names_that_would_be_equal_or_too_long() -> None:
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1), 1: torch.zeros(1), "1": torch.zeros(1)}
    state["x" * 300] = torch.zeros(1)
    names = [region.name for region in state_regions(state, spill_bytes=0)]
    assert len(set(names)) == 5
    assert max(map(len, names)) <= 128
    assert_same(again(state), state)


def test_what_lies_in_the_arena_is_used_in_place() -> None:
    state = make_state()
    arena = arena_for(state)
    placed = build(fmt.decode(written(state, arena)), arena)
    addresses = placed["kv"][0]["k"].data_ptr(), placed["history"].ctypes.data
    step(placed)
    data = written(placed, arena)
    back = build(fmt.decode(data), arena)
    assert (back["kv"][0]["k"].data_ptr(), back["history"].ctypes.data) == addresses
    assert back["cross"][0]["k"].data_ptr() == arena.raw("cross.0.k").data_ptr(), (
        "replaced: copied under its name"
    )
    assert_same(back, placed)


def test_spilled_tensors_keep_their_place_and_leave_gaps_to_others() -> None:
    state: dict[str, Any] = {"k": torch.zeros(4), "more": []}
    arena = arena_for(state, spill_bytes=4096)
    state["more"] = [torch.full((size,), float(size)) for size in (128, 256, 128)]
    one = build(fmt.decode(written(state, arena)), arena)
    del one["more"][1]
    one["more"].append(torch.full((200,), 7.0))
    two = build(fmt.decode(written(one, arena)), arena)
    assert_same(two, one)
    base = arena.raw("~spill.0").data_ptr()
    assert [t.data_ptr() - base for t in two["more"]] == [0, 1536, 512]
    assert two["more"][0].data_ptr() == one["more"][0].data_ptr()


def test_too_little_room_is_told_before_anything_is_copied() -> None:
    state: dict[str, Any] = {"k": torch.zeros(4), "more": torch.ones(100)}
    arena = arena_for({"k": torch.ones(4)}, spill_bytes=399)
    assert pack(state, arena, None) is None
    wanted: list[dict[Any, int]] = []

    def grow(room: dict[Any, int]) -> Any:
        wanted.append(room)
        return arena_for({"k": torch.ones(4)}, spill_bytes=512)

    assert pack(state, arena, grow) is not None
    assert wanted == [{torch.device("cpu"): 512}]


def circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: Any = 0
    for _ in range(100):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "is a builtins.object; allowed: dict"),
        ({1, 2}, "is a builtins.set"),
        (deque([1]), "is a collections.deque"),
        (OrderedDict(), "is a collections.OrderedDict"),
        (lambda: 0, "is a builtins.function"),
        (torch.float32, "is a torch.dtype"),
        (torch.zeros(2).to_sparse(), "is not strided"),
        (torch.zeros(2, device="meta"), "lies on meta"),
        (torch.zeros(2, requires_grad=True), "takes part in autograd"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"),
        (np.array([object()]), "has elements of type object"),
        (np.zeros(2, dtype=[("a", "i4")]), "has elements of type"),
        ({frozenset(): 1}, "has the key"),
        ({(1, (2,)): 1}, "has the key"),
        (circle(), "contains itself"),
        (deep(), "lies deeper"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_its_path(value: Any, why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        state_regions({"outer": [value]})
    assert why in refused.value.message
    assert "state['outer.0" in refused.value.message


def test_a_text_that_is_no_unicode() -> None:
    state = {"s": "\ud800"}
    with pytest.raises(ValidationError, match="text"):
        written(state, arena_for(state))


def test_waiting_for_devices_passes_the_host_by() -> None:
    synchronise([torch.device("cpu")])
