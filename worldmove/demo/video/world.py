"""The running world: its state as a nested structure of tensors, as serving stacks have it, and a block.

A block is what autoregressive video diffusion does: room is made in the caches, the block's latents are
denoised pass by pass from noise of the world's own generator, and a clean pass writes the keys and values
that stay. After it the state is consistent. The decoder turns latents into pictures with a memory of the
block before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from worldmove.demo.frames import FRAMES_PER_LATENT, HEIGHT, WIDTH, Pixels
from worldmove.demo.player import KEYS, Key
from worldmove.demo.video.model import LayerCache, Network, Span
from worldmove.demo.video.shape import PATCH, Shape

ACTIONS = 8
"""How many blocks of the player's keys are remembered."""
ROOM_BYTES = 64 << 20
"""Of a state that is digested, so much at once."""

State = dict[str, Any]


def deterministic() -> None:
    """Has PyTorch compute equal bits for equal inputs; needs CUBLAS_WORKSPACE_CONFIG to be set, too."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def new_state(shape: Shape, device: torch.device, seed: int) -> State:
    """A world before its first block; its memory is zero.

    Returns:
        `layers`: a list of `{k, v, ck, cv, global_end_index, local_end_index}`; `latents` `[window, channels,
        height, width]` float32; `decoder` `[2, decoder, height, width]` float16; `rng`, the world's
        generator; `actions`, the last keys; `block`, blocks done.
    """
    text = (1, shape.text, shape.heads, shape.head_dim)
    height, width = shape.rows * PATCH, shape.columns * PATCH

    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    layers = [
        {
            "k": zeros(shape.cache, torch.bfloat16),
            "v": zeros(shape.cache, torch.bfloat16),
            "ck": zeros(text, torch.bfloat16),
            "cv": zeros(text, torch.bfloat16),
            "global_end_index": zeros((1,), torch.int64),
            "local_end_index": zeros((1,), torch.int64),
        }
        for _ in range(shape.layers)
    ]
    return {
        "layers": layers,
        "latents": zeros((shape.window, shape.channels, height, width), torch.float32),
        "decoder": zeros((2, shape.decoder, height, width), torch.float16),
        "rng": torch.Generator(device).manual_seed(seed),
        "actions": [],
        "block": 0,
    }


def state_digest(state: State) -> str:
    """XXH3-128, by stock xxhash on the host, of everything: tensors, generator, plain values; by name."""
    hasher = xxhash.xxh3_128()
    rooms: dict[bool, Tensor] = {}

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            on_gpu = value.device.type == "cuda"
            if on_gpu not in rooms:
                # Through pages that are new each time gigabytes take seconds; not through a pinned room.
                rooms[on_gpu] = torch.empty(ROOM_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
            for piece in value.detach().reshape(-1).view(torch.uint8).split(ROOM_BYTES):
                hasher.update(rooms[on_gpu][: piece.numel()].copy_(piece).numpy())
        elif isinstance(value, torch.Generator):
            hasher.update(value.get_state().numpy())
        elif isinstance(value, dict):
            for key in sorted(value):
                feed(value[key])
        elif isinstance(value, list):
            for each in value:
                feed(each)
        else:
            hasher.update(repr(value).encode())

    feed(state)
    return hasher.hexdigest()


class VideoWorld:
    """One world on a network and a state, which it changes in place; tensors are never replaced.

    Args:
        network: the weights.
        state: as `new_state` makes it, or as it came from another node.
    """

    def __init__(self, network: Network, state: State) -> None:
        self.state = state
        self._network = network
        self._shape = network.shape
        self._caches = [LayerCache(each["k"], each["v"], each["ck"], each["cv"]) for each in state["layers"]]
        device = network.device
        draw = torch.Generator(device).manual_seed(99)
        taps = 3 * self._shape.channels
        self._hidden = torch.randn(self._shape.decoder, taps, generator=draw, device=device) / taps**0.5
        self._picture = torch.randn(3, 3 * self._shape.decoder, generator=draw, device=device)

    @property
    def block(self) -> int:
        """Blocks done; 0 before the first."""
        return int(self.state["block"])

    def step(self, keys: Key) -> Pixels:
        """Generates the next block.

        Returns:
            `uint8[block * 4, HEIGHT, WIDTH, 3]`, on the host.
        """
        with torch.no_grad():
            return self._step(keys)

    def _step(self, keys: Key) -> Pixels:
        state, shape = self.state, self._shape
        if not self.block:
            self._network.read_text(self._caches)
        state["actions"] = [*state["actions"], int(keys)][-ACTIONS:]
        action = self._action()
        span = self._make_room()
        noisy = self._noise()
        for number, sigma in enumerate(shape.sigmas):
            flow = self._network.forward(noisy, sigma, action, span, self._caches)
            clean = noisy - sigma * flow
            if number + 1 < len(shape.sigmas):
                level = shape.sigmas[number + 1]
                noisy = (1 - level) * clean + level * self._noise()
        clean = clean.clamp(-8.0, 8.0)
        self._network.forward(clean, 0.0, action, span, self._caches)
        pictures = self._decode(clean)
        self._remember(clean)
        state["block"] += 1
        return pictures

    def _noise(self) -> Tensor:
        s = self._shape
        size = (s.block, s.channels, s.rows * PATCH, s.columns * PATCH)
        return torch.randn(size, generator=self.state["rng"], device=self._network.device)

    def _action(self) -> Tensor:
        pressed = [[float(bool(held & key)) for key in KEYS] for held in self.state["actions"]]
        mean = np.mean(np.array(pressed, dtype=np.float32), axis=0)
        latest = np.array(pressed[-1], dtype=np.float32)
        return torch.from_numpy(np.concatenate([mean, latest])).to(self._network.device)

    def _make_room(self) -> Span:
        """Where the next block goes: behind the others, over a ring's oldest, or after all moved left."""
        shape, frame = self._shape, self.block * self._shape.block
        tokens, total, kept = shape.block_tokens, shape.cache[1], shape.sink * shape.frame_tokens
        end = min(self.block * tokens, total)
        if end < total:
            return Span(end, end + tokens, frame)
        if shape.ring:
            turns = (self.block * tokens - kept) % (total - kept)
            return Span(kept + turns, total, frame)
        for cache in self._caches:
            for part in (cache.k, cache.v):
                part[:, kept : total - tokens] = part[:, kept + tokens :].clone()
        return Span(total - tokens, total, frame)

    def _remember(self, clean: Tensor) -> None:
        state, shape = self.state, self._shape
        latents = state["latents"]
        latents[: -shape.block] = latents[shape.block :].clone()
        latents[-shape.block :] = clean
        done = (self.block + 1) * shape.block_tokens
        for layer in state["layers"]:
            layer["global_end_index"].fill_(done)
            layer["local_end_index"].fill_(min(done, shape.cache[1]))

    def _decode(self, clean: Tensor) -> Pixels:
        """Pictures of one block; the decoder's hidden frames of its end are remembered."""
        shape = self._shape
        before = self.state["latents"][-2:]
        stream = torch.cat((before, clean))
        taps = torch.cat([stream[k : k + shape.block] for k in range(3)], dim=1)
        hidden = torch.tanh(torch.einsum("oc,fchw->fohw", self._hidden, taps))
        memory = torch.cat((self.state["decoder"].float(), hidden))
        mixed = torch.cat([memory[k : k + shape.block] for k in range(3)], dim=1)
        colour = torch.sigmoid(torch.einsum("oc,fchw->fohw", self._picture, mixed) / shape.decoder**0.5)
        self.state["decoder"].copy_(memory[-2:])
        rising = torch.arange(1, FRAMES_PER_LATENT + 1, device=colour.device).view(1, -1, 1, 1, 1)
        bright = colour.unsqueeze(1) * (0.5 + 0.5 * rising / FRAMES_PER_LATENT)
        small = functional.interpolate(bright.flatten(0, 1), size=(HEIGHT, WIDTH), mode="nearest")
        pictures: Pixels = (small.permute(0, 2, 3, 1) * 255).to(torch.uint8).cpu().numpy()
        return pictures
