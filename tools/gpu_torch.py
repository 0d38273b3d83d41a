"""Checks `worldmove.torch` on a GPU, without nodes: a CUDA state is packed, restored elsewhere, and compared.

    python tools/gpu_torch.py

Prints one JSON document with what held; exit code 1 if something did not. It needs PyTorch with CUDA.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from worldmove.manifest import Region
from worldmove.torch import format as fmt
from worldmove.torch import state_regions
from worldmove.torch.arena import Arena
from worldmove.torch.build import build
from worldmove.torch.pack import pack

ROWS, COLUMNS = 4096, 1024


def memory(regions: tuple[Region, ...]) -> Arena:
    """Regions in plain memory of the devices that they name, poisoned."""
    made = {
        region.name: torch.full(
            (region.nbytes,), 0xA5, dtype=torch.uint8, device="cpu" if region.device == "host" else "cuda:0"
        )
        for region in regions
    }
    return Arena(lambda name, like: made[name] if like else made[name].numpy(), regions)


def make_state() -> dict[str, Any]:
    """Aliases, strides, generators and both kinds of memory."""
    cache = torch.randn(ROWS, COLUMNS, device="cuda:0", dtype=torch.bfloat16)
    return {
        "cache": cache,
        "again": cache,
        "row": cache[7],
        "turned": cache.t(),
        "index": torch.tensor([5], device="cuda:0"),
        "host": torch.arange(10),
        "empty": torch.empty(0, 3, device="cuda:0"),
        "noise": torch.Generator("cuda:0").manual_seed(5),
        "default": torch.cuda.default_generators[0],
        "latents": [],
    }


def main() -> int:
    """Runs the checks."""
    torch.cuda.init()
    state = make_state()
    regions = state_regions(state)
    here, there = memory(regions), memory(regions)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Still running when the state is asked for: it must be waited for.
        for _ in range(200):
            state["cache"].mul_(1.001)
        state["latents"].append(torch.full((1000,), 3.0, device="cuda:0"))
    packed = pack(state, here, None)
    torch.cuda.synchronize()
    if packed is None:
        return 1
    for name in here.regions:
        there.raw(name).copy_(here.raw(name))
    wanted = torch.randn(33, device="cuda:0", generator=state["noise"])
    default = torch.randn(33, device="cuda:0")
    back = build(fmt.decode(fmt.encode(packed.document)), there)
    base = there.raw("row").data_ptr()  # what shares memory is one region, named by its shortest path
    held = {
        "bits": all(
            torch.equal(back[name], state[name]) for name in ("cache", "row", "turned", "index", "host")
        ),
        "appeared": torch.equal(back["latents"][0], state["latents"][0]),
        "in place": back["cache"].data_ptr() == base and back["row"].data_ptr() == base + 7 * COLUMNS * 2,
        "one object": back["again"] is back["cache"],
        "strides": back["turned"].stride() == state["turned"].stride(),
        "empty": (back["empty"].shape, back["empty"].device.type) == ((0, 3), "cuda"),
        "generator": torch.equal(torch.randn(33, device="cuda:0", generator=back["noise"]), wanted),
        "default generator": torch.equal(torch.randn(33, device="cuda:0"), default),
    }
    print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, **held}, indent=2))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
