"""A small PyTorch stack with all that real ones keep beside their caches, and how two states are compared.

`step` is a pure function of a state: run twice from the same state, it makes the same bits. What it does to a
state is what real stacks do: it writes caches in place, replaces a tensor object in every block, appends to a
history, shifts lists, draws from generators, and fills a cross-attention cache on first use.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
import torch

from worldmove.manifest import Region, numpy_dtype
from worldmove.torch import format as fmt
from worldmove.torch import state_regions
from worldmove.torch.arena import Arena
from worldmove.torch.build import build
from worldmove.torch.pack import pack

LAYERS = 3
TOKENS, HEADS, DIM = 48, 2, 8
NEW = 6
POOL = 4


def make_state(seed: int = 1) -> dict[str, Any]:
    """A state before its first block."""
    torch.set_num_threads(1)
    noise = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, 64, generator=noise)
    both = torch.zeros(2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    history = np.zeros((10, 3), dtype=np.float32)
    return {
        "kv": [
            {
                "k": torch.zeros(1, TOKENS, HEADS, DIM, dtype=torch.bfloat16),
                "v": torch.zeros(1, HEADS, TOKENS, DIM, dtype=torch.bfloat16).transpose(1, 2),
                "global_end_index": torch.tensor([0]),
                "local_end_index": torch.tensor([0], dtype=torch.int64),
            }
            for _ in range(LAYERS)
        ],
        "both": both,
        "first": both[0],
        "tail": both[1, -NEW:],
        "again": both,
        "cross": [{"k": torch.zeros(5, 8), "is_init": False} for _ in range(LAYERS)],
        "vae": {"feat": [None, torch.zeros(3, 4, dtype=torch.float16), "Rep"], "idx": [0]},
        "noise": noise,
        "same_noise": [noise],
        "pool": pool,
        "next_noise": pool[0],
        "history": history,
        "shared": torch.from_numpy(history),
        "backwards": history[::-1, 1],
        "latents": [],
        "evict_idx": [0, 1, 2, 3],
        "actions": [("forward", 0.5), ("left", -0.0)],
        "limits": {1: float("inf"), (0, "k"): float("nan"), None: b"\x00\xff"},
        "counter": 1 << 70,
        "mask": torch.zeros(7, dtype=torch.bool),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "np_scalar": np.int64(7),
        "spread": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
    }


def step(state: dict[str, Any]) -> None:
    """Generates a block."""
    noise = state["noise"]
    latent = torch.randn(2, 16, generator=noise) + state["next_noise"][:16]
    for layer, cache in enumerate(state["kv"]):
        k, v = cache["k"], cache["v"]
        k[:, :-NEW] = k[:, NEW:].clone()
        k[:, -NEW:] = (latent.sum() + layer).to(torch.bfloat16) * torch.randn(
            NEW, HEADS, DIM, generator=noise
        ).to(torch.bfloat16)
        v.add_(k)
        cache["global_end_index"] += NEW
        cache["local_end_index"].fill_(min(TOKENS, int(cache["global_end_index"])))
        cross = state["cross"][layer]
        if not cross["is_init"]:
            cross["k"], cross["is_init"] = torch.randn(5, 8, generator=noise), True
    state["first"] += state["kv"][0]["k"][0]
    state["tail"].mul_(0.5).add_(1)
    state["vae"]["feat"][1] = state["vae"]["feat"][1] * 0.5 + latent[0, :4].to(torch.float16)
    state["vae"]["idx"][0] += 1
    state["history"][1:] = state["history"][:-1].copy()
    state["shared"][0] = latent[0, :3]
    state["latents"].append(latent)
    state["evict_idx"].append(state["evict_idx"].pop(0) + 4)
    state["actions"].append(("right", float(latent[0, 0])))
    state["next_noise"] = state["pool"][state["vae"]["idx"][0] % POOL]
    state["counter"] += 1
    state["mask"][state["vae"]["idx"][0] % 7] ^= True


def memory(value: Any) -> tuple[int, int]:
    """Address of a tensor's or array's first element, and of the storage that it belongs to."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.untyped_storage().data_ptr()
    return value.ctypes.data, 0


def assert_same(mine: Any, theirs: Any) -> None:
    """Equal types, values and bits; dtypes, shapes and strides; and the same aliases among them.

    Two tensors alias each other if they lie in one block: then they lie equally far apart on both sides.
    """
    pairs: list[tuple[str, Any, Any]] = []
    _compare(mine, theirs, "", pairs)
    for number, (path, a, b) in enumerate(pairs):
        for other, c, d in pairs[:number]:
            assert (a is c) == (b is d), f"{path} and {other}: one object"
            if isinstance(a, torch.Tensor) and isinstance(c, torch.Tensor) and a.numel() and c.numel():
                one = a.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
                assert one == (b.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()), (
                    path,
                    other,
                )
                if one:
                    assert a.data_ptr() - c.data_ptr() == b.data_ptr() - d.data_ptr(), (path, other)
            elif isinstance(a, np.ndarray | torch.Tensor) and isinstance(c, np.ndarray | torch.Tensor):
                one = np.shares_memory(np.asarray(_numpy(a)), np.asarray(_numpy(c)))
                assert one == np.shares_memory(np.asarray(_numpy(b)), np.asarray(_numpy(d))), (path, other)


def _numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    return value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


def _compare(a: Any, b: Any, path: str, pairs: list[tuple[str, Any, Any]]) -> None:
    assert type(a) is type(b), f"{path}: {type(a)} {type(b)}"
    if isinstance(a, dict):
        assert repr(list(a)) == repr(list(b)), path
        for (key, one), other in zip(a.items(), b.values(), strict=True):
            _compare(one, other, f"{path}.{key}", pairs)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            _compare(one, other, f"{path}.{number}", pairs)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), path
        assert bits(a) == bits(b), path
        pairs.append((path, a, b))
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.strides, a.flags.writeable) == (
            *(b.dtype, b.shape, b.strides),
            b.flags.writeable,
        ), path
        assert a.tobytes() == b.tobytes(), path
        pairs.append((path, a, b))
    elif isinstance(a, torch.Generator):
        assert torch.equal(a.get_state(), b.get_state()), path
        pairs.append((path, a, b))
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), path
    else:
        assert a == b, path


def bits(tensor: Any) -> bytes:
    """The elements of a tensor in its own order."""
    dense = tensor.contiguous().reshape(-1)
    return bytes(dense.view(torch.uint8).numpy().tobytes())


class PlainMemory:
    """Regions in plain memory, viewed as a world shows them."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.regions = {region.name: region for region in regions}
        self.memory = {region.name: mmap.mmap(-1, max(region.nbytes, 1)) for region in regions}

    def __call__(self, name: str, like: str | None) -> Any:
        region = self.regions[name]
        return np.ndarray(region.shape, numpy_dtype(region.dtype), buffer=self.memory[name])


def arena_for(state: Any, **more: Any) -> Arena:
    """Plain memory with the regions of a state."""
    regions = state_regions(state, **more)
    return Arena(PlainMemory(regions), regions)


def written(state: Any, arena: Arena) -> bytes:
    """A state's host state, once its tensors lie in the arena."""
    packed = pack(state, arena, None)
    assert packed is not None
    return fmt.encode(packed.document)


def again(state: Any, **more: Any) -> Any:
    """A state that has gone through regions and host state, into other memory."""
    arena = arena_for(state, **more)
    data = written(state, arena)
    other = arena_for(state, **more)
    for name in arena.regions:
        other.raw(name).copy_(arena.raw(name))
    return build(fmt.decode(data), other)
